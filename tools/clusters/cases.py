"""The launchers that are tried: their commands, what has to come of them, and where DeepSpeed itself falls short."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RANK = Path(__file__).with_name("rank.py")
# For launchers that tell torch nothing.
RANKS = REPOSITORY / "examples" / "ranks.py"
# Packages of PyPI that are whole MPIs, each with mpi4py: see the Makefile.
MPIS = REPOSITORY / "build" / "mpi"


@dataclass(frozen=True)
class Defect:
    """What DeepSpeed or torch does wrong, and the line of a file of its that does."""

    what: str
    file: str
    line: str

    def __str__(self) -> str:
        package, _, rest = self.file.partition("/")
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None, package
        source = Path(spec.origin).parent / rest
        for number, text in enumerate(source.read_text(encoding="utf-8").splitlines(), start=1):
            if self.line in text:
                return f"{self.what} ({self.file}:{number})"
        raise LookupError(f"{self.file} has no '{self.line}' any more: {self.what}?")


@dataclass(frozen=True)
class Case:
    """One launcher as a user calls it.

    Attributes:
        name: of the row.
        command: what comes before the program; ``{hosts}`` is a hostfile of both nodes with two slots each.
        version: the command that says its version.
        program: what is started, before the folder.
        ranks: of each node.
        cores: "all" if each rank may use all, "own" if no two of a node have one in common, or which ones.
        threads: of each rank; None: its share of the cores, or as many as its own.
        mpi: folder of `MPIS` whose programs come first in PATH.
        argument: whether the program gets ``--local_rank``.
        defects: checks that DeepSpeed, torch or an MPI fails, and why.
    """

    name: str
    command: tuple[str, ...]
    version: tuple[str, ...]
    program: tuple[str, ...] = (str(RANK),)
    ranks: tuple[int, ...] = (2,)
    cores: str = "all"
    threads: int | None = None
    mpi: str = ""
    argument: bool = False
    defects: dict[str, Defect | str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """What the user has set for this MPI."""
        here = Path(sys.executable).parent
        if not self.mpi:
            return {"PATH": f"{here}:/usr/sbin:/usr/bin:/sbin:/bin"}
        folder = MPIS / self.mpi
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return {
            "PATH": f"{folder}/bin:{here}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": f"{folder}/lib/{python}/site-packages",
            "LD_LIBRARY_PATH": f"{folder}/lib",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }


DEEPSPEED, TORCH = (
    (sys.executable, "-c", f"import importlib.metadata; print(importlib.metadata.version('{package}'))")
    for package in ("deepspeed", "torch")
)
ONE = ("deepspeed", "--num_accelerators", "2")
HOSTS = ("deepspeed", "--hostfile", "{hosts}")
PYTHON = (sys.executable, "-u")
LOGS = Defect(
    "a folder of logs stays in /tmp",
    "torch/distributed/elastic/multiprocessing/api.py",
    'log_dir = tempfile.mkdtemp(prefix="torchelastic_")',
)
# Of several ranks of a node, the first was lost.
NAMED = Defect(
    "it names the rank that was started last, not the one that was lost",
    "deepspeed/launcher/launch.py",
    'logger.error(f"{cmd} exits with return code',
)
# DeepSpeed's helper starts the rank, and ends with status 0 whatever became of it.
HELPER = Defect(
    "a rank's status is dropped: a job that has failed ends with status 0",
    "deepspeed/launcher/launcher_helper.py",
    "    result.wait()",
)
PDSH_BINDING = Defect(
    "pdsh's command has no --bind_cores_to_rank",
    "deepspeed/launcher/multinode_runner.py",
    'deepspeed_launch.append(f"--enable_each_rank_log={self.args.enable_each_rank_log}")',
)

CASES = (
    Case("deepspeed", ONE, DEEPSPEED, argument=True, defects={"named": NAMED}),
    Case("deepspeed --no_local_rank", (*ONE, "--no_local_rank"), DEEPSPEED, defects={"named": NAMED}),
    Case(
        "deepspeed --module",
        (*ONE, "--module"),
        DEEPSPEED,
        program=("clusters.rank",),
        argument=True,
        defects={"named": NAMED},
    ),
    Case(
        "deepspeed --bind_cores_to_rank",
        (*ONE, "--bind_cores_to_rank"),
        DEEPSPEED,
        cores="own",
        argument=True,
        defects={"named": NAMED},
    ),
    Case(
        "deepspeed --bind_cores_to_rank --bind_core_list 1",
        ("deepspeed", "--num_accelerators", "1", "--bind_cores_to_rank", "--bind_core_list", "1"),
        DEEPSPEED,
        ranks=(1,),
        cores="1",
        argument=True,
    ),
    Case(
        "deepspeed --bind_core_list 1",
        ("deepspeed", "--num_accelerators", "1", "--bind_core_list", "1"),
        DEEPSPEED,
        ranks=(1,),
        cores="1",
        argument=True,
        defects={
            "cores": Defect(
                "--bind_core_list alone is ignored",
                "deepspeed/launcher/launch.py",
                "        if args.bind_cores_to_rank:",
            )
        },
    ),
    Case(
        "torchrun",
        ("torchrun", "--nproc_per_node", "2"),
        TORCH,
        threads=1,
        defects={"left": LOGS, "left after a loss": LOGS},
    ),
    Case(
        "deepspeed --hostfile, by pdsh",
        HOSTS,
        ("pdsh", "-V"),
        ranks=(2, 2),
        argument=True,
        defects={"named": NAMED},
    ),
    Case(
        "deepspeed --hostfile --bind_cores_to_rank, by pdsh",
        (*HOSTS, "--bind_cores_to_rank"),
        ("pdsh", "-V"),
        ranks=(2, 2),
        cores="own",
        argument=True,
        defects={"cores": PDSH_BINDING, "named": NAMED},
    ),
    Case(
        "deepspeed --launcher openmpi",
        (*HOSTS, "--launcher", "openmpi"),
        ("mpirun", "--version"),
        ranks=(2, 2),
        cores="own",
        mpi="openmpi",
    ),
    Case(
        "deepspeed --launcher mpich",
        (*HOSTS, "--launcher", "mpich"),
        ("mpirun", "--version"),
        ranks=(2, 2),
        mpi="mpich",
        defects={"status": HELPER, "named": HELPER},
    ),
    Case(
        "deepspeed --launcher impi",
        (*HOSTS, "--launcher", "impi"),
        ("mpirun", "--version"),
        ranks=(2, 2),
        mpi="impi-rt",
    ),
    Case(
        "deepspeed --launcher impi --bind_cores_to_rank",
        (*HOSTS, "--launcher", "impi", "--bind_cores_to_rank"),
        ("mpirun", "--version"),
        ranks=(2, 2),
        cores="own",
        mpi="impi-rt",
    ),
    Case(
        "deepspeed --launcher slurm, with examples/ranks.py",
        (*HOSTS, "--launcher", "slurm", "--launcher_args", "--ntasks-per-node=2 --cpu-bind=cores --kill-on-bad-exit=1"),
        ("srun", "--version"),
        program=(str(RANKS), str(RANK)),
        ranks=(2, 2),
        cores="own",
    ),
    Case("mpirun of Open MPI", ("mpirun", "-np", "2", *PYTHON), ("mpirun", "--version"), mpi="openmpi", cores="own"),
    Case(
        "mpirun --bind-to none of Open MPI",
        ("mpirun", "-np", "2", "--bind-to", "none", *PYTHON),
        ("mpirun", "--version"),
        mpi="openmpi",
    ),
    Case(
        "mpirun of MPICH",
        ("mpirun", "-np", "2", *PYTHON),
        ("mpirun", "--version"),
        mpi="mpich",
        defects={
            "named": "MPICH names the process that was lost, not the rank",
            "left after a loss": "MPICH's own segment stays in /dev/shm",
        },
    ),
    Case("mpirun of Intel MPI", ("mpirun", "-np", "2", *PYTHON), ("mpirun", "--version"), mpi="impi-rt", cores="own"),
    Case(
        "srun, with examples/ranks.py",
        ("srun", "--nodes=2", "--ntasks-per-node=2", "--cpu-bind=cores", "--kill-on-bad-exit=1", *PYTHON),
        ("srun", "--version"),
        program=(str(RANKS), str(RANK)),
        ranks=(2, 2),
        cores="own",
    ),
)

# What has no row, and why.
NOT_RUN = {
    "`deepspeed --launcher mvapich`": "asks for MVAPICH2-GDR, which no package registry has",
    "`deepspeed --elastic_training`": "DeepSpeed 0.19 has no such option any more, nor the elasticity package",
    "`jsrun`, PALS": "part of their vendors' machines",
}
