"""DeepSpeed's ``inference_all_reduce`` and ``all_reduce`` on the CPU, beside torch's over gloo, and MPIs."""

from __future__ import annotations

import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_plugin_sdk.bench import program
from ds_plugin_sdk.bench.timing import Spread, in_turns, spread
from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.settings import child_environment

OURS = "inference_all_reduce"
DTYPES = ("float32", "bfloat16")
SIZES = (1024, 16 * 1024, 1024 * 1024)  # hidden size 1024: a token's activations, 16 tokens', a long prompt's
TURNS = 66  # over the number of ranks; with each of the calls first
CALLS = 5  # one after the other, as a model's layers have them
ROW, ROWS = 200, 9  # over and over
OVER_AND_OVER = f"{OURS}, over and over"
COUNTS = (2, 4, 8, 16)

# Of Open MPI's alone: as root, and more ranks than cores.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@dataclass(frozen=True)
class Row:
    """One call on one tensor, as rank 0 saw it.

    Attributes:
        call: whose; "over and over", and MPIs', is 200 calls with nothing in between, else it is one of five after a
            barrier.
        elements: of the tensor.
        dtype: of the tensor.
        microseconds: median wall time of a call.
        times: speed of `inference_all_reduce` in multiples of this call's, median over the turns.
        spread: of the microseconds.
    """

    call: str
    elements: int
    dtype: str
    microseconds: float
    times: float | None = None
    spread: dict[str, Spread] = field(default_factory=dict)


@dataclass(frozen=True)
class _Ranks:
    ranks: int


@dataclass(frozen=True)
class RanksRow(Row, _Ranks):
    """Over how many ranks, and a `Row`: in this order, for what was measured stands before its figures."""


def by_ranks(counts: Sequence[int] = COUNTS, mpis: Sequence[Path] = ()) -> Iterator[RanksRow]:
    """Ours over and over, torch's over gloo, and MPIs', for several numbers of ranks; arguments as those of `run`."""
    for ranks in counts:
        for row in run(ranks, mpis=mpis):
            if row.dtype == "float32" and row.call not in (OURS, "deepspeed.comm.all_reduce"):
                yield RanksRow(ranks, **vars(row))


def run(ranks: int = 2, own: bool = False, mpis: Sequence[Path] = ()) -> list[Row]:
    """Measure on some ranks of this machine, one thread each.

    Args:
        ranks: how many processes.
        own: measure DeepSpeed's own op, on its in-tree CPU accelerator, in place of the CPU plugin's.
        mpis: folders that MPIs and mpi4py were installed into by ``pip install --prefix``; their Allreduce of float32
            is measured afterwards, not in turns.

    Raises:
        RuntimeError: a rank failed; the text is what the ranks printed.
        SdkError: an MPI is not there.
    """
    for prefix in mpis:
        if not (prefix / "bin" / "mpirun").exists():
            raise SdkError(
                "this MPI cannot be compared with",
                why=f"{prefix} has no bin/mpirun",
                hint="pip install --prefix FOLDER mpich mpi4py, and name FOLDER",
            )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        rows = _of_torch(ranks, own, file)
        return rows + [row for prefix in mpis for row in _of_mpi(prefix.absolute(), ranks, rows, file)]


def _of_torch(ranks: int, own: bool, file: Path) -> list[Row]:
    choice = {"DS_PLUGIN_AUTOLOAD": "0", "LOCAL_SIZE": str(ranks)} if own else {}
    environment = child_environment(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", **choice)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    _start([*launcher, "-m", __name__, str(file)], environment)
    return [Row(**row) for row in json.loads(file.read_text(encoding="utf-8"))]


def _of_mpi(prefix: Path, ranks: int, rows: Sequence[Row], file: Path) -> Iterator[Row]:
    """An MPI's rows, beside those of `OVER_AND_OVER`: after its barrier ranks start closer than after gloo's."""
    packages = sysconfig.get_path("purelib", vars={"base": str(prefix)})
    environment = child_environment(LD_LIBRARY_PATH=str(prefix / "lib"), **_OPEN_MPI)
    environment["PATH"] = os.pathsep.join([str(prefix / "bin"), environment["PATH"]])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [packages, environment.get("PYTHONPATH")]))
    given = [str(file), json.dumps(SIZES), str(ROWS), str(ROW)]
    _start(
        ["mpirun", "-n", str(ranks), sys.executable, "-m", "ds_plugin_sdk.bench.mpi_all_reduce", *given], environment
    )
    found = json.loads(file.read_text(encoding="utf-8"))
    ours = {row.elements: row.microseconds for row in rows if row.call == OVER_AND_OVER and row.dtype == "float32"}
    for elements, seconds in found["seconds"].items():
        row = _row(f"Allreduce of {found['library']}", torch.empty(int(elements)), "float32", seconds, None)
        yield replace(row, times=row.microseconds / ours[int(elements)])


def _start(command: list[str], environment: dict[str, str]) -> None:
    done = program.run(command, environment)
    if done.returncode:
        raise RuntimeError(f"a rank failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def main(file: Path) -> None:
    """What each rank does; rank 0 writes the rows."""
    import deepspeed
    from deepspeed import comm

    deepspeed.init_distributed("gloo", verbose=False)
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        OURS: comm.inference_all_reduce,
        "deepspeed.comm.all_reduce": comm.all_reduce,
        "torch.distributed.all_reduce": torch.distributed.all_reduce,
    }
    rows = [
        row
        for dtype in DTYPES
        for elements in SIZES
        for row in _measure(calls, torch.zeros(elements, dtype=getattr(torch, dtype)), dtype)
    ]
    if torch.distributed.get_rank() == 0:
        file.write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")
    torch.distributed.destroy_process_group()


def _measure(calls: dict[str, Callable[[torch.Tensor], Any]], tensor: torch.Tensor, dtype: str) -> Iterator[Row]:
    """The rows of a tensor. Who is first changes, so that none always follows the same one."""
    row = [_seconds(calls[OURS], tensor, ROW) for _ in range(ROWS)]
    yield _row(OVER_AND_OVER, tensor, dtype, row, None)
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    turns = max(TURNS // torch.distributed.get_world_size(), 3)
    for first in range(len(names)):
        order = names[first:] + names[:first]
        for name, taken in in_turns({n: partial(_seconds, calls[n], tensor, CALLS) for n in order}, turns).items():
            times[name] += taken
    for name, taken in times.items():
        ratio = statistics.median(theirs / ours for theirs, ours in zip(taken, times[OURS], strict=True))
        yield _row(name, tensor, dtype, taken, None if name == OURS else ratio)


def _row(call: str, tensor: torch.Tensor, dtype: str, seconds: list[float], times: float | None) -> Row:
    taken = [1e6 * each for each in seconds]
    return Row(call, tensor.numel(), dtype, statistics.median(taken), times, {"microseconds": spread(taken)})


def _seconds(call: Callable[[torch.Tensor], Any], tensor: torch.Tensor, count: int) -> float:
    """Of one call among several after a barrier."""
    torch.distributed.barrier()
    start = time.perf_counter()
    for _ in range(count):
        call(tensor)
    return (time.perf_counter() - start) / count


if __name__ == "__main__":
    main(Path(sys.argv[1]))
