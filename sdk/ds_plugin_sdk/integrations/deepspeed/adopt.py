"""Makes DeepSpeed use the registry's accelerator, at the moment when its own module for that has been executed.

Nothing has asked DeepSpeed for the accelerator by then, so everything it binds at import is right from the start. After
that, `deepspeed.accelerator.set_accelerator` and `ds_plugin_sdk.set_accelerator` are two doors to one room.

An accelerator that was asked for by name and cannot be had is an error, through ``import deepspeed``. What the SDK
does on its own account never is: one warning, and DeepSpeed goes on by itself.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ds_plugin_sdk import op_builder, registry
from ds_plugin_sdk.accelerator import DeepSpeedAccelerator
from ds_plugin_sdk.errors import PluginError
from ds_plugin_sdk.integrations.deepspeed import drift, lend, rebind
from ds_plugin_sdk.settings import settings


def adopt(host: Any) -> None:
    """Join SDK and DeepSpeed, and choose the accelerator.

    Args:
        host: ``deepspeed.accelerator.real_accelerator``, executed and not used yet.

    Raises:
        PluginError: the plugin that ``DS_ACCELERATOR`` names cannot be used, or nothing has that name.
    """
    with _deepspeed_goes_on():
        _join(host, detect=functools.partial(_detect, host))


def adopt_late(host: Any) -> None:
    """`adopt` for a DeepSpeed that has chosen already. An accelerator that the program gave it stays."""
    with _deepspeed_goes_on():
        chosen = host.ds_accelerator
        if chosen is None or type(chosen).__module__.startswith("deepspeed."):
            before = host.set_accelerator
            _join(host, detect=functools.partial(_detect, host))
            rebind.replace(before, host.set_accelerator)


@contextmanager
def _deepspeed_goes_on() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, PluginError) and settings.accelerator is not None:
            raise
        registry.release("DeepSpeed", "chooses by itself", f"{type(error).__name__}: {error}")
        warnings.warn(
            f"ds-plugin-sdk: no plugin is used, DeepSpeed chooses its accelerator by itself: {error}",
            RuntimeWarning,
            stacklevel=2,
        )


def _join(host: Any, detect: Callable[[], str | None]) -> None:
    host_names = tuple(host.SUPPORTED_ACCELERATOR_LIST)
    theirs = host.dsa2 or host.dsa1
    drift.fill(theirs)
    theirs.register(DeepSpeedAccelerator)
    _share_set_accelerator(host)
    op_builder.borrow_from(lend.lend)
    registry.use_host(host.get_accelerator)
    registry.on_change(functools.partial(_use, host))
    # Without autoload a plugin is used only if it was set, or asked for by a name that DeepSpeed does not have.
    if settings.autoload or settings.accelerator not in (None, *host_names) or registry.current() is not None:
        accelerator = registry.choose(detect, host_names)
        if accelerator is not None:
            _use(host, accelerator)


def _share_set_accelerator(host: Any) -> None:
    """Let DeepSpeed's door lead where the SDK's does. It takes DeepSpeed's own accelerators too."""
    deepspeeds_own = host.set_accelerator

    @functools.wraps(deepspeeds_own)
    def set_accelerator(accel_obj: Any) -> None:
        if isinstance(accel_obj, DeepSpeedAccelerator):
            registry.set_accelerator(accel_obj)
            return
        before = host.ds_accelerator
        deepspeeds_own(accel_obj)  # refuses what is no accelerator
        registry.release(accel_obj._name, "chosen", "deepspeed.accelerator.set_accelerator")
        rebind.rebind(before, accel_obj)

    host.set_accelerator = set_accelerator


def _use(host: Any, accelerator: Any) -> None:
    before = host.ds_accelerator
    if before is accelerator:
        return
    host.ds_accelerator = accelerator
    if host.accel_logger is not None:  # as DeepSpeed says it
        host.accel_logger.info(f"Setting ds_accelerator to {accelerator._name} ({accelerator!r})")
    if accelerator.device_name() not in host.SUPPORTED_ACCELERATOR_LIST:
        host.SUPPORTED_ACCELERATOR_LIST.append(accelerator.device_name())
    rebind.rebind(before, accelerator)


def _detect(host: Any) -> str | None:
    """The hardware that DeepSpeed would use by itself, or None where it would fall back to the CPU.

    It says on its log what it takes; here it only gives an opinion, so that line is kept back.
    """
    undecided = host.ds_accelerator is None
    log: logging.Logger | None = host.accel_logger
    if log is not None:
        muted, log.disabled = log.disabled, True
    try:
        name: str = host.get_accelerator()._name
    finally:
        if log is not None:
            log.disabled = muted
    if name != "cpu":
        return name
    if undecided:
        host.ds_accelerator = None
    return None
