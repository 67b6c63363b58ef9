"""How far the losses of two trainings lie apart."""

from __future__ import annotations

import math
from collections.abc import Iterable


def largest_difference(losses: Iterable[float], expected: Iterable[float], *, relative: bool = False) -> float:
    """The largest difference of the losses at one step.

    Infinity where they cannot be compared: one is not finite, there are none, or not as many on both sides. Python's
    ``max`` does not see a NaN behind another number.

    Args:
        losses: one a step.
        expected: those of the training to compare with.
        relative: to the size of the expected loss.
    """
    both = list(losses), list(expected)
    if len(both[0]) != len(both[1]):
        return math.inf
    differences = [abs(loss - right) / (abs(right) if relative else 1.0) for loss, right in zip(*both, strict=True)]
    return max(differences, default=math.inf) if all(map(math.isfinite, differences)) else math.inf
