"""MPI's Allreduce on the ranks of this machine: what ``mpirun`` of ``sdk bench all-reduce --mpi`` starts on each rank.

    mpirun -n 4 python -m ds_plugin_sdk.bench.mpi_all_reduce rows.json

Rank 0 writes which MPI it is, and the seconds of a call for each number of float32 elements.
"""

from __future__ import annotations

import json
import sys
import time
from array import array
from pathlib import Path
from typing import Any


def main(file: Path, sizes: list[int], turns: int, calls: int) -> None:
    """Measure; arguments as in `ds_plugin_sdk.bench.all_reduce`."""
    from mpi4py import MPI

    seconds = {size: [_seconds(MPI, array("f", bytes(4 * size)), calls) for _ in range(turns)] for size in sizes}
    if MPI.COMM_WORLD.Get_rank() == 0:
        library = " ".join(MPI.Get_library_version().rstrip("\0").splitlines()[0].partition(",")[0].split())
        file.write_text(json.dumps({"library": library, "seconds": seconds}), encoding="utf-8")


def _seconds(mpi: Any, data: array[float], calls: int) -> float:
    """Of one call among several after a barrier."""
    mpi.COMM_WORLD.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, data)
    return (time.perf_counter() - start) / calls


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
