"""Errors carry their parts, read as what, whom, why, what next, and survive the way between processes."""

from __future__ import annotations

import pickle

import pytest

from ds_plugin_sdk import errors
from ds_plugin_sdk.errors import CompileError, SdkError

EVERY_ERROR = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, SdkError)]


def test_the_text_is_what_whom_why_next() -> None:
    error = CompileError("an op does not compile", plugin="zap", op="adam", why="no space left", hint="free some space")
    assert str(error) == "an op does not compile (plugin 'zap', op 'adam'): no space left\n  -> free some space"


def test_parts_that_are_absent_leave_no_trace() -> None:
    assert str(SdkError("it failed")) == "it failed"


@pytest.mark.parametrize("cls", EVERY_ERROR)
def test_errors_survive_pickling(cls: type[SdkError]) -> None:
    error = cls("what", plugin="p", op="o", why="w", hint="h")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == str(error)
    assert (again.plugin, again.op, again.why, again.hint) == ("p", "o", "w", "h")


def test_the_module_draws_the_tree_as_it_is() -> None:
    assert all(cls.__name__ in str(errors.__doc__) for cls in EVERY_ERROR)
