"""LoRA (Hu et al., 2021, https://arxiv.org/abs/2106.09685) for linear layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class LoRALinear(nn.Module):
    """A frozen linear layer and a trained product of low rank beside it: ``W x + alpha / rank * B A x``."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, alpha / rank
        self.lora_a = nn.Parameter(torch.empty(rank, linear.in_features))
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, rank))  # so that training starts at W
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale * (x @ self.lora_a.T @ self.lora_b.T)


def add(model: nn.Module, rank: int, alpha: float = 16.0) -> None:
    """Freeze the model and put LoRA beside the linear layers of its decoder."""
    model.requires_grad_(False)
    for module in list(model.get_decoder().layers.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, LoRALinear(child, rank, alpha))
