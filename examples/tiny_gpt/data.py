"""Real text that every machine with Python has: the sources of the standard library, as bytes.

Files are split into training and held-out text by a hash of their path, so the split is the same on every rank and
in every run, and no held-out file has been seen in training.
"""

from __future__ import annotations

import math
import os
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Installed packages are not the standard library, and some systems do not ship its tests.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
HELD_OUT_SHARE = 10  # one file in so many


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text, uint8 [bytes] each, and the number of files in each."""

    train: Tensor
    held_out: Tensor
    train_files: int
    held_out_files: int


def source_files(root: Path) -> list[Path]:
    """The ``.py`` files below `root` without installed packages and tests, as sorted relative paths."""
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = (name for name in subfolders if name not in SKIPPED_FOLDERS)  # not even visited
        files.extend(Path(folder, name).relative_to(root) for name in names if name.endswith(".py"))
    return sorted(files)


def is_held_out(path: Path) -> bool:
    """Whether the file at this relative path belongs to the held-out text."""
    return zlib.crc32(path.as_posix().encode()) % HELD_OUT_SHARE == 0


def load(root: Path | None = None) -> Corpus:
    """Read the sources below `root` (the running Python's standard library).

    Raises:
        FileNotFoundError: there are fewer than 100 source files; some systems ship only compiled ones.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files = source_files(root)
    if len(files) < 100:
        raise FileNotFoundError(f"{root} has {len(files)} .py files, too few to learn from: use a full Python")
    held_out = [path for path in files if is_held_out(path)]
    train = [path for path in files if not is_held_out(path)]
    return Corpus(_join(root, train), _join(root, held_out), len(train), len(held_out))


def random_windows(text: Tensor, count: int, context: int, generator: torch.Generator) -> Tensor:
    """`count` random pieces of `text`, int64 [count, context + 1]: inputs and, one further, targets."""
    starts = torch.randint(len(text) - context, (count,), generator=generator)
    return _windows(text, starts, context)


def even_windows(text: Tensor, count: int, context: int) -> Tensor:
    """`count` pieces evenly spread over `text`, int64 [count, context + 1]; the same ones at every call."""
    starts = torch.arange(count) * (len(text) - context - 1) // max(count - 1, 1)
    return _windows(text, starts, context)


def unigram_bits(text: Tensor, train: Tensor) -> float:
    """Bits per byte that coding `text` takes if all one knows is how often each byte occurs in `train`.

    The cross-entropy ``-sum_b p(b) log2 q(b)`` with p from `text` and q from `train`, one count added to each of the
    256 byte values so that no byte is impossible. It is the figure that a model without context reaches at best.
    """
    p = torch.bincount(text.long().flatten(), minlength=256).double()
    q = torch.bincount(train.long().flatten(), minlength=256).double() + 1
    return float(-(p / p.sum() * (q / q.sum()).log()).sum() / math.log(2))


def _join(root: Path, files: list[Path]) -> Tensor:
    text = bytearray(b"\n".join((root / path).read_bytes() for path in files))
    return torch.frombuffer(text, dtype=torch.uint8)


def _windows(text: Tensor, starts: Tensor, context: int) -> Tensor:
    return text[starts[:, None] + torch.arange(context + 1)].long()
