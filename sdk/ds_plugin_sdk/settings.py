"""Every environment variable that the SDK and its reference plugins read, typed and documented.

Nothing else in the tree reads ``os.environ``, but a plugin's ``hatch_build.py``, which may lack the SDK. Values are
read at each access, because launchers change the environment of a running process. ``sdk report`` prints the table
below with the values in force.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, overload

from ds_plugin_sdk.errors import SettingError

T = TypeVar("T")

_environment = os.environ.__getitem__  # looked up once: some settings are read in each step

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})

# Files of arguments as GCC reads them: a backslash takes the next character as it is, in quotes too.
_FILES_IN_FILES = 10
_PARTS_OF_WORD = re.compile(r"""(?s)'((?:\\.|[^'\\])*)'|"((?:\\.|[^"\\])*)"|((?:\\.|[^\s'"\\])+)""")
_WORDS_OF_FILE = re.compile(r"""(?s)(?:\\.|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^\s'"\\])+""")


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError("expected 1 or 0")


@functools.lru_cache(maxsize=64)  # DeepSpeed asks for the number of ranks again and again
def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError("expected a whole number of at least 1")
    return number


def visible_devices(variable: str, devices: int) -> int:
    """How many of a machine's devices this process sees.

    Args:
        variable: lists those that it sees by their numbers, as ``CUDA_VISIBLE_DEVICES`` does: what follows a wrong
            entry is hidden. Where it is unset, all are seen.
        devices: how many there are.
    """
    listed = os.environ.get(variable)
    if listed is None:
        return devices
    seen: set[int] = set()
    for entry in listed.split(","):
        number = re.match(r"\s*[+-]?\d+", entry)
        if number is None or not 0 <= int(number[0]) < devices or int(number[0]) in seen:
            break
        seen.add(int(number[0]))
    return len(seen)


def _port(text: str) -> int:
    return _within(text, 1, 65535, "a port")


def _within(text: str, least: int, most: int, what: str = "a whole number") -> int:
    number = int(text)
    if not least <= number <= most:
        raise ValueError(f"expected {what}, from {least} to {most}")
    return number


def _devices(text: str) -> int:
    return _within(text, 1, 127)  # torch counts devices in a signed byte


def _mebibytes(text: str) -> int:
    return _within(text, 1, 2**40)


def _microseconds(text: str) -> int:
    return _within(text, 0, 10**12)


def _positive_or_none(text: str) -> int | None:
    return None if int(text) == 0 else _positive(text)


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # of ~ and ~user
        raise ValueError(str(error)) from error


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _tasks_of_nodes(text: str) -> tuple[int, ...]:
    """Slurm's notation: ``2(x3),1`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError("expected tasks of each node, as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _words(text: str) -> tuple[str, ...]:
    """Words as a shell has them, quotes and all; ``@file`` stands for those in a file, as it does to GCC and clang.

    They belong to the key of a build, and compilers run in another folder, where a relative path leads elsewhere.
    """
    return tuple(_with_files(shlex.split(text), _FILES_IN_FILES))


def _with_files(words: Iterable[str], depth: int) -> Iterator[str]:
    for word in words:
        try:
            text = Path(word[1:]).read_text(encoding="utf-8", errors="surrogateescape") if word[:1] == "@" else "\0"
        except OSError:
            text = "\0"
        if "\0" in text:  # a compiler takes the word as it is then, and says what it makes of it
            yield word
        elif depth == 0:
            raise ValueError(f"files of arguments name each other more than {_FILES_IN_FILES} deep, the last is {word}")
        else:
            yield from _with_files(map(_unquoted, _WORDS_OF_FILE.findall(text)), depth - 1)


def _unquoted(word: str) -> str:
    return "".join(re.sub(r"(?s)\\(.)", r"\1", a or b or c) for a, b, c in _PARTS_OF_WORD.findall(word))


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One environment variable: its name, how its text is read, its value when unset, and what it does.

    One that is set to nothing counts as unset, unless `blank` says that this has a meaning: templates of jobs and
    containers write ``NAME=`` for what they do not set.
    """

    variable: str
    parse: Callable[[str], T]
    default: T
    doc: str
    blank: bool = False

    @overload
    def __get__(self, instance: None, owner: type) -> Setting[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> T | Setting[T]:
        return self if instance is None else self.read()

    def read(self) -> T:
        try:
            text = _environment(self.variable)
        except KeyError:
            return self.default
        if not self.blank and (not text or text.isspace()):
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise SettingError(
                f"{self.variable}={text!r} cannot be used",
                why=str(error),
                hint=f"correct it or unset it; {self.variable}: {self.doc}",
            ) from error


class Settings:
    """The settings, one attribute a variable. ``Settings.<name>`` is the `Setting`, ``settings.<name>`` its value."""

    # Which accelerator
    accelerator = Setting[str | None](
        "DS_ACCELERATOR", str, None, "name of the accelerator to use; anything but this one is then an error"
    )
    allowed_plugins = Setting[tuple[str, ...] | None](
        "DS_PLUGINS", _names, None, "comma-separated names of the plugins that may be loaded; unset: all"
    )
    autoload = Setting[bool](
        "DS_PLUGIN_AUTOLOAD",
        _flag,
        True,
        "0: DeepSpeed uses no plugin, unless DS_ACCELERATOR has a name that it lacks, or set_accelerator() is called",
    )
    probe_timeout = Setting[int](
        "DS_PLUGIN_PROBE_TIMEOUT",
        _positive,
        10,
        "seconds for a plugin's manifest to be imported, and its probe; unset: 10",
    )

    # Building kernels
    cache_dir = Setting[Path | None](
        "DS_PLUGIN_CACHE_DIR", _path, None, "folder of compiled kernels; unset: the user's cache folder"
    )
    cache_trust_group = Setting[bool](
        "DS_PLUGIN_CACHE_TRUST_GROUP", _flag, False, "1: a group may write to folders above the cache, or share it"
    )
    compile = Setting[bool]("DS_PLUGIN_COMPILE", _flag, True, "0: never compile; use prebuilt and cached kernels only")
    fallback = Setting[bool](
        "DS_PLUGIN_FALLBACK",
        _flag,
        True,
        "0: an error instead of the reference implementation when there is no native kernel",
    )
    lock_timeout = Setting[int](
        "DS_PLUGIN_LOCK_TIMEOUT",
        _positive,
        600,
        "seconds for a compiler and a file, and to wait for a process that compiles the same op; unset: 600",
    )
    provenance_file = Setting[Path | None](
        "DS_PLUGIN_PROVENANCE", _path, None, "file to which each process appends a line for each op it loads"
    )
    max_jobs = Setting[int | None](
        "MAX_JOBS", _positive_or_none, None, "compiler processes at once; unset or 0: one a core"
    )
    cc = Setting[tuple[str, ...]]("CC", _words, (), "C compiler; its C++ sibling is used when CXX is unset")
    cxx = Setting[tuple[str, ...]]("CXX", _words, (), "C++ compiler")
    cflags = Setting[tuple[str, ...]]("CFLAGS", _words, (), "extra compiler arguments")
    cxxflags = Setting[tuple[str, ...]]("CXXFLAGS", _words, (), "extra C++ compiler arguments")
    ldflags = Setting[tuple[str, ...]](
        "LDFLAGS", _words, (), "extra linker arguments, but for what would change the process"
    )
    cpu_level = Setting[str | None](
        "DS_PLUGIN_CPU_LEVEL", str, None, "highest CPU level to compile for, as x86-64-v3; unset: that of this CPU"
    )
    cuda_home = Setting[Path | None]("CUDA_HOME", _path, None, "folder of the CUDA toolkit")
    nvcc = Setting[tuple[str, ...]]("PYTORCH_NVCC", _words, (), "CUDA compiler, as torch reads it: 'ccache nvcc', say")
    nvcc_ccbin = Setting[Path | None](
        "NVCC_CCBIN", _path, None, "host compiler of nvcc, a program or its folder, where neither CXX nor CC is set"
    )
    cuda_arch_list = Setting[str | None](
        "TORCH_CUDA_ARCH_LIST", str, None, "CUDA architectures to compile for, as torch reads it"
    )
    cuda_visible_devices = Setting[str | None](
        "CUDA_VISIBLE_DEVICES", str, None, "GPUs that this process may use, as CUDA reads it", blank=True
    )
    allow_deprecated_fp16 = Setting[bool](
        "DS_ALLOW_DEPRECATED_FP16", _flag, False, "1: float16 on GPUs of Pascal too, which are slow at it"
    )
    build_ops = Setting[bool]("DS_BUILD_OPS", _flag, False, "1: put compiled kernels inside the wheel being built")

    # The simulated device
    simulator_devices = Setting[int]("DS_SIMULATOR_DEVICES", _devices, 2, "how many devices to simulate; unset: 2")
    simulator_memory_mb = Setting[int](
        "DS_SIMULATOR_MEMORY_MB", _mebibytes, 8192, "MiB of each simulated device; unset: 8192"
    )
    simulator_delay_us = Setting[int](
        "DS_SIMULATOR_DELAY_US",
        _microseconds,
        0,
        "microseconds by which a simulated device begins each piece of work later",
    )

    # The CPU plugin
    cpu_threads = Setting[int | None](
        "DS_PLUGIN_CPU_THREADS", _positive, None, "threads of each rank; unset: a fair share of the cores"
    )
    cpu_keep_memory = Setting[bool](
        "DS_PLUGIN_CPU_KEEP_MEMORY", _flag, True, "0: return large blocks to the system at once, no huge pages"
    )
    cpu_float16 = Setting[bool](
        "DS_PLUGIN_CPU_FLOAT16", _flag, False, "1: offer float16 on a CPU that does not compute in it; slow"
    )
    omp_threads = Setting[str | None]("OMP_NUM_THREADS", str, None, "threads, as OpenMP reads it; respected")

    # Files
    io_uring = Setting[bool](
        "DS_PLUGIN_IO_URING", _flag, True, "0: async_io reads and writes on threads though the kernel allows io_uring"
    )

    # What `sdk conformance` tells the processes that it starts
    deepspeed_tests = Setting[Path | None](
        "DS_PLUGIN_DEEPSPEED_TESTS", _path, None, "folder with DeepSpeed's tests, for sdk conformance --level deepspeed"
    )
    conformance_target = Setting[str | None](
        "DS_PLUGIN_CONFORMANCE_TARGET", str, None, "set by sdk conformance for the processes of DeepSpeed's tests"
    )
    conformance_calls = Setting[Path | None](
        "DS_PLUGIN_CONFORMANCE_CALLS", _path, None, "set by sdk conformance: the file in which those count calls of ops"
    )

    # What launchers say
    rank = Setting[int | None]("RANK", int, None, "index of this process among all of a run")
    local_rank = Setting[int]("LOCAL_RANK", int, 0, "index of this process among those of the machine")
    master_port = Setting[int]("MASTER_PORT", _port, 29500, "port at which the ranks of a run meet")

    def build_op(self, build_var: str) -> bool | None:
        """``DS_BUILD_<OP>``: whether this op goes into the wheel; None when the variable is unset."""
        return Setting[bool | None](build_var, _flag, None, "1 or 0: build this op, or leave it out").read()

    def may_build_ops(self) -> bool:
        """Whether some ``DS_BUILD_`` variable says other than no; builders are not imported where none does."""
        no = {"", *_FALSE}
        return any(name.startswith("DS_BUILD_") and v.strip().lower() not in no for name, v in os.environ.items())

    def local_world_size(self) -> int | None:
        """Ranks on this machine as any of the common launchers says it; None outside a launcher."""
        return _LOCAL_SIZE.read() or self._other_local_world_size()  # DeepSpeed's launcher sets it, and asks often

    def _other_local_world_size(self) -> int | None:
        for setting in _LOCAL_WORLD_SIZES:
            size = setting.read()
            if size is not None:
                return size
        return self._tasks_of_slurm_step()

    def _tasks_of_slurm_step(self) -> int | None:
        """Ranks that ``srun`` started on this machine. One alone may be a launcher or a shell: that counts as none.

        A job's own ``SLURM_NTASKS_PER_NODE`` and ``SLURM_TASKS_PER_NODE`` are no such number: a batch script, which is
        one process, has them too.
        """
        tasks = Setting[tuple[int, ...]](
            SLURM_STEP_TASKS_PER_NODE, _tasks_of_nodes, (), "tasks of each node of the step"
        ).read()
        node = Setting("SLURM_NODEID", int, 0, "index of this node in the step").read()
        return tasks[node] if node < len(tasks) and tasks[node] > 1 else None

    def __iter__(self) -> Iterator[tuple[str, Setting[object]]]:
        for name, value in vars(type(self)).items():
            if isinstance(value, Setting):
                yield name, value


SLURM_STEP_TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"

# DeepSpeed, torchrun, Open MPI, MVAPICH, Intel MPI and MPICH, PALS, Cray's PMI, jsrun, in this order. DeepSpeed's is
# first: `device_count` is asked in a step, and each variable that is not set takes as long as all else there.
LOCAL_WORLD_SIZE_VARIABLES = (
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PALS_LOCAL_SIZE",
    "PMI_LOCAL_SIZE",
    "JSM_NAMESPACE_LOCAL_SIZE",
)
_LOCAL_SIZE, *_LOCAL_WORLD_SIZES = [
    Setting[int | None](variable, _positive, None, "ranks on this machine") for variable in LOCAL_WORLD_SIZE_VARIABLES
]

# What compilers themselves read and what changes their output: part of every build's key.
COMPILER_VARIABLES = (
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "LD_RUN_PATH",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
)

settings = Settings()

# What a launcher carries to other nodes in any case: the SDK's own, and what a vendor's plugin names like them.
_CARRIED = ("DS_ACCELERATOR", "DS_PLUGIN", "DS_SIMULATOR_")

# Of one node, of one rank, or of a wheel's build.
_STAYS = frozenset({"CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "RANK", "DS_BUILD_OPS"})


def for_other_nodes() -> dict[str, str]:
    """Variables of this process that a job's processes on other nodes need, so that they choose and compile as here.

    With ``DS_PLUGIN_AUTOLOAD=0``, when all is to be as without plugins, these are the SDK's own alone.
    """
    shared = {setting.variable for _, setting in settings}.union(COMPILER_VARIABLES) - _STAYS
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_CARRIED) or (name in shared and settings.autoload)
    }


def compiler_environment() -> dict[str, str]:
    """Those of `COMPILER_VARIABLES` that are set."""
    return {name: os.environ[name] for name in COMPILER_VARIABLES if os.environ.get(name)}


def child_environment(**changes: str) -> dict[str, str]:
    """A copy of the environment for a child process, with `changes` applied.

    The folders of PYTHONPATH are absolute: the child may run in another folder. PATH is set: without it programs are
    found in the system's folders, but do not find each other.
    """
    environment = {"PATH": os.defpath, **os.environ, **changes}
    if environment.get("PYTHONPATH"):
        folders = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, folders))
    return environment


def export(variables: Mapping[str, str]) -> None:
    """Set variables of this process's own environment that are not set yet, or set to nothing."""
    for name, value in variables.items():
        if not os.environ.get(name, "").strip():
            os.environ[name] = value


def become(rank: int, ranks: int, port: int) -> None:
    """Make this process one of some ranks of this machine, as a launcher would."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        LOCAL_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
