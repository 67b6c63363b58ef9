"""Images of CIFAR-10's form: the data set itself from a folder, or pictures of ten shapes that this file draws."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SIZE = 32
SHAPES = ("disk", "ring", "square", "frame", "triangle", "cross", "rows", "columns", "diagonals", "checks")


@dataclass(frozen=True)
class Images:
    """Pictures, float32 [count, 3, 32, 32] in -1 to 1, and their classes, int64 [count] in 0 to 9."""

    pictures: Tensor
    classes: Tensor


def load(folder: Path | None, train: int, held_out: int) -> tuple[Images, Images]:
    """Images to train on and images that training never sees.

    Args:
        folder: CIFAR-10's binary version (``data_batch_1.bin`` ...), which is read whole; None to draw.
        train: images to draw for training.
        held_out: images to draw that are held out.
    """
    if folder is None:
        return draw(train, seed=1), draw(held_out, seed=2)
    return read(sorted(folder.glob("data_batch_*.bin"))), read([folder / "test_batch.bin"])


def read(files: list[Path]) -> Images:
    """Images of files in which each has 3073 bytes: its class, and its red, green and blue planes."""
    rows = torch.from_numpy(np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in files]))
    return Images(rows[:, 1:].view(-1, 3, SIZE, SIZE).float() / 127.5 - 1, rows[:, 0].long())


def draw(count: int, seed: int) -> Images:
    """Shapes of any place, size and colour on a ground of any colour, under noise: only the form tells the class."""
    chance = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=chance)

    classes = torch.randint(len(SHAPES), (count,), generator=chance)
    radius = uniform(6, 11, 1, 1)
    down, across = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    y, x = down - uniform(11, 20, 1, 1), across - uniform(11, 20, 1, 1)  # [count, 32, 32], from the shape's middle
    distance, reach = (x**2 + y**2).sqrt(), torch.maximum(x.abs(), y.abs())
    inside, period = reach < radius, radius / 2
    forms = [
        distance < radius,
        (distance < radius) & (distance > 0.6 * radius),
        inside,
        inside & (reach > 0.6 * radius),
        inside & (x.abs() < (y + radius) / 2),
        inside & (torch.minimum(x.abs(), y.abs()) < radius / 3),
        inside & (y % period < period / 2),
        inside & (x % period < period / 2),
        inside & ((x + y) % period < period / 2),
        inside & ((x % period < period / 2) ^ (y % period < period / 2)),
    ]
    form = torch.stack(forms)[classes, torch.arange(count)].float()[:, None]
    ground, colour = uniform(-1, 1, 3, 1, 1), uniform(-1, 1, 3, 1, 1)
    noise = 0.2 * torch.randn(count, 3, SIZE, SIZE, generator=chance)
    return Images((ground + form * (colour - ground) + noise).clamp(-1, 1), classes)
