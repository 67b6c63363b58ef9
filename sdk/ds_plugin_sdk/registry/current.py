"""The accelerator of this process: exactly one, and listeners that are called when it changes."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ds_plugin_sdk import op_builder, provenance
from ds_plugin_sdk.errors import PluginLoadError, SdkError
from ds_plugin_sdk.registry import prebuilt
from ds_plugin_sdk.registry.scan import Candidate, scan
from ds_plugin_sdk.registry.select import Decision, decide
from ds_plugin_sdk.thread_lock import ThreadLock

if TYPE_CHECKING:
    from ds_plugin_sdk.accelerator import DeepSpeedAccelerator

Listener = Callable[[Any], None]

_lock = ThreadLock()
_current: DeepSpeedAccelerator | None = None
_decision: Decision | None = None
_listeners: list[Listener] = []
_fallback: Callable[[], Any] | None = None
_loading: set[tuple[int, str]] = set()  # threads that load a plugin's accelerator, and its name
_again: list[Callable[[], Any]] = []  # what was asked of `choose` meanwhile


def get_accelerator() -> DeepSpeedAccelerator:
    """The accelerator of this process, chosen at the first call.

    Where DeepSpeed is loaded and no plugin is used, it is DeepSpeed's own: there is only one answer.

    Raises:
        PluginError: the plugin asked for by ``DS_ACCELERATOR`` cannot be used, or no plugin is available.
    """
    with _lock:
        if _current is None and _fallback is not None:
            own: DeepSpeedAccelerator = _fallback()
            return own
        if _current is None:
            choose(_torch_hardware, deepspeed_installed=_deepspeed_installed())
        if _current is None:
            raise PluginLoadError(
                "there is no accelerator to use",
                why="no installed plugin is used here:\n" + str(_decision),
                hint=_how_to_get_one(_decision),
            )
        return _current


def set_accelerator(accelerator: DeepSpeedAccelerator) -> None:
    """Make an accelerator current, before or after ``import deepspeed``.

    Args:
        accelerator: an instance; one of DeepSpeed's own abstract class too, which `ported_accelerator.port` then ports.

    Raises:
        InvalidAcceleratorError: not an accelerator.
    """
    from ds_plugin_sdk.ported_accelerator import port  # imports torch

    accelerator = port(accelerator)
    decision = Decision()
    decision.note(accelerator.device_name(), "chosen", f"set_accelerator({type(accelerator).__name__})")
    _install(accelerator, decision, plugin=accelerator.device_name(), version="set by the program")


def choose(
    other_hardware: Callable[[], str | None],
    builtin_names: tuple[str, ...] = (),
    *,
    deepspeed_installed: bool = True,
) -> DeepSpeedAccelerator | None:
    """Choose as `decide` does, and load the accelerator, unless there is one; None where no plugin is to be used.

    None too if the accelerator's own module asks, by importing DeepSpeed: it is current as soon as it is loaded.
    """
    global _decision
    with _lock:
        if _current is not None:
            return _current
        _decision = decide(other_hardware, builtin_names, deepspeed_installed=deepspeed_installed)
        candidate = _decision.chosen
        if candidate is None:
            return None
        if (threading.get_ident(), candidate.name) in _loading:
            _again.append(lambda: choose(other_hardware, builtin_names, deepspeed_installed=deepspeed_installed))
            return None
        accelerator = load(candidate)
        if (meanwhile := current()) is not None:
            return meanwhile
        _install(accelerator, _decision, plugin=candidate.name, version=candidate.version)
        return accelerator


def load(candidate: Candidate) -> DeepSpeedAccelerator:
    """An instance of a plugin's accelerator, not made current.

    Raises:
        PluginLoadError: its module or class cannot be had, or the package of its prebuilt ops.
    """
    prebuilt.offer(candidate)
    this = threading.get_ident(), candidate.name
    _loading.add(this)
    try:
        accelerator = _made(candidate)
    finally:
        _loading.discard(this)
        asked = [*_again]
        _again.clear()
    for choose_again in asked:
        choose_again()
    return accelerator


def is_loading() -> bool:
    """Whether this thread loads a plugin's accelerator just now."""
    return any(thread == threading.get_ident() for thread, _ in _loading)


def _made(candidate: Candidate) -> DeepSpeedAccelerator:
    """`load`, without what is to be done around it."""
    manifest = candidate.manifest
    module, _, name = manifest.accelerator.partition(":")
    try:
        cls = getattr(importlib.import_module(module), name)
        from ds_plugin_sdk.ported_accelerator import port  # imports torch

        accelerator = port(cls())
    except SdkError as error:
        raise PluginLoadError(
            "a plugin's accelerator cannot be loaded",
            plugin=candidate.name,
            why=f"{error.what}: {error.why}",
            hint=error.hint,
        ) from error
    except (Exception, SystemExit) as error:
        hint = (
            "its vendor: derive the class from TorchAccelerator, or from PortedAccelerator of ds_plugin_sdk"
            if "abstract class" in str(error)
            else f"python -c 'from {module} import {name}; {name}()' shows where; pip install --force-reinstall "
            f"{candidate.distribution} mends damaged files"
        )
        raise PluginLoadError(
            "a plugin's accelerator cannot be loaded",
            plugin=candidate.name,
            why=f"{manifest.accelerator} of {candidate}: {type(error).__name__}: {error}",
            hint=f"{hint}; DS_PLUGIN_AUTOLOAD=0 switches plugins off",
        ) from error
    return accelerator


def decision() -> Decision | None:
    """The decision trace of this process, once a choice was made."""
    return _decision


def current() -> DeepSpeedAccelerator | None:
    """The current accelerator, or None before a choice was made."""
    return _current


def on_change(listener: Listener) -> None:
    """Call `listener(accelerator)` whenever another accelerator becomes current."""
    if listener not in _listeners:
        _listeners.append(listener)


def use_fallback(accelerator: Callable[[], Any]) -> None:
    """Say who is asked for the accelerator while no plugin's is current: DeepSpeed, once it is loaded."""
    global _fallback
    _fallback = accelerator


def release(subject: str, verdict: str, reason: str) -> None:
    """No plugin's accelerator is current from now on; the decision gets a last step that says why."""
    global _current, _decision
    with _lock:
        _current, _decision = None, Decision(steps=[] if _decision is None else list(_decision.steps))
        _decision.note(subject, verdict, reason)


def _install(accelerator: DeepSpeedAccelerator, decision: Decision, *, plugin: str, version: str) -> None:
    global _current, _decision
    with _lock:
        if _current is accelerator:
            return
        _current, _decision = accelerator, decision
        op_builder.use_package(accelerator.device_name(), accelerator.op_builders)
        provenance.record(
            accelerator.device_name(),
            plugin=plugin,
            version=version,
            origin="accelerator",
            detail=f"{type(accelerator).__module__}.{type(accelerator).__qualname__}",
        )
        listeners = list(_listeners)
    for listener in listeners:
        listener(accelerator)


def _torch_hardware() -> str | None:
    """Hardware that torch itself sees."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def _deepspeed_installed() -> bool:
    """Whether DeepSpeed can be imported; it is not."""
    from ds_plugin_sdk.accelerator import installed

    return installed("deepspeed")


def _how_to_get_one(decision: Decision | None) -> str:
    steps = decision.steps if decision is not None else []
    unused = [step.subject for step in steps if step.verdict == "not used"]
    if unused:
        return f"import deepspeed first, which uses that hardware, or set DS_ACCELERATOR={unused[0]}"
    install = "" if "cpu" in scan() else "pip install ds-plugin-cpu, or "
    return f"{install}call set_accelerator(...); `sdk list --explain` says what each plugin lacks"


def preview(builtin_names: tuple[str, ...] = ()) -> Decision:
    """The choice that a new process would make, without loading anything. Takes and raises what `decide` does."""
    return decide(_torch_hardware, builtin_names, deepspeed_installed=_deepspeed_installed())
