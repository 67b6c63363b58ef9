"""The instruction-set levels of the CPU kernels have one definition: what cannot be read from it is held against it."""

from __future__ import annotations

import json
import re

import pytest

from ds_plugin_sdk.jit import target
from ds_plugin_sdk.op_builder.cpu.kernels import Level, levels
from ds_plugin_sdk.paths import kernels_root

KNOWN = json.loads((kernels_root() / "cpu" / "levels.json").read_text(encoding="utf-8"))
HEADER = (kernels_root() / "cpu" / "levels.h").read_text(encoding="utf-8")


def test_an_unknown_architecture_has_the_baseline() -> None:
    (level,) = levels("riscv64")
    assert level.level == "baseline" and level.arguments == []


@pytest.mark.parametrize("arch", sorted(KNOWN.keys() - {"others"}))
def test_each_level_runs_on_a_known_cpu_level(arch: str) -> None:
    order = [name for name, _ in target.LEVELS[arch]]
    needed = [order.index(level.cpu) for level in levels(arch)]
    assert needed == sorted(needed), "the best level comes last"


def test_the_header_chooses_among_these_levels_the_best_first() -> None:
    (listed,) = re.findall(r"#define DS_KERNELS_CPU_LEVELS\(DO\)(.*)", HEADER)
    chosen = re.findall(r"DO\((\w+)\)", listed)
    assert set(chosen) == {level.level for arch in KNOWN for level in levels(arch)}
    for arch in KNOWN:
        ours = [level.level for level in levels(arch)]
        assert [name for name in chosen if name in ours] == ours[::-1], arch


@pytest.mark.parametrize("level", levels("x86_64")[1:], ids=lambda level: level.level)
def test_the_header_asks_the_cpu_for_what_the_compiler_may_use(level: Level) -> None:
    (condition,) = re.findall(rf"case Level::{level.level}:(.*?)(?=case Level|#elif)", HEADER, re.DOTALL)
    asked = set(re.findall(r'__builtin_cpu_supports\("(\w+)"\)', condition))
    asked |= {"f16c"} if "bit_F16C" in condition else set()
    for below in re.findall(r"runs_here\(Level::(\w+)\)", condition):
        (known,) = (each for each in levels("x86_64") if each.level == below)
        asked |= {argument.removeprefix("-m") for argument in known.arguments}
    assert asked == {argument.removeprefix("-m") for argument in level.arguments}
    assert asked <= dict(target.LEVELS["x86_64"])[level.cpu]


def test_the_readme_states_the_arguments() -> None:
    table = (kernels_root() / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+)(?: \(.*?\))? \| `(\w+)` \| (?:`([^`]*)`)? ?\|", table, re.MULTILINE)
    stated = {(arch.replace("x86-64", "x86_64"), name): arguments.split() for arch, name, arguments in rows}
    assert stated == {(arch, level.level): level.arguments for arch in KNOWN for level in levels(arch)}
