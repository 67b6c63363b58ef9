"""Which blocks of an attention matrix are computed: the patterns of DeepSpeed up to 0.18.

A layout is an int64 tensor ``[num_heads, blocks, blocks]`` of zeros and ones: entry ``[h, i, j]`` says whether queries
of block i attend to keys of block j in head h. Names, arguments and layouts are DeepSpeed's, random ones drawn in
the same order from Python's `random`; with one difference: where attention is unidirectional, no layout has a block
above the diagonal. Within the blocks on the diagonal all keys are seen: causality by token is for `attn_mask` to say.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

Attention = Literal["unidirectional", "bidirectional"]


class SparsityConfig:
    """What all patterns share.

    Args:
        num_heads: number of attention heads.
        block: number of tokens in a block.
        different_layout_per_head: whether each head has a layout of its own; otherwise all have the first head's.

    Raises:
        ValueError: arguments of a pattern contradict each other, or do not fit the length of a sequence.
    """

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False) -> None:
        _expect_some(num_heads=num_heads, block=block)
        self.num_heads = num_heads
        self.block = block
        self.different_layout_per_head = different_layout_per_head
        self.attention: Attention = "bidirectional"

    def make_layout(self, seq_len: int) -> Tensor:
        """The layout for sequences of a length.

        Args:
            seq_len: in tokens, a multiple of `block`.

        Returns:
            int64 ``[num_heads, seq_len // block, seq_len // block]`` on the host.

        Raises:
            ValueError: `seq_len` is no multiple of `block`, or has fewer blocks than the pattern asks for.
        """
        if seq_len % self.block:
            raise ValueError(f"the sequence has {seq_len} tokens; expected a multiple of the block, {self.block}")
        blocks = seq_len // self.block
        heads = range(self.num_heads if self.different_layout_per_head else 1)
        with torch.device("cpu"):  # whatever the default device is
            layout = torch.stack([self._head_layout(head, blocks) for head in heads])
        if self.attention == "unidirectional":
            layout = layout.tril()
        return layout.expand(self.num_heads, blocks, blocks).to(torch.int64, memory_format=torch.contiguous_format)

    def _head_layout(self, head: int, blocks: int) -> Tensor:
        """Bool ``[blocks, blocks]``; what lies above the diagonal is cut off where it has to be."""
        raise NotImplementedError(f"{type(self).__name__} is no pattern; use one of the classes derived from it")

    def _set_attention(self, attention: Attention, horizontal_global_attention: bool = False) -> None:
        if attention not in ("unidirectional", "bidirectional"):
            raise ValueError(f"attention is {attention!r}; expected 'unidirectional' or 'bidirectional'")
        if attention == "unidirectional" and horizontal_global_attention:
            raise ValueError("horizontal_global_attention needs bidirectional attention")
        self.attention = attention


class DenseSparsityConfig(SparsityConfig):
    """All blocks: for comparison.

    Args:
        num_heads, block, different_layout_per_head: as in `SparsityConfig`.
    """

    def _head_layout(self, head: int, blocks: int) -> Tensor:
        return torch.ones(blocks, blocks, dtype=torch.bool)


class FixedSparsityConfig(SparsityConfig):
    """Windows side by side, each with blocks that stand for it (Child et al. 2019, "fixed").

    A block attends to its window, and to the global blocks of all windows. These are the last `num_global_blocks` of a
    window; with several patterns, head h takes the ones `h % num_different_global_patterns` steps before.

    Args:
        num_heads, block, different_layout_per_head: as in `SparsityConfig`.
        num_local_blocks: size of a window.
        num_global_blocks: number of blocks that stand for a window; a divisor of its size.
        attention: ``unidirectional`` or ``bidirectional``.
        horizontal_global_attention: whether global blocks attend to all blocks, too.
        num_different_global_patterns: among how many choices of global blocks the heads take turns.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: Attention = "bidirectional",
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self._set_attention(attention, horizontal_global_attention)
        _expect_some(num_local_blocks=num_local_blocks, num_global_blocks=num_global_blocks)
        if num_local_blocks % num_global_blocks:
            raise ValueError(
                f"num_local_blocks is {num_local_blocks}; expected a multiple of num_global_blocks, {num_global_blocks}"
            )
        if num_different_global_patterns > 1 and not different_layout_per_head:
            raise ValueError("num_different_global_patterns needs different_layout_per_head")
        if num_different_global_patterns > num_local_blocks // num_global_blocks:
            raise ValueError(
                f"num_different_global_patterns is {num_different_global_patterns}; expected at most "
                f"num_local_blocks / num_global_blocks, {num_local_blocks // num_global_blocks}"
            )
        self.num_local_blocks = num_local_blocks
        self.num_global_blocks = num_global_blocks
        self.horizontal_global_attention = horizontal_global_attention
        self.num_different_global_patterns = num_different_global_patterns

    def _head_layout(self, head: int, blocks: int) -> Tensor:
        layout = _windows(blocks, [self.num_local_blocks])
        for start in self._global_blocks(head, blocks):
            _add_global(layout, start, start + self.num_global_blocks, rows=self.horizontal_global_attention)
        return layout

    def _global_blocks(self, head: int, blocks: int) -> Iterator[int]:
        """Where the global blocks of each window begin; a window that is cut short keeps them within itself."""
        pattern = head % self.num_different_global_patterns
        first = self.num_local_blocks - (1 + pattern) * self.num_global_blocks
        for window in range(0, blocks, self.num_local_blocks):
            yield max(0, min(window + first, blocks - self.num_global_blocks))


class VariableSparsityConfig(SparsityConfig):
    """Windows of given sizes, given global blocks, and random ones.

    Args:
        num_heads, block, different_layout_per_head: as in `SparsityConfig`.
        num_random_blocks: number of blocks that each row draws.
        local_window_blocks: sizes of the windows; the last is that of all further ones.
        global_block_indices: blocks that all attend to; those beyond the sequence do not count, -1 is the last.
        global_block_end_indices: if given, where the range ends that begins at each of these; exclusive.
        attention: ``unidirectional`` or ``bidirectional``.
        horizontal_global_attention: whether global blocks attend to all blocks, too.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,),
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: Attention = "bidirectional",
        horizontal_global_attention: bool = False,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self._set_attention(attention, horizontal_global_attention)
        self.num_random_blocks = num_random_blocks
        self.local_window_blocks = list(local_window_blocks)
        if not self.local_window_blocks or min(self.local_window_blocks) < 1:
            raise ValueError(
                f"local_window_blocks is {self.local_window_blocks}; expected at least one, each at least 1"
            )
        self.global_ranges = _ranges(global_block_indices, global_block_end_indices)
        self.horizontal_global_attention = horizontal_global_attention

    def _head_layout(self, head: int, blocks: int) -> Tensor:
        _check_room("num_random_blocks", self.num_random_blocks, blocks)
        layout = _windows(blocks, self.local_window_blocks)
        for row in range(blocks):
            layout[row, random.sample(range(blocks), self.num_random_blocks)] = True
        for start, end in self.global_ranges:
            _add_global(layout, start, end, rows=self.horizontal_global_attention)
        return layout


class BigBirdSparsityConfig(SparsityConfig):
    """A sliding window, the first blocks as global ones, and random blocks (Zaheer et al. 2020).

    Args:
        num_heads, block, different_layout_per_head: as in `SparsityConfig`.
        num_random_blocks: number of blocks that each row draws: from those up to its own if unidirectional.
        num_sliding_window_blocks: width of the window, which reaches half of that to either side.
        num_global_blocks: number of blocks, from the first on, that all attend to and that attend to all.
        attention: ``unidirectional`` or ``bidirectional``.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: Attention = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self._set_attention(attention)
        self.num_random_blocks = num_random_blocks
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.num_global_blocks = num_global_blocks

    def _head_layout(self, head: int, blocks: int) -> Tensor:
        for name in ("num_random_blocks", "num_sliding_window_blocks", "num_global_blocks"):
            _check_room(name, getattr(self, name), blocks)
        layout = _sliding_window(blocks, self.num_sliding_window_blocks)
        for row in range(blocks):
            choice = range(blocks if self.attention == "bidirectional" else row + 1)
            layout[row, random.sample(choice, min(self.num_random_blocks, len(choice)))] = True
        _add_global(layout, 0, self.num_global_blocks, rows=True)
        return layout


class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window, and given global blocks (Beltagy et al. 2020, by blocks).

    Args:
        num_heads, block, different_layout_per_head: as in `SparsityConfig`.
        num_sliding_window_blocks: width of the window, which reaches half of that to either side.
        global_block_indices: blocks that all attend to and that attend to all; those beyond the sequence do not count,
            and -1 is the last.
        global_block_end_indices: if given, where the range ends that begins at each of these; exclusive.
        attention: ``unidirectional`` or ``bidirectional``.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: Attention = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self._set_attention(attention)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.global_ranges = _ranges(global_block_indices, global_block_end_indices)

    def _head_layout(self, head: int, blocks: int) -> Tensor:
        _check_room("num_sliding_window_blocks", self.num_sliding_window_blocks, blocks)
        layout = _sliding_window(blocks, self.num_sliding_window_blocks)
        for start, end in self.global_ranges:
            _add_global(layout, start, end, rows=True)
        return layout


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A sliding window and nothing else.

    Args:
        num_heads, block: as in `SparsityConfig`.
        num_sliding_window_blocks: width of the window, which reaches half of that to either side.
        attention: ``unidirectional`` or ``bidirectional``.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        num_sliding_window_blocks: int = 3,
        attention: Attention = "unidirectional",
    ) -> None:
        super().__init__(num_heads, block)
        self._set_attention(attention)
        self.num_sliding_window_blocks = num_sliding_window_blocks

    def _head_layout(self, head: int, blocks: int) -> Tensor:
        _check_room("num_sliding_window_blocks", self.num_sliding_window_blocks, blocks)
        return _sliding_window(blocks, self.num_sliding_window_blocks)


# ---- parts of patterns -----------------------------------------------------------------------------------------------
def _windows(blocks: int, sizes: Sequence[int]) -> Tensor:
    """Windows side by side, the last size repeated: each block attends to its own window."""
    windows: list[int] = []
    for number, size in enumerate(sizes):
        windows += [number] * size
    while len(windows) < blocks:
        windows += [windows[-1] + 1] * sizes[-1]
    window = torch.tensor(windows[:blocks])
    return window.unsqueeze(1) == window


def _sliding_window(blocks: int, width: int) -> Tensor:
    place = torch.arange(blocks)
    return (place.unsqueeze(1) - place).abs() <= width // 2


def _add_global(layout: Tensor, start: int, end: int, *, rows: bool) -> None:
    """All blocks attend to blocks [start, end), and these to all if `rows`. Numbers below 0 count from the end."""
    if start < 0:
        start, end = start + len(layout), end + len(layout)
    layout[:, start:end] = True
    if rows:
        layout[start:end] = True


def _ranges(starts: Sequence[int], ends: Sequence[int] | None) -> list[tuple[int, int]]:
    if ends is None:
        ends = [start + 1 for start in starts]
    if len(starts) != len(ends) or any(start >= end for start, end in zip(starts, ends, strict=True)):
        raise ValueError(
            f"global_block_end_indices is {list(ends)}; expected one for each of global_block_indices, beyond it: "
            f"{list(starts)}"
        )
    return list(zip(starts, ends, strict=True))


def _expect_some(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} is {count}; expected at least 1")


def _check_room(name: str, count: int, blocks: int) -> None:
    if count > blocks:
        raise ValueError(f"{name} is {count}; expected at most {blocks}, the blocks of this sequence")


__all__ = [
    "BSLongformerSparsityConfig",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "SparsityConfig",
    "VariableSparsityConfig",
]
