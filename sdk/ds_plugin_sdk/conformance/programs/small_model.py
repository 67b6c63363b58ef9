"""What is trained to compare devices: a small model, its batches, its losses by plain torch on the CPU in float32."""

from __future__ import annotations

import functools

import torch
from torch import nn

STEPS = 6
LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-2, 0.01, 0.5
_BATCH, _WIDTH, _CLASSES = 4, 16, 4


def make() -> nn.Module:
    """The model, the same each time: linear layers, activation, norm. Parameters of odd sizes too."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(_WIDTH, 37), nn.GELU(), nn.LayerNorm(37), nn.Linear(37, _CLASSES))
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                for parameter in layer.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) / layer.in_features**0.5)
    return model


def batch(rank: int, micro_step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and classes of a rank's micro step, the same in every step: so the loss falls."""
    generator = torch.Generator().manual_seed(1 + rank + 100 * micro_step)
    return torch.randn(_BATCH, _WIDTH, generator=generator), torch.randint(_CLASSES, (_BATCH,), generator=generator)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning rate of each step: another one than that of the step before."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step % 3))


def loss_of(output: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.float(), classes)


@functools.cache
def plain_losses(
    ranks: int, *, accumulation: int = 1, clip: bool = False, empty_step: bool = False
) -> list[list[float]]:
    """Each rank's losses of the first micro step, at each step, where all ranks' batches move the model by AdamW.

    Args:
        ranks: how many there are.
        accumulation: micro steps of each step.
        clip: whether the gradients' norm is clipped to `CLIP`.
        empty_step: whether the optimizer has taken a step with gradients of zero before.
    """
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    if empty_step:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    rates = schedule(optimizer)
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for _ in range(STEPS):
        optimizer.zero_grad()
        each = [
            loss_of(model(x), classes)
            for rank in range(ranks)
            for x, classes in (batch(rank, micro_step) for micro_step in range(accumulation))
        ]
        torch.autograd.backward(torch.stack(each).mean())
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        rates.step()
        for rank in range(ranks):
            losses[rank].append(each[rank * accumulation].item())
    return losses
