"""R12: op builders by DeepSpeed's names."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from ds_plugin_sdk.conformance.check import Clause, check, expect, expect_equal
from ds_plugin_sdk.conformance.runtime.support import expect_raises, expect_type
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.op_builder import op_table

# Every name that DeepSpeed 0.12 to 0.19 asks for.
NAMES = tuple(sorted(op.builder for op in op_table.OPS if op.deepspeed))

# DeepSpeed's in-tree name of a builder for an op that a device lacks.
_ABSENT = "deepspeed_not_implemented"


def _cases(target: Target) -> list[dict[str, str]]:
    return [{"builder": name} for name in NAMES]


@check(
    "runtime.builders.class",
    Clause(
        "R12.1",
        "`get_op_builder(name)` gives, for every name that DeepSpeed asks for, a class with `NAME`: the op's, or "
        "`deepspeed_not_implemented`. It never raises.",
        reason="`import deepspeed` binds all of them; `ds_report` and tests look ops up by `NAME`.",
    ),
    cases=_cases,
)
def builder_class(target: Target, builder: str) -> None:
    given = target.accelerator.get_op_builder(builder)
    expect(isinstance(given, type), f"get_op_builder({builder!r}) is {given!r}", why="expected a class")
    name = getattr(given, "NAME", None)
    expected = (op_table.by_builder(builder).name, _ABSENT)
    expect(name in expected, f"NAME of get_op_builder({builder!r}) is {name!r}", why=f"expected {expected[0]!r}")


@check(
    "runtime.builders.surface",
    Clause(
        "R12.2",
        "Every builder can be made without arguments and has a `BUILD_VAR` of its own, `load`, `is_compatible`, which "
        "takes `verbose` by name and by place, `absolute_name`, and a `name` that is its `NAME`; "
        "`create_op_builder(name)` gives one, or None for a collective that is not offered.",
        reason="What DeepSpeed's loaders and reports use: the latter list ops by `name`.",
    ),
    cases=_cases,
)
def surface(target: Target, builder: str) -> None:
    made = _create(target, builder)
    if made is None:
        return
    for attribute in ("NAME", "BUILD_VAR", "name"):
        expect_type(getattr(made, attribute, None), str, f"{attribute} of create_op_builder({builder!r})")
    expect_equal(made.name, made.NAME, f"name of create_op_builder({builder!r})")
    answers = {
        "verbose=False": made.is_compatible(verbose=False),
        "verbose=True": made.is_compatible(verbose=True),
        "False": made.is_compatible(False),
        "": made.is_compatible(),
    }
    for how, given in answers.items():
        expect_type(given, bool, f"is_compatible({how}) of {builder}")
        expect_equal(given, answers["verbose=False"], f"is_compatible({how}) of {builder}")
    expect_type(made.absolute_name(), str, f"absolute_name() of {builder}")
    for other in NAMES if made.NAME != _ABSENT else ():
        theirs = target.accelerator.create_op_builder(other)
        shared = theirs is not None and theirs.BUILD_VAR == made.BUILD_VAR and theirs.NAME != made.NAME
        expect(not shared, f"BUILD_VAR of {builder} and of {other} is {made.BUILD_VAR}", why="who unsets one sets both")


@check(
    "runtime.builders.load",
    Clause(
        "R12.3",
        "`load()` of a builder that is compatible gives the op, each time; of one for an op that is not offered it "
        "raises ValueError, which says which op. DeepSpeed's own builders raise what they always did.",
        reason="DeepSpeed's fallbacks catch ValueError; anything else ends the program.",
    ),
    cases=_cases,
    timeout=600.0,
)
def load(target: Target, builder: str) -> None:
    made = _create(target, builder)
    if made is None:
        return
    if made.is_compatible(verbose=False):
        loads: dict[str, Callable[[], Any]] = {
            "": lambda: made.load(verbose=False),
            " a second time": made.load,
            " of another builder": lambda: _create(target, builder).load(verbose=False),
        }
        for which, call in loads.items():
            expect(call() is not None, f"load(){which} of {builder}, which is compatible, gave None")
    elif not op_table.by_builder(builder).optional and not type(made).__module__.startswith("deepspeed."):
        what = f"load() of {builder}, which is not compatible,"
        expect_raises(lambda: made.load(verbose=False), ValueError, what)


def _create(target: Target, builder: str) -> Any:
    made = target.accelerator.create_op_builder(builder)
    optional = op_table.by_builder(builder).optional
    expect(made is not None or optional, f"create_op_builder({builder!r}) is None", why="expected a builder")
    return made


@check(
    "runtime.builders.unknown",
    Clause(
        "R12.4",
        "`get_op_builder` and `create_op_builder` of an unknown name do not raise; what they give, "
        "other than None, has `NAME`.",
        reason="A later DeepSpeed asks for ops that do not exist yet.",
    ),
)
def unknown(target: Target) -> None:
    for member in ("get_op_builder", "create_op_builder"):
        given = getattr(target.accelerator, member)("NobodyHeardOfBuilder")
        expect(given is None or hasattr(given, "NAME"), f"{member}('NobodyHeardOfBuilder') is {given!r}")


@check(
    "runtime.builders.folder",
    Clause(
        "R12.5",
        "`op_builder_dir()` names a package that can be imported, with its modules; `create_op_builder` takes every "
        "name in them that ends in `Builder`, base classes too, and gives None or what has `NAME`.",
        reason="`ds_report` and `__compatible_ops__` walk this package.",
    ),
)
def folder(target: Target) -> None:
    dotted = target.accelerator.op_builder_dir()
    expect_type(dotted, str, "op_builder_dir()")
    package = importlib.import_module(dotted)
    names = [info.name for info in pkgutil.iter_modules(getattr(package, "__path__", []))]
    expect(hasattr(package, "__path__"), f"op_builder_dir() is {dotted!r}", why="a module, not a package")
    for module in (importlib.import_module(f"{dotted}.{name}") for name in names if name != "all_ops"):
        for member in vars(module):
            if member.endswith("Builder"):
                made = target.accelerator.create_op_builder(member)
                what = f"create_op_builder({member!r}), of {module.__name__}, is {made!r}"
                expect(
                    made is None or bool(getattr(made, "NAME", "")), what, why="expected None, or a builder with NAME"
                )


@check(
    "runtime.builders.again",
    Clause(
        "R12.6",
        "Asked twice, `get_op_builder` gives one class and `create_op_builder` two builders of it.",
        reason="DeepSpeed compares classes, and keeps each builder's error log.",
    ),
)
def again(target: Target) -> None:
    first, second = (target.accelerator.get_op_builder("FusedAdamBuilder") for _ in range(2))
    expect(first is second, f"get_op_builder('FusedAdamBuilder') gave {first!r}, then {second!r}")
    made = [target.accelerator.create_op_builder("FusedAdamBuilder") for _ in range(2)]
    expect_equal([type(builder) for builder in made], [first, first], "classes of two created builders")
    expect(made[0] is not made[1], "create_op_builder('FusedAdamBuilder') gave one builder twice")


@check(
    "runtime.builders.extension",
    Clause(
        "R12.7",
        "`build_extension()` is a setuptools command class.",
        reason="A setup.py that builds ops passes it as `build_ext`.",
    ),
)
def extension(target: Target) -> None:
    from setuptools import Command  # type: ignore[import-untyped]  # setuptools brings no types

    given = target.accelerator.build_extension()
    # torch's has a method with_options that makes one.
    command = given if isinstance(given, type) else type(given)
    expect(issubclass(command, Command), f"build_extension() is {given!r}", why="expected a setuptools command")
