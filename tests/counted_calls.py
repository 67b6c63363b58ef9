"""Counting the calls of our ops: a test of a whole model passes without them wherever something else can stand in."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Where the schema has the scales of an int8 cache.
_KEY_SCALES = 3


class CountedCalls(TorchDispatchMode):
    """Counts the calls of our ops within its block.

    Attributes:
        calls: by the ops' names.
        devices: types of the devices that they were on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.devices: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = op._schema.name.partition("::")
        if namespace in ("ds_plugin", "ds_plugin_calls"):
            self.calls.update(_of_a_layer(args) if name == "decoder_layer" else {name: 1})
            self.devices |= {arg.device.type for arg in args if isinstance(arg, torch.Tensor)}
        return op(*args, **(kwargs or {}))


def _of_a_layer(args: Any) -> dict[str, int]:
    """What a layer in one call calls: torch shows a mode the one call only."""
    attention = "cached_attention" if args[_KEY_SCALES] is None else "cached_attention_int8"
    return {"decoder_layer": 1, "linear": 4, attention: 1}
