"""Loads the target and DeepSpeed: in the process of DeepSpeed's tests, and in the fork server of their ranks.

The fork server imports this module, and has no arguments: the target's name is in the environment.
"""

from __future__ import annotations

import multiprocessing.pool
from typing import Any

import pytest

from ds_plugin_sdk.accelerator import DeepSpeedAccelerator
from ds_plugin_sdk.conformance.programs import ahead
from ds_plugin_sdk.conformance.programs.calls import Calls
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.settings import settings

calls: Calls | None = None


def load() -> None:
    """Make the target DeepSpeed's accelerator, and import DeepSpeed."""
    name = settings.conformance_target
    if name is None:
        return
    target = Target.find(name)
    import deepspeed

    ahead.load()
    if not isinstance(target.accelerator, DeepSpeedAccelerator) and not deepspeed.accelerator.get_accelerator():
        deepspeed.accelerator.set_accelerator(target.accelerator)
    _count_calls()


def _count_calls() -> None:
    global calls
    if calls is None and settings.conformance_calls is not None:
        calls = Calls(settings.conformance_calls)
        calls.watch()


def _let_failures_through() -> None:
    """Make `pytest.fail` in a rank an error that a pool hands to its parent.

    It raises what is no `Exception`, which ends a pool's process without an answer: the test would wait for its time
    limit. `pytest.raises` that sees nothing raised calls it.
    """
    pool: Any = multiprocessing.pool
    original = pool.starmapstar

    def starmapstar(arguments: Any) -> Any:
        try:
            return original(arguments)
        except pytest.fail.Exception as failure:
            raise AssertionError(str(failure)) from failure

    # A pool's parent and child find it by its name.
    starmapstar.__module__, starmapstar.__qualname__ = original.__module__, original.__qualname__
    pool.starmapstar = starmapstar


load()
_let_failures_through()
