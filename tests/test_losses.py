"""How far losses lie apart."""

from __future__ import annotations

import math

import pytest

from ds_plugin_sdk.losses import largest_difference


def test_the_largest_difference_counts() -> None:
    assert largest_difference([1.0, 2.5, 3.0], [1.0, 2.0, 3.25]) == 0.5
    assert largest_difference([1.0, -5.0], [1.0, -4.0], relative=True) == 0.25
    assert largest_difference(iter([1.0]), iter([1.0])) == 0.0


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.0, math.nan, 2.0], [1.0, 1.0, 2.0]),
        ([1.0, 2.0], [1.0, math.nan]),
        ([math.inf], [math.inf]),
        ([1.0], [1.0, 2.0]),
        ([], []),
    ],
)
def test_losses_that_cannot_be_compared_are_infinitely_apart(losses: list[float], expected: list[float]) -> None:
    assert largest_difference(losses, expected) == math.inf
