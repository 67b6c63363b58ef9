"""The CPU's name on this and other architectures, from the text of /proc/cpuinfo."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from ds_plugin_sdk.errors import SettingError
from ds_plugin_sdk.jit import target
from ds_plugin_sdk.jit.target import CpuTarget
from ds_plugin_sdk.op_builder.cpu import kernels
from ds_plugin_sdk.settings import child_environment

V2 = "fpu sse sse2 cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"
V3 = f"{V2} avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni"
POWER9 = "processor\t: 0\ncpu\t\t: POWER9, altivec supported\nclock\t\t: 3800.000000MHz\n"
NEOVERSE_N1 = "processor\t: 0\nFeatures\t: fp asimd atomics fphp asimdhp asimdrdm asimddp\n"
GRAVITON3 = "Features\t: fp asimd atomics fphp asimdhp asimdrdm asimddp sve i8mm bf16\n"


@pytest.mark.parametrize(
    ("arch", "cpuinfo", "level", "flag"),
    [
        ("x86_64", "flags : fpu sse sse2", "x86-64", "-march=x86-64"),
        ("x86_64", f"flags : {V2}", "x86-64-v2", "-march=x86-64-v2"),
        ("x86_64", f"flags : {V3}", "x86-64-v3", "-march=x86-64-v3"),
        ("x86_64", f"flags : {V4}", "x86-64-v4", "-march=x86-64-v4"),
        ("x86_64", f"flags : {V4.replace('avx512vl', '')}", "x86-64-v3", "-march=x86-64-v3"),
        ("aarch64", "Features : fp asimd", "armv8-a", "-march=armv8-a"),
        ("aarch64", NEOVERSE_N1, "armv8.2-a+fp16+dotprod", "-march=armv8.2-a+fp16+dotprod"),
        ("aarch64", GRAVITON3, "armv8.2-a+fp16+dotprod+bf16+i8mm", "-march=armv8.2-a+fp16+dotprod+bf16+i8mm"),
        ("ppc64le", POWER9, "power9", "-mcpu=power9"),
        ("ppc64le", POWER9.replace("POWER9", "POWER10 (architected)"), "power10", "-mcpu=power10"),
        ("ppc64le", "cpu : something", "power8", "-mcpu=power8"),
        ("riscv64", "isa : rv64imafdc_zicntr_zihpm", "rv64gc", "-march=rv64gc"),
        ("riscv64", "isa : rv64imafdcv_zicntr", "rv64gcv", "-march=rv64gcv"),
        ("s390x", "features : vx vxe", "", None),
        ("x86_64", "", "x86-64", "-march=x86-64"),
    ],
)
def test_level_and_flag(arch: str, cpuinfo: str, level: str, flag: str | None) -> None:
    found = target.resolve(arch, cpuinfo)
    assert found == CpuTarget(arch, level)
    assert found.flag == flag


def test_the_first_processor_speaks_for_all() -> None:
    assert target.features("x86_64", "flags : avx\n\nflags : sse\n") == {"avx"}


@pytest.mark.parametrize(
    ("here", "level", "runs"),
    [
        (CpuTarget("x86_64", "x86-64-v3"), "", True),
        (CpuTarget("x86_64", "x86-64-v3"), "x86-64-v2", True),
        (CpuTarget("x86_64", "x86-64-v3"), "x86-64-v3", True),
        (CpuTarget("x86_64", "x86-64-v3"), "x86-64-v4", False),
        (CpuTarget("x86_64", "x86-64-v3"), "power9", False),
        (CpuTarget("ppc64le", "power9"), "power8", True),
        (CpuTarget("ppc64le", "power9"), "power10", False),
        (CpuTarget("s390x", ""), "", True),
        (CpuTarget("s390x", ""), "z15", False),
    ],
)
def test_code_of_lower_levels_runs(here: CpuTarget, level: str, runs: bool) -> None:
    assert here.runs(level) is runs


@pytest.mark.parametrize(
    ("here", "args", "resolved"),
    [
        (CpuTarget("x86_64", "x86-64-v3"), ["-O2", "-march=native"], ["-O2", "-march=x86-64-v3"]),
        (CpuTarget("x86_64", "x86-64-v3"), ["-Xcompiler=-O2,-march=native"], ["-Xcompiler=-O2,-march=x86-64-v3"]),
        # OLCF Summit: the arguments of an extension written on x86 build on POWER, where -march does not exist.
        (CpuTarget("ppc64le", "power9"), ["-march=native", "-O2"], ["-mcpu=power9", "-O2"]),
        (CpuTarget("ppc64le", "power9"), ["-mcpu=native", "-mtune=native"], ["-mcpu=power9", "-mcpu=power9"]),
        (CpuTarget("aarch64", "armv8-a"), ["-mcpu=native"], ["-march=armv8-a"]),
        (CpuTarget("riscv64", "rv64gcv"), ["-march=native"], ["-march=rv64gcv"]),
        (CpuTarget("s390x", ""), ["-march=native", "-Xcompiler", "-march=native", "-O2"], ["-O2"]),
        (CpuTarget("x86_64", "x86-64-v3"), ["-march=nativeish"], ["-march=nativeish"]),
    ],
)
def test_native_is_made_definite(here: CpuTarget, args: list[str], resolved: list[str]) -> None:
    assert here.resolve(args) == resolved
    assert target.wants_native(args) is (args != resolved)
    assert not any("native" in word and "nativeish" not in word for word in target.without_native(args))


@pytest.mark.parametrize(
    ("arch", "args", "cpu"),
    [
        ("x86_64", "-O2 -g -m64 -mtune=native -mno-omit-leaf-frame-pointer", ""),
        ("x86_64", "-march=nocona -mtune=haswell", ""),
        ("x86_64", "-march=native", ""),
        ("x86_64", "-march=x86-64-v2 -mtune=generic", "x86-64-v2"),
        ("x86_64", "-march=haswell -O2", "-march=haswell"),
        ("x86_64", "-march=x86-64-v2 -mavx512f", "-march=x86-64-v2 -mavx512f"),
        ("aarch64", "-mbranch-protection=standard", ""),
        ("aarch64", "-mcpu=neoverse-v1", "-mcpu=neoverse-v1"),
        ("ppc64le", "-mcpu=power8 -mtune=power8", "power8"),
        ("ppc64le", "-mcpu=power9", "power9"),
    ],
)
def test_arguments_that_name_a_cpu(arch: str, args: str, cpu: str) -> None:
    assert target.named(arch, args.split()) == cpu


@pytest.mark.parametrize(
    ("found", "level", "taken"),
    [
        ("x86-64-v4", None, "x86-64-v4"),
        ("x86-64-v4", "x86-64-v3", "x86-64-v3"),
        ("x86-64-v4", "x86-64", "x86-64"),
        ("x86-64-v3", "x86-64-v4", "x86-64-v3"),
    ],
)
def test_a_user_lowers_the_level(found: str, level: str | None, taken: str) -> None:
    assert target.at_most(CpuTarget("x86_64", found), level) == CpuTarget("x86_64", taken)


@pytest.mark.parametrize(
    ("found", "hint"),
    [(CpuTarget("ppc64le", "power9"), "one of: power8, power9, power10"), (CpuTarget("s390x", ""), "unset it")],
)
def test_a_level_that_the_architecture_lacks_is_an_error(found: CpuTarget, hint: str) -> None:
    with pytest.raises(SettingError, match="DS_PLUGIN_CPU_LEVEL='x86-64-v3' cannot be used") as error:
        target.at_most(found, "x86-64-v3")
    assert hint in str(error.value)


def test_kernels_are_compiled_for_the_lower_level(tmp_path: Path) -> None:
    """In a process of its own, as a user on a login node has it: the op's key and the kernels' level say so."""
    arch = platform.machine()
    lowest = target.LEVELS[arch][0][0]
    program = (
        "from ds_plugin_sdk.jit import machine\n"
        "from ds_plugin_sdk.op_builder.cpu import kernels\n"
        "print(machine.here().target.level, *(each.level for each in kernels._levels(portable=False)))"
    )
    environment = child_environment(DS_PLUGIN_CPU_LEVEL=lowest)
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert printed.stdout.split() == [lowest, kernels.levels(arch)[0].level]


def test_this_machine_has_a_level() -> None:
    here = target.here()
    assert here.arch == platform.machine()
    assert here.runs(here.level)
