"""Counting the calls of our ops: a test of a whole model passes without them wherever something else can stand in."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# How many of each layer there are in the op's lists.
_INTEGERS, _CACHES = 8, 2


class CountedCalls(TorchDispatchMode):
    """Counts the calls of our ops within its block.

    Attributes:
        calls: by the ops' names.
        devices: types of the devices that they were on.
    """

    knows_ds_plugin = True  # an accelerated model would run its own code otherwise

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.devices: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = op._schema.name.partition("::")
        if namespace in ("ds_plugin", "ds_plugin_calls"):
            self.calls.update(_of_layers(args) if name == "decoder_layers" else {name: 1})
            self.devices |= {arg.device.type for arg in args if isinstance(arg, torch.Tensor)}
        return op(*args, **(kwargs or {}))


def _of_layers(args: Any) -> dict[str, int]:
    """What layers in one call call: torch shows a mode the one call only."""
    caches, layers = len(args[1]), len(args[-2]) // _INTEGERS
    attention = "cached_attention" if caches == _CACHES * layers else "cached_attention_int8"
    return {"decoder_layers": 1, "decoder_layer": layers, "linear": 4 * layers, attention: layers}
