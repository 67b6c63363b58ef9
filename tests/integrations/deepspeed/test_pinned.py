"""``DS_PIN_MEMORY_BACKEND=native``: page-locked memory is DeepSpeed's own allocator's, whichever plugin is used."""

from __future__ import annotations

import pytest
from deepspeed_support import Python

PINS = """
import os, torch
import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import pin_memory, pin_memory_tracker

class Pins:
    def __init__(self):
        self.asked = []

    def pin(self, tensor, make_copy=True, match_shape=True):
        self.asked.append(("pin", make_copy, match_shape))
        return tensor.clone()

    def pin_empty(self, example, shape):
        self.asked.append(("pin_empty", example.dtype, tuple(shape)))
        return torch.empty(shape, dtype=example.dtype)

    def is_pinned(self, tensor):
        return self.asked[-1] != ("unpin",)

    def unpin(self, tensor):
        self.asked.append(("unpin",))
        return True

pin_memory._shared_native_pins = pins = Pins()
accelerator, x = get_accelerator(), torch.ones(2, 3)
assert type(accelerator).__module__ == "ds_plugin_cpu.accelerator"
"""


@pytest.mark.deepspeed
def test_deepspeeds_allocator_serves_where_it_is_asked_for(python: Python) -> None:
    python(
        PINS + "pinned = accelerator.pin_memory(x)\n"
        "assert pinned is not x and accelerator.is_pinned(pinned)\n"
        "accelerator.pin_memory(x, make_copy=False, match_shape=False)\n"
        "accelerator.pin_empty(4, 5, dtype=torch.int8)\n"
        "accelerator.pin_empty_like(x)\n"
        "assert pin_memory_tracker._tracker._bytes == 24 + 24 + 20 + 24\n"
        "assert accelerator.unpin_memory(pinned) and not accelerator.is_pinned(pinned)\n"
        "expected = [('pin', True, True), ('pin', False, False), ('pin_empty', torch.int8, (4, 5)),\n"
        "    ('pin_empty', torch.float32, (2, 3)), ('unpin',)]\n"
        "assert pins.asked == expected, pins.asked\n",
        DS_PIN_MEMORY_BACKEND="native",
    )


@pytest.mark.deepspeed
def test_otherwise_torch_pins(python: Python) -> None:
    """On the CPU that is nothing to do, and so nothing is counted."""
    python(
        PINS + "assert accelerator.pin_memory(x) is x\n"
        "accelerator.pin_empty(4, dtype=torch.int8)\n"
        "assert not accelerator.is_pinned(x) and accelerator.unpin_memory(x) is None\n"
        "assert pins.asked == [] and pin_memory_tracker._tracker._bytes == 0\n"
        "accelerator._torch_pins_host_memory = True\n"
        "accelerator.pin_empty(4, dtype=torch.int8)\n"
        "assert pin_memory_tracker._tracker._bytes == 4\n"
    )
