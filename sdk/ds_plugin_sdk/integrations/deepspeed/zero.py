"""What ZeRO is to know of the SDK's optimizers.

ZeRO gives an optimizer one flat tensor for each group of parameters, of which each rank has a part. It refuses
optimizers of classes that it does not know, unless ``"zero_allow_untested_optimizer"`` is set.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

from ds_plugin_sdk.integrations.deepspeed import rebind

_OPTIMIZERS = "ds_plugin_sdk.optim"  # not imported here: whoever has one of its optimizers has done so


def admit_optimizers(utils: Any) -> None:
    """Let ZeRO take those that update each element by itself, and say what becomes of the others.

    Args:
        utils: ``deepspeed.runtime.zero.utils``, executed.
    """
    deepspeeds = utils.is_zero_supported_optimizer

    @functools.wraps(deepspeeds)
    def is_zero_supported_optimizer(optimizer: Any) -> bool:
        if type(optimizer).__module__.rpartition(".")[0] != _OPTIMIZERS:
            supported: bool = deepspeeds(optimizer)
            return supported
        if not optimizer.ELEMENTWISE:
            warnings.warn(
                f"{type(optimizer).__name__} under ZeRO: a rank's part of all parameters of a group is one tensor "
                "there, and has one trust ratio; without ZeRO each parameter has its own",
                stacklevel=2,
            )
        return bool(optimizer.ELEMENTWISE)

    utils.is_zero_supported_optimizer = is_zero_supported_optimizer
    rebind.replace(deepspeeds, is_zero_supported_optimizer)  # engines that came first have it by their own name


__all__ = ["admit_optimizers"]
