"""Calling a plugin's own code while a program imports DeepSpeed: it may hang, and the program must not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ds_plugin_sdk.settings import settings

T = TypeVar("T")


class ExceededError(Exception):
    """A call took longer than ``DS_PLUGIN_PROBE_TIMEOUT``."""


def call(function: Callable[[], T]) -> T:
    """`function()`, in a thread that is left alone when its time is over. Signals would serve the main thread only.

    Raises:
        ExceededError: it did not return in time.
        BaseException: what the function raises, SystemExit too.
    """
    if _imported_by_this_thread():
        return function()
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name=f"ds-plugin-sdk: {function!r}", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the system allows no more threads, and so no limit of time
        return function()
    seconds = settings.probe_timeout
    thread.join(seconds)
    if not outcome:
        raise ExceededError(f"did not return within {seconds} s ({type(settings).probe_timeout.variable})")
    value, error = outcome[0]
    if error is not None:
        raise error
    answer: T = value
    return answer


def _imported_by_this_thread() -> bool:
    """Whether ``import ds_plugin_sdk`` is under way, as after a DeepSpeed that came first. A plugin imports it too,
    and in another thread it would wait for this import, which waits for it.
    """
    return bool(getattr(sys.modules["ds_plugin_sdk"].__spec__, "_initializing", False))
