"""Layouts against definitions entry by entry."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from ds_plugin_sdk.nn import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 23)
# head, row, column, blocks -> whether the row's queries attend to the column's keys
Definition = Callable[[int, int, int, int], bool]


def fixed(window: int, count: int, patterns: int, horizontal: bool) -> Definition:
    def is_global(head: int, block: int, blocks: int) -> bool:
        start = block // window * window
        first = min(start + window - (1 + head % patterns) * count, blocks - count)
        # The last window may be short; its global blocks then reach back into the one before.
        last = blocks - 1
        tail = min(last // window * window + window - (1 + head % patterns) * count, blocks - count)
        return first <= block < first + count or max(tail, 0) <= block < tail + count

    def attends(head: int, row: int, column: int, blocks: int) -> bool:
        same = row // window == column // window
        return same or is_global(head, column, blocks) or (horizontal and is_global(head, row, blocks))

    return attends


def sliding(width: int, global_blocks: set[int]) -> Definition:
    return lambda head, row, column, blocks: (
        abs(row - column) <= width // 2 or column in global_blocks or row in global_blocks
    )


def variable(sizes: list[int], global_blocks: set[int], horizontal: bool) -> Definition:
    def window(block: int) -> int:
        number, end = 0, sizes[0]
        while block >= end:
            number += 1
            end += sizes[min(number, len(sizes) - 1)]
        return number

    return lambda head, row, column, blocks: (
        window(row) == window(column) or column in global_blocks or (horizontal and row in global_blocks)
    )


ONE, BOTH = "unidirectional", "bidirectional"
CASES: list[tuple[SparsityConfig, Definition]] = [
    (DenseSparsityConfig(3), lambda *_: True),
    *(
        (
            FixedSparsityConfig(
                5,
                16,
                patterns > 1,
                num_local_blocks=window,
                num_global_blocks=count,
                attention=attention,
                horizontal_global_attention=horizontal,
                num_different_global_patterns=patterns,
            ),
            fixed(window, count, patterns, horizontal),
        )
        for window, count, patterns in ((4, 1, 1), (4, 1, 4), (4, 2, 2), (3, 1, 2), (1, 1, 1))
        for attention, horizontal in ((ONE, False), (BOTH, False), (BOTH, True))
    ),
    *(
        (
            VariableSparsityConfig(
                2,
                local_window_blocks=sizes,
                global_block_indices=starts,
                global_block_end_indices=ends,
                attention=attention,
                horizontal_global_attention=horizontal,
            ),
            variable(sizes, blocks, horizontal),
        )
        for sizes in ([4], [1, 2], [2, 3, 5])
        for starts, ends, blocks in (([0], None, {0}), ([0, 3], [1, 6], {0, 3, 4, 5}), ([40], None, {40}))
        for attention, horizontal in ((ONE, False), (BOTH, False), (BOTH, True))
    ),
    *(
        (BSLongformerSparsityConfig(2, 16, False, width, starts, ends, attention), sliding(width, blocks))
        for width in (1, 3, 4)
        for starts, ends, blocks in (([0], None, {0}), ([1, 3], [2, 6], {1, 3, 4, 5}))
        for attention in (ONE, BOTH)
    ),
    *(
        (BigBirdSparsityConfig(2, 16, False, 0, width, count, attention), sliding(width, set(range(count))))
        for width, count in ((3, 1), (5, 2), (1, 0))
        for attention in (ONE, BOTH)
    ),
    *(
        (LocalSlidingWindowSparsityConfig(2, 16, width, attention), sliding(width, set()))
        for width in (1, 3, 4)
        for attention in (ONE, BOTH)
    ),
]


@pytest.mark.parametrize(
    ("config", "definition"),
    CASES,
    ids=[f"{number}-{type(config).__name__}" for number, (config, _) in enumerate(CASES)],
)
def test_a_layout_is_its_definition(config: SparsityConfig, definition: Definition) -> None:
    for blocks in LENGTHS:
        try:
            layout = config.make_layout(blocks * config.block)
        except ValueError:
            assert blocks < 6  # a window that does not fit
            continue
        causal = config.attention == ONE
        expected = [
            [
                [
                    int(definition(head, row, column, blocks) and not (causal and column > row))
                    for column in range(blocks)
                ]
                for row in range(blocks)
            ]
            for head in range(config.num_heads)
        ]
        assert layout.dtype == torch.int64
        assert layout.tolist() == expected, f"{blocks} blocks"


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("attention", [ONE, BOTH])
@pytest.mark.parametrize("make", [BigBirdSparsityConfig, VariableSparsityConfig])
def test_random_blocks_come_on_top(make: type[SparsityConfig], attention: str, per_head: bool) -> None:
    """As many as asked for in each row, by Python's seed, and none in the future of unidirectional attention."""

    def layout(count: int) -> torch.Tensor:
        random.seed(7)
        return make(4, 16, per_head, num_random_blocks=count, attention=attention).make_layout(20 * 16).bool()

    plain, with_random = layout(0), layout(2)
    added = with_random & ~plain
    assert torch.equal(with_random, layout(2))
    assert torch.equal(with_random & plain, plain)
    assert added.any() and added.sum(-1).max() <= 2
    assert (attention == BOTH) == bool(with_random.triu(1).any())
    assert (with_random == with_random[:1]).all() != per_head


def test_what_contradicts_itself_is_rejected() -> None:
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("multiple of the block", lambda: DenseSparsityConfig(1).make_layout(17)),
        ("num_global_blocks", lambda: FixedSparsityConfig(1, num_local_blocks=4, num_global_blocks=3)),
        ("different_layout_per_head", lambda: FixedSparsityConfig(4, num_different_global_patterns=2)),
        ("at most", lambda: FixedSparsityConfig(4, 16, True, num_different_global_patterns=5)),
        ("'sideways'", lambda: BigBirdSparsityConfig(1, attention="sideways")),  # type: ignore[arg-type]  # wrong on purpose
        ("bidirectional", lambda: FixedSparsityConfig(1, attention=ONE, horizontal_global_attention=True)),
        ("global_block_end_indices", lambda: BSLongformerSparsityConfig(1, 16, False, 3, [0, 4], [2])),
        ("beyond it", lambda: VariableSparsityConfig(1, global_block_indices=[3], global_block_end_indices=[3])),
        ("num_sliding_window_blocks", lambda: LocalSlidingWindowSparsityConfig(1).make_layout(32)),
        ("num_random_blocks", lambda: VariableSparsityConfig(1, num_random_blocks=9).make_layout(32)),
    ]
    for message, call in wrong:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(NotImplementedError, match="no pattern"):
        SparsityConfig(1).make_layout(16)


def test_a_global_block_below_zero_counts_from_the_end() -> None:
    layout = BSLongformerSparsityConfig(1, 16, num_sliding_window_blocks=1, global_block_indices=[-1]).make_layout(64)
    assert layout[0, :, 3].all() and layout[0, 3].all() and not layout[0, 0, 1:3].any()


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (DenseSparsityConfig, {"block": 0}),
        (FixedSparsityConfig, {"num_global_blocks": 0}),
        (VariableSparsityConfig, {"local_window_blocks": []}),
        (VariableSparsityConfig, {"local_window_blocks": [0]}),
    ],
)
def test_sizes_of_nothing_are_rejected(make: type[SparsityConfig], options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} is .*expected at least"):
        make(2, **options)  # type: ignore[arg-type]  # of any pattern
