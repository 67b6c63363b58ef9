"""The CPU that code is generated for, by a name that means the same on every machine.

``-march=native`` means another thing on each machine, so a cache key with that word hands AVX-512 code to CPUs without
it. Here the word is resolved to the highest of a few named levels per architecture: few, so that a cache on a shared
file system serves most nodes with one binary, and ordered, so that a binary of a lower level may be used on a higher.
"""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ds_plugin_sdk.errors import SettingError
from ds_plugin_sdk.settings import Settings, settings

# Per architecture, ascending: the level, and what /proc/cpuinfo must say for it. x86-64 levels are those of the psABI.
_X86_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"})
_X86_V3 = _X86_V2 | frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
_X86_V4 = _X86_V3 | frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
_ARM_82 = frozenset({"atomics", "asimdrdm", "fphp", "asimdhp", "asimddp"})
_NONE: frozenset[str] = frozenset()
LEVELS: dict[str, tuple[tuple[str, frozenset[str]], ...]] = {
    "x86_64": (
        ("x86-64", _NONE),
        ("x86-64-v2", _X86_V2),
        ("x86-64-v3", _X86_V3),
        ("x86-64-v4", _X86_V4),
    ),
    "aarch64": (
        ("armv8-a", _NONE),
        ("armv8.2-a+fp16+dotprod", _ARM_82),
        ("armv8.2-a+fp16+dotprod+bf16+i8mm", _ARM_82 | {"bf16", "i8mm"}),
    ),
    "ppc64le": (
        ("power8", _NONE),
        ("power9", frozenset({"power9"})),
        ("power10", frozenset({"power9", "power10"})),
    ),
    "riscv64": (("rv64gc", _NONE), ("rv64gcv", frozenset({"v"}))),
}

# Arguments that begin with -m and let the compiler use no more of a CPU than it has anyway.
_HARMLESS = (
    *("-m64", "-mabi=", "-mbranch-protection", "-mcmodel=", "-mfpmath=", "-mfunction-return", "-mindirect-branch"),
    *("-mno-", "-mprefer-", "-msse2", "-mstack", "-mtls-dialect", "-mtune="),
)
# CPUs by whose names distributions and conda mean all of an architecture: what they can do beyond its first level, all
# have had since 2004.
_ANY_CPU = frozenset({"generic", "k8", "nocona"})

_NATIVE = re.compile(r"-m(?:arch|cpu|tune)=native\b")


@dataclass(frozen=True)
class CpuTarget:
    """A machine architecture (``platform.machine()``) and the level of its CPU; an empty level where we know none."""

    arch: str
    level: str

    @property
    def flag(self) -> str | None:
        """The compiler argument that selects this level: POWER compilers know ``-mcpu`` and no ``-march``."""
        if not self.level:
            return None
        return f"-mcpu={self.level}" if self.arch == "ppc64le" else f"-march={self.level}"

    def runs(self, level: str) -> bool:
        """Whether code generated for `level` (empty: for any CPU of this architecture) runs here."""
        names = [name for name, _ in LEVELS.get(self.arch, ())]
        return not level or (level in names and self.level in names[names.index(level) :])

    def resolve(self, args: Iterable[str]) -> list[str]:
        """`args` with every ``-march=native``, ``-mcpu=native`` and ``-mtune=native`` made definite.

        Tuning for one model would make a key for each; the level's own tuning is taken instead.
        """
        if self.flag is not None:
            return [_NATIVE.sub(self.flag, arg) for arg in args]
        kept: list[str] = []
        for arg in args:
            if not _NATIVE.search(arg):
                kept.append(arg)
            elif kept and kept[-1] == "-Xcompiler":
                kept.pop()
        return kept


def wants_native(args: Iterable[str]) -> bool:
    """Whether any argument asks for the CPU of this machine."""
    return any(_NATIVE.search(arg) for arg in args)


def is_level(arch: str, cpu: str) -> bool:
    """Whether a CPU is one of an architecture's levels, or any."""
    return not cpu or cpu in dict(LEVELS.get(arch, ()))


def named(arch: str, args: Iterable[str]) -> str:
    """The CPU that arguments ask for by name, as `CpuTarget.runs` takes it: a level, or, where they name another, the
    arguments themselves, which no machine is known to run. Empty where they name none.
    """
    words = [arg for arg in args if arg.startswith("-m") and not arg.startswith(_HARMLESS) and not _NATIVE.search(arg)]
    names = [word.partition("=")[2] for word in words]
    levels = {"", *_ANY_CPU, *(level for level, _ in LEVELS.get(arch, ()))}
    if not all(names) or not levels.issuperset(names):
        return " ".join(words)
    return next((name for name in reversed(names) if name not in _ANY_CPU), "")


def without_native(args: Iterable[str]) -> list[str]:
    """`args` in a form that is the same on every machine: native becomes ``$cpu``."""
    return [_NATIVE.sub("-march=$cpu", arg) for arg in args]


def features(arch: str, cpuinfo: str) -> frozenset[str]:
    """CPU features as `LEVELS` names them, from the text of /proc/cpuinfo (first processor)."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    fields: dict[str, str] = {}
    for name, _, value in lines:
        fields.setdefault(name.strip().lower(), value.strip().lower())
    if arch == "ppc64le":
        power = re.match(r"power(\d+)", fields.get("cpu", ""))
        return frozenset(f"power{n}" for n in range(8, int(power[1]) + 1)) if power else _NONE
    if arch == "riscv64":
        return frozenset(fields.get("isa", "").partition("_")[0].removeprefix("rv64"))
    return frozenset((fields.get("flags") or fields.get("features") or "").split())


def resolve(arch: str, cpuinfo: str) -> CpuTarget:
    """The target of a machine described by ``platform.machine()`` and the text of /proc/cpuinfo."""
    present = features(arch, cpuinfo)
    fitting = [name for name, needed in LEVELS.get(arch, ()) if needed <= present]
    return CpuTarget(arch, fitting[-1] if fitting else "")


def at_most(found: CpuTarget, level: str | None) -> CpuTarget:
    """`found`, or the lower `level` of its architecture if that is asked for.

    Raises:
        SettingError: `level` is not one of the architecture's.
    """
    if level is None or found.level == level:
        return found
    names = [name for name, _ in LEVELS.get(found.arch, ())]
    if level not in names:
        raise SettingError(
            f"{Settings.cpu_level.variable}={level!r} cannot be used",
            why=f"it is no CPU level of {found.arch}",
            hint=f"one of: {', '.join(names)}" if names else f"unset it: no levels of {found.arch} are known",
        )
    return CpuTarget(found.arch, level) if found.runs(level) else found


@functools.cache
def here() -> CpuTarget:
    """The target of this machine, or the lower one that ``DS_PLUGIN_CPU_LEVEL`` asks for."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            cpuinfo = file.read(16384)  # the first processor suffices; on big machines the whole takes long to make
    except OSError:
        cpuinfo = ""
    return at_most(resolve(platform.machine(), cpuinfo), settings.cpu_level)
