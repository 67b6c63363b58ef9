"""Native kernels for programs that use ops and never ask for an accelerator, which is what says where they are."""

from __future__ import annotations

import contextlib
import functools
import itertools

from ds_plugin_sdk import op_builder
from ds_plugin_sdk.errors import PluginError
from ds_plugin_sdk.registry.current import current, load, preview
from ds_plugin_sdk.registry.prebuilt import offer
from ds_plugin_sdk.registry.scan import scan
from ds_plugin_sdk.registry.select import allowed


def load_kernels(family: str, device_type: str) -> None:
    """`op_builder.load_family`, with the builders of the device's plugin and all plugins' binaries to choose from."""
    _offer_all()
    _use_builders_for(device_type)
    op_builder.load_family(family, device_type)


def has_kernels(family: str, device_type: str) -> bool:
    """Whether a device has native kernels of a family, as far as one can tell without loading them."""
    _offer_all()
    _use_builders_for(device_type)
    return op_builder.has_native_family(family, device_type)


# What is wrong with a plugin is reported where an accelerator is chosen; here it only has no kernels.
@functools.cache
def _offer_all() -> None:
    for candidate in itertools.chain.from_iterable(scan().values()):
        if allowed(candidate.name):
            with contextlib.suppress(PluginError, ImportError):
                offer(candidate)


@functools.cache
def _use_builders_for(device_type: str) -> None:
    """Use the builders of the plugin that this process would choose, if that is for the device. The CPU's are the
    SDK's own.
    """
    chosen = current()
    if device_type == "cpu" or (chosen is not None and chosen.device_name() == device_type):
        return
    with contextlib.suppress(PluginError):
        candidate = preview().chosen
        accelerator = None if candidate is None else load(candidate)
        if accelerator is not None and accelerator.device_name() == device_type:
            op_builder.use_package(device_type, accelerator.op_builders)
