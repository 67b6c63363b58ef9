"""A folder like DeepSpeed's tests, with one test."""

from __future__ import annotations

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import FusedAdam


def test_the_first_step_is_the_learning_rate() -> None:
    parameter = torch.nn.Parameter(torch.ones(8, device=get_accelerator().current_device_name()))
    parameter.grad = torch.ones_like(parameter)
    FusedAdam([parameter], lr=0.5, weight_decay=0.0).step()
    assert torch.allclose(parameter.cpu(), torch.full((8,), 0.5), atol=1e-4)
