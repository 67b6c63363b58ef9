"""An accelerator with checks of its own, which end in every way that there is. Loaded in workers: ``misfit:Misfit``."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from ds_plugin_cpu.accelerator import CPU_Accelerator
from ds_plugin_sdk.conformance.check import Clause, check, expect, expect_equal
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.errors import InvalidTensorError
from mutants import __getattr__  # noqa: F401  # this module's mutants are targets too
from mutants.mutant import mutant, override


class Misfit(CPU_Accelerator):
    """The CPU, but for what it says of its devices."""

    def device_count(self) -> int:
        return 1


class Broken(CPU_Accelerator):
    """Cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("the driver is too old")


class Dying(CPU_Accelerator):
    """Takes the process with it."""

    def __init__(self) -> None:
        os._exit(7)


_number = iter(range(1, 100))


def misfit(name: str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A check named ``runtime.misfit.<name>``."""
    clause = Clause(f"R99.{next(_number)}", f"The misfit's {name} is in order.", reason="Its users believe so.")
    return check(f"runtime.misfit.{name}", clause, **options)


@misfit("passes")
def passes(target: Target) -> None:
    expect(True, "never said")


@misfit("differs")
def differs(target: Target) -> None:
    sys.stdout.write("what the check printed\n")
    expect_equal(target.accelerator.device_count(), 2, "devices", hint="count them again")


@misfit("raises")
def raises(target: Target) -> None:
    target.accelerator.no_such_member()


@misfit("rejects")
def rejects(target: Target) -> None:
    raise InvalidTensorError("a tensor is wrong", op="adam_", why="it is empty", hint="fill it")


@misfit("exits")
def exits(target: Target) -> None:
    raise SystemExit(3)


@misfit("crashes", cases=lambda target: [{"op": "one"}, {"op": "two", "dtype": "float32"}])
def crashes(target: Target, op: str, dtype: str = "") -> None:
    sys.stderr.write("last words\n")
    ctypes.string_at(0)


@misfit("leaves")
def leaves(target: Target) -> None:
    if os.fork() == 0:  # a child that outlives its parent and holds what it inherited
        time.sleep(60)
    os._exit(0)


@misfit("hangs", timeout=1.5)
def hangs(target: Target) -> None:
    time.sleep(1000)


@misfit("hangs_in_native_code", timeout=1.5)
def hangs_in_native_code(target: Target) -> None:
    ctypes.PyDLL(None).sleep(1000)  # holds Python's lock meanwhile


@misfit("skipped", needs=lambda target: "the accelerator declares that it is a misfit")
def skipped(target: Target) -> None:
    raise AssertionError("never run")


@misfit("cannot_say", cases=lambda target: [{"op": str(1 // 0)}])
def cannot_say(target: Target) -> None:
    raise AssertionError("never run")


@misfit("cannot_say_and_dies", cases=lambda target: os._exit(3))
def cannot_say_and_dies(target: Target) -> None:
    raise AssertionError("never run")


_seen: set[int] = set()


def _visit() -> int:
    """How many cases ran in this process so far, this one included."""
    _seen.add(len(_seen))
    return len(_seen)


@misfit("shares_a_process", cases=lambda target: [{"turn": "1"}, {"turn": "2"}])
def shares_a_process(target: Target, turn: str) -> None:
    expect_equal(_visit(), int(turn), "cases in this process")


@misfit("alone", isolated=True, cases=lambda target: [{"turn": "1"}, {"turn": "2"}])
def alone(target: Target, turn: str) -> None:
    expect_equal(_visit(), 1, "cases in this process")


@misfit("counts")
def counts(target: Target) -> None:
    expect_equal(target.accelerator.device_count(), 1, "devices")


# The clauses are those of `counts`, `passes` and `differs`, and one that there is not.
@mutant("misfit.found", "R99.15", "runtime", target="misfit:Misfit")
def found(target: Target) -> Target:
    """It counts wrong."""
    return override(target, device_count=lambda self: 3)


@mutant("misfit.unseen", "R99.1", "runtime", target="misfit:Misfit")
def unseen(target: Target) -> Target:
    """It counts wrong, and the check looks elsewhere."""
    return override(target, device_count=lambda self: 3)


@mutant("misfit.proves_nothing", "R99.2", "runtime", target="misfit:Misfit")
def proves_nothing(target: Target) -> Target:
    """Nothing is wrong, and the check fails anyhow."""
    return target


@mutant("misfit.without_a_case", "R98.1", "runtime", target="misfit:Misfit")
def without_a_case(target: Target) -> Target:
    """Breaks a clause that there is not."""
    return target
