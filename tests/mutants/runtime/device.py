"""Defects of names, indices and the current device."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from mutants.mutant import SIMULATED
from mutants.runtime.support import DEVICE, always, below, member, nothing, original

member("device.name_with_index", "R1.1", "`device_name()` has an index.", device_name=always("cpu:0"))
member("device.marketing_name", "R1.2", "`_name` is not the device's type.", _name=property(always("CPU"), nothing))
member(
    "device.one_name_for_all",
    "R1.3",
    "`device_name(i)` names device 0 whatever `i` is.",
    target=SIMULATED,
    device_name=lambda self, index=None: original(self).device_name(None if index is None else 0),
)
member("device.count_as_float", "R1.4", "`device_count()` is a float.", device_count=always(1.0))
member("device.unavailable", "R1.5", "`is_available()` is False.", is_available=always(False))
member("device.current_as_text", "R1.6", "`current_device()` is the text of an index.", current_device=always("0"))
member(
    "device.current_of_another",
    "R1.7",
    "`current_device_name()` names device 1 while device 0 is current.",
    target=SIMULATED,
    current_device_name=always(f"{DEVICE}:1"),
)
member("device.none", "R1.8", "`device()` is None.", device=nothing)
member("device.set_ignored", "R1.9", "`set_device` does nothing.", target=SIMULATED, set_device=nothing)
member(
    "device.set_wraps_around",
    "R1.10",
    "`set_device(2)` of two devices takes device 0.",
    target=SIMULATED,
    set_device=lambda self, index: original(self).set_device(index % 2),
)
member(
    "device.count_off_by_one",
    "R1.11",
    "`device_count()` is one less than there are.",
    target=SIMULATED,
    device_count=lambda self: original(self).device_count() - 1,
)
member("device.no_synchronize", "R1.12", "`synchronize` does nothing.", target=SIMULATED, synchronize=nothing)
member(
    "device.synchronize_the_first",
    "R1.12",
    "`synchronize()` waits for device 0, whichever is current.",
    target=SIMULATED,
    synchronize=lambda self, index=0: original(self).synchronize(index),
)
member(
    "device.synchronize_current_only",
    "R1.13",
    "`synchronize(i)` waits for the current device.",
    target=SIMULATED,
    synchronize=lambda self, index=None: original(self).synchronize(),
)
member("device.slow_synchronize", "R1.14", "`synchronize` sleeps.", synchronize=lambda self, i=None: time.sleep(0.05))
member(
    "device.only_the_first",
    "R1.15",
    "`on_accelerator` knows device 0 alone.",
    target=SIMULATED,
    on_accelerator=lambda self, tensor: str(tensor.device) == f"{DEVICE}:0",
)


def _layout_lost() -> None:
    original = torch.Tensor.cpu

    def cpu(self: torch.Tensor) -> torch.Tensor:
        got = original(self)
        return got if got.is_contiguous() else got.t().reshape(got.shape)

    torch.Tensor.cpu = cpu  # type: ignore[method-assign, assignment]  # the defect of this mutant


below("device.layout_lost", "R1.16", "A tensor that is not contiguous comes back in another order.", _layout_lost)


def _narrow_integers() -> None:
    original = torch.Tensor.cpu

    def cpu(self: torch.Tensor) -> torch.Tensor:
        got = original(self)
        return got.int().long() if got.dtype == torch.int64 and self.device.type == DEVICE else got

    torch.Tensor.cpu = cpu  # type: ignore[method-assign, assignment]  # the defect of this mutant


below("device.narrow_integers", "R1.16", "The device keeps int64 in 32 bits.", _narrow_integers)
member(
    "device.fixed_member",
    "R1.17",
    "`is_available` is a property that cannot be replaced.",
    is_available=property(lambda self: always(True)),
)


def _no_autocast() -> None:
    torch.autocast.__enter__ = lambda self: self  # type: ignore[method-assign]  # the defect of this mutant
    torch.autocast.__exit__ = nothing  # type: ignore[method-assign]  # the defect of this mutant


below("device.no_autocast", "R1.18", "Autocast changes no type.", _no_autocast, target="cpu")


def _new_parameters() -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)


below("device.new_parameters", "R1.19", "A module that is moved gets new parameters.", _new_parameters)


def _device_of_the_process() -> None:
    """Each thread that asks has the device that was set last, in whichever thread."""
    module: Any = torch.get_device_module(DEVICE)
    set_device, current_device = module.set_device, module.current_device
    last: list[Any] = [0]

    def set_for_all(device: Any) -> None:
        set_device(device)
        last[0] = current_device()

    def current() -> int:
        set_device(last[0])
        return int(current_device())

    module.set_device, module.current_device = set_for_all, current


below("device.of_the_process", "R1.21", "`set_device` sets the device of all threads.", _device_of_the_process)


def _never_wider() -> None:
    """Autocast makes numbers narrower, and never wider."""
    for name in ("cross_entropy", "mse_loss", "softmax", "layer_norm"):
        function = getattr(torch.nn.functional, name)

        def narrow(input: Tensor, *arguments: Any, function: Any = function, **options: Any) -> Any:
            if input.device.type != DEVICE:
                return function(input, *arguments, **options)
            with torch.autocast(DEVICE, enabled=False):
                return function(input, *arguments, **options)

        setattr(torch.nn.functional, name, narrow)


below("device.autocast_never_wider", "R1.22", "Losses under autocast stay in 16 bits.", _never_wider)
member("device.misspelt_attribute", "R1.23", "`op_builders` is misspelt.", op_builder="somewhere.else")
member("device.misspelt_method", "R1.23", "`is_bf16_supported` is misspelt.", is_bf16_suported=always(False))
