"""Makes DeepSpeed use the registry's accelerator, at the moment when its own module for that has been executed.

Nothing has asked DeepSpeed for the accelerator by then, so everything it binds at import is right from the start. After
that, `deepspeed.accelerator.set_accelerator` and `ds_plugin_sdk.set_accelerator` do the same.

An accelerator that was asked for by name and cannot be had is an error, through ``import deepspeed``. What the SDK
does without being asked never is: one warning, and DeepSpeed chooses its accelerator itself.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ds_plugin_sdk import op_builder, registry, torch_threads
from ds_plugin_sdk.accelerator import DeepSpeedAccelerator, installed
from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.integrations.deepspeed import deepspeed_builders, drift, pinned, rebind
from ds_plugin_sdk.ported_accelerator import written_for_deepspeed
from ds_plugin_sdk.settings import settings


def adopt(real_accelerator: Any) -> None:
    """Join SDK and DeepSpeed, and choose the accelerator.

    Args:
        real_accelerator: ``deepspeed.accelerator.real_accelerator``, executed and not used yet.

    Raises:
        PluginError: the plugin that ``DS_ACCELERATOR`` names cannot be used, or nothing has that name.
    """
    with _deepspeed_chooses_on_error(real_accelerator):
        _join(real_accelerator, detect=functools.partial(_detect, real_accelerator))


def adopt_late(real_accelerator: Any) -> None:
    """`adopt` for a DeepSpeed that has chosen already. An accelerator that the program gave it stays."""
    with _deepspeed_chooses_on_error(real_accelerator):
        chosen = real_accelerator.ds_accelerator
        if chosen is None or type(chosen).__module__.startswith("deepspeed."):
            before = real_accelerator.set_accelerator
            _join(real_accelerator, detect=functools.partial(_detect, real_accelerator))
            rebind.replace(before, real_accelerator.set_accelerator)


def in_use() -> Any:
    """The accelerator that DeepSpeed uses, if it is a plugin's, or else None. Imports DeepSpeed if there is one."""
    if not installed("deepspeed"):
        return None
    importlib.import_module("deepspeed.accelerator.real_accelerator")
    return registry.current()


def when_used(change: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Change a module of DeepSpeed's once a plugin's accelerator is used: now, or when one is set."""
    if registry.current() is not None:
        change(module)
    else:
        once = functools.cache(functools.partial(change, module))
        registry.on_change(lambda accelerator: once())


@contextlib.contextmanager
def _deepspeed_chooses_on_error(real_accelerator: Any) -> Iterator[None]:
    """An error of ours is raised where DeepSpeed could only say that it does not know the name either."""
    builtin_names = tuple(real_accelerator.SUPPORTED_ACCELERATOR_LIST)
    try:
        yield
    except Exception as error:
        requested = settings.accelerator
        if requested is not None and (isinstance(error, SdkError) or requested not in builtin_names):
            raise
        registry.release("DeepSpeed", "chooses by itself", f"{type(error).__name__}: {error}")
        with contextlib.suppress(Warning):  # under -W error it is an exception, and the import must continue
            warnings.warn(
                f"ds-plugin-sdk: no plugin is used, DeepSpeed chooses its accelerator by itself: {error}",
                RuntimeWarning,
                stacklevel=3,  # past contextlib
            )


def _join(real_accelerator: Any, detect: Callable[[], str | None]) -> None:
    builtin_names = tuple(real_accelerator.SUPPORTED_ACCELERATOR_LIST)
    theirs = real_accelerator.dsa2 or real_accelerator.dsa1
    drift.fill(theirs)
    drift.complete_subclasses(theirs)
    theirs.register(DeepSpeedAccelerator)
    _share_set_accelerator(real_accelerator)
    op_builder.add_builder_source(deepspeed_builders.find)
    pinned.serve()
    registry.use_fallback(real_accelerator.get_accelerator)
    registry.on_change(functools.partial(_use, real_accelerator))
    accelerator = registry.choose(detect, builtin_names)
    if accelerator is not None:
        _use(real_accelerator, accelerator)
    elif registry.is_loading():  # the plugin's module imports DeepSpeed, which does not know what DS_ACCELERATOR names
        own = importlib.import_module(f"{real_accelerator.__package__}.cpu_accelerator")
        real_accelerator.ds_accelerator = own.CPU_Accelerator()


def _share_set_accelerator(real_accelerator: Any) -> None:
    """Make DeepSpeed's set_accelerator() call the SDK's, but for the accelerators that DeepSpeed brings along."""
    deepspeeds_own = real_accelerator.set_accelerator

    @functools.wraps(deepspeeds_own)
    def set_accelerator(accel_obj: Any) -> None:
        if written_for_deepspeed(accel_obj) and not type(accel_obj).__module__.startswith("deepspeed."):
            registry.set_accelerator(accel_obj)
            return
        before = real_accelerator.ds_accelerator
        deepspeeds_own(accel_obj)  # raises if it is no accelerator
        registry.release(accel_obj._name, "chosen", "deepspeed.accelerator.set_accelerator")
        rebind.rebind(before, accel_obj)

    real_accelerator.set_accelerator = set_accelerator


def _use(real_accelerator: Any, accelerator: Any) -> None:
    before = real_accelerator.ds_accelerator
    if before is accelerator:
        return
    real_accelerator.ds_accelerator = accelerator
    torch_threads.wait_at_exit()
    if real_accelerator.accel_logger is not None:  # as DeepSpeed logs it
        real_accelerator.accel_logger.info(f"Setting ds_accelerator to {accelerator._name} ({accelerator!r})")
    if accelerator.device_name() not in real_accelerator.SUPPORTED_ACCELERATOR_LIST:
        real_accelerator.SUPPORTED_ACCELERATOR_LIST.append(accelerator.device_name())
    rebind.rebind(before, accelerator)


def _detect(real_accelerator: Any) -> str | None:
    """The hardware that DeepSpeed would use by itself, or None where it would fall back to the CPU.

    DeepSpeed logs its choice; nothing is chosen here, so its log is muted.
    """
    undecided = real_accelerator.ds_accelerator is None
    log: logging.Logger | None = real_accelerator.accel_logger
    if log is not None:
        muted, log.disabled = log.disabled, True
    try:
        detected = real_accelerator.get_accelerator()
    finally:
        if log is not None:
            log.disabled = muted
    # Before 0.13 DeepSpeed took a GPU for granted where it found nothing else.
    if detected._name != "cpu" and detected.is_available():
        name: str = detected._name
        return name
    if undecided:
        real_accelerator.ds_accelerator = None
    return None
