"""The description of a front end for the check: what to run, and what results to expect."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Result:
    """One tensor that a front end gave.

    Attributes:
        what: says which, in a message.
        actual: what it gave.
        expected: what the formula gives, float64 on the host.
        tolerance: largest absolute error.
    """

    what: str
    actual: Tensor
    expected: Tensor
    tolerance: float


@dataclass(frozen=True)
class FrontEnd:
    """One of DeepSpeed's classes or functions that call an op.

    Attributes:
        name: DeepSpeed's.
        builder: class name of the builder whose op it loads.
        run: runs it on a device and gives its results. DeepSpeed has been imported, and the device's accelerator is
            the current one.
    """

    name: str
    builder: str
    run: Callable[[torch.device], Iterable[Result]]
