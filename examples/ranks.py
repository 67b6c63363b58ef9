"""Run a script as a rank of whichever launcher started this: srun, mpirun of Open MPI, MPICH or Intel MPI, or jsrun.

    srun python examples/ranks.py examples/tiny_gpt/train.py --steps 100

torch and DeepSpeed read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_SIZE; each launcher says the same by other names. The
job script sets MASTER_ADDR and MASTER_PORT, which no launcher knows. With that DeepSpeed needs no mpi4py.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

# Rank, ranks, rank on this machine, ranks on this machine. A job of Slurm may run mpirun, so srun's come last.
LAUNCHERS = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}
WANTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What torch and DeepSpeed read, by what the launcher has set."""
    for names in LAUNCHERS.values():
        if all(name in environment for name in names):
            return {wanted: environment[name] for wanted, name in zip(WANTED, names, strict=True)}
    known = "; ".join(f"{launcher}: {', '.join(names)}" for launcher, names in LAUNCHERS.items())
    sys.exit(f"no launcher has said which rank this is. Looked for {known}. srun wants --ntasks-per-node.")


def main() -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing or len(sys.argv) < 2:
        sys.exit(f"{', '.join(missing) or 'a script'} missing: see the job scripts beside {__file__}")
    os.environ.update(variables(os.environ))
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)  # as if Python had been given the script
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
