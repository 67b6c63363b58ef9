"""`OpInfo`: one op, what it shall compute, and the calls on which that is tried. After the idea of torch's OpInfo.

To describe an op, write its formula in plain float64 arithmetic as its source has it (never by calling the reference),
say which calls to try, and how exact it is. Everything else is generic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

Kind = Literal["random", "adversarial", "real", "empty"]

# More rows than the second and third dimension of a grid have blocks; more columns than a block has threads.
MANY_ROWS, MANY_COLUMNS = 65_541, 5_001
# More numbers than a block's shared memory has room for.
LONG_ROW = 33_000
Choice = TypeVar("Choice")

# A unit in the last place of each dtype, and one more for what float32 arithmetic loses before the rounding.
_RTOL = {torch.float32: 2e-6, torch.bfloat16: 2**-8 + 2e-6, torch.float16: 2**-11 + 2e-6}
_ATOL = {torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 6e-8}


@dataclass(frozen=True)
class Sample:
    """One call of an op.

    Attributes:
        label: short and stable, for it is part of the check's id: ``"17 elements"``, ``"gpt2 mlp"``.
        arguments: by the names of the op's Python function; tensors, lists of tensors, numbers, None.
        kind: ``random`` for ordinary values and shapes; ``adversarial`` for tails, huge and tiny values, ties; ``real``
            for the shapes of real models; ``empty`` for no elements.
    """

    label: str
    arguments: Mapping[str, Any]
    kind: Kind = "random"


@dataclass(frozen=True, eq=False)
class OpInfo:
    """One op.

    Attributes:
        name: as in ``torch.ops.<namespace>.<name>``; it is part of the ids of the op's cases.
        family: module of `ds_plugin_sdk.ops`; empty for a vendor's own op, whose `function` loads its kernels.
        function: its Python function; called with a sample's arguments by name.
        formula: what it computes: called with the same arguments, all floating-point tensors in float64. Gives a tuple:
            the new contents of each argument in `written`, then each output; a list of tensors where the op has one.
            Modifies nothing. It is made of torch functions, so that autograd derives it.
        samples: ``samples(make)`` gives the calls to try for ``make.dtype``: the empty ones first, those of real models
            last, since many checks want a cheap one.
        random: ``random(make)`` draws the arguments of one call: any sizes that fit, any options; for `sdk fuzz`.
        dtypes: dtypes that a kernel takes; the first argument's dtype where several are mixed.
        written: names of the arguments that are modified in place.
        differentiable: names of the arguments that have gradients.
        rtol: per dtype, largest error relative to the larger of the expected value and the value it replaced.
        atol: per dtype, largest absolute error.
        quantized: per dtype, either of them in a call with ``scales``, whose weights are quantized; as above if empty.
        gradient_rtol, gradient_atol: the same for gradients; as `rtol` and `atol` if empty.
        contiguous: names of arguments that must be contiguous: others in any layout must work.
        broadcasts: names of arguments whose shape may differ from what the sample has.
        any_dtype: names of arguments that may be of any dtype.
        schema_arguments: from a sample's arguments to those of the torch op, positional; None if they are the same.
        nan: whether a NaN in a floating-point argument may be tried.
        finite: names of arguments in which `sdk fuzz` tries neither NaN nor infinity.
        levels: whether a result is rounded to few levels or signs, so that the last bit of a number may decide.
        plain: whether the reference is a call or two of torch's own kernels, so that no other kernel is wanted.
        large: ``large(make)`` gives calls beyond the limits of a launch: 65,535 rows, 1,024 columns, many tensors.
        indices: integer arguments whose entries say where something lies, each with the first that is out of range.
        float64: whether it takes float64, for finite differences.
        namespace: of the torch op.
    """

    name: str
    family: str
    function: Callable[..., Any]
    formula: Callable[..., tuple[Any, ...]]
    samples: Callable[[Make], Iterable[Sample]]
    random: Callable[[Make], Mapping[str, Any]]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    written: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()
    rtol: Mapping[torch.dtype, float] = field(default_factory=lambda: _RTOL)
    atol: Mapping[torch.dtype, float] = field(default_factory=lambda: _ATOL)
    quantized: Mapping[torch.dtype, float] = field(default_factory=dict)
    gradient_rtol: Mapping[torch.dtype, float] = field(default_factory=dict)
    gradient_atol: Mapping[torch.dtype, float] = field(default_factory=dict)
    contiguous: tuple[str, ...] = ()
    broadcasts: tuple[str, ...] = ()
    any_dtype: tuple[str, ...] = ()
    schema_arguments: Callable[[Mapping[str, Any]], Sequence[Any]] | None = None
    nan: bool = True
    finite: tuple[str, ...] = ()
    levels: bool = False
    plain: bool = False
    large: Callable[[Make], Iterable[Sample]] = lambda make: ()
    indices: Mapping[str, Callable[[Mapping[str, Any]], int]] = field(default_factory=dict)
    float64: bool = True
    namespace: str = "ds_plugin"

    @property
    def overload(self) -> Any:
        """``torch.ops.<namespace>.<name>.default``."""
        return getattr(getattr(torch.ops, self.namespace), self.name).default

    def allowed(self, arguments: Mapping[str, Any], dtype: torch.dtype) -> tuple[float, float]:
        """The largest error of a result of `dtype` in a call, relative and absolute; none where it is of integers."""
        if arguments.get("scales") is not None and dtype in self.quantized:
            return self.quantized[dtype], self.quantized[dtype]
        return self.rtol.get(dtype, 0.0), self.atol.get(dtype, 0.0)


@dataclass(frozen=True)
class Make:
    """Makes tensors of one dtype, reproducibly: on the host; a check moves them to the device.

    Attributes:
        dtype: of floating-point tensors, unless said otherwise.
        generator: where the numbers come from.
        largest: of the sizes that are drawn.
    """

    dtype: torch.dtype
    generator: torch.Generator
    largest: int = 3000

    @staticmethod
    def seeded(dtype: torch.dtype, seed: int = 0) -> Make:
        """Tensors of `dtype` that are the same for the same seed."""
        return Make(dtype, torch.Generator().manual_seed(seed))

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normally distributed."""
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype or self.dtype)

    def signed(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Of either sign, between 0.5 and 2 times `scale` in size: a sum of two loses no digits."""
        size = torch.rand(shape, generator=self.generator) * 1.5 + 0.5
        sign = torch.randint(0, 2, shape, generator=self.generator) * 2 - 1
        return (size * sign * scale).to(dtype or self.dtype)

    def positive(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Between 0.5 and 2 times `scale`."""
        return self.signed(*shape, scale=scale, dtype=dtype).abs()

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """At least `low` and less than `high`."""
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    # ---- for `OpInfo.random` -----------------------------------------------------------------------------------------
    def pick(self, *options: Choice) -> Choice:
        """One of these."""
        return options[int(torch.randint(len(options), (), generator=self.generator))]

    def chance(self) -> bool:
        """Heads or tails."""
        return self.pick(True, False)

    def size(self, largest: int = 3000, smallest: int = 0) -> int:
        """A size: none, one, few, just around a multiple of a vector's length, or any."""
        largest = max(smallest, min(largest, self.largest))
        kind = int(torch.randint(20, (), generator=self.generator))
        if kind < 2:
            size = kind
        elif kind < 8:
            size = self.pick(*range(2, 10))
        elif kind < 14:
            size = self.pick(8, 16, 32, 64, 128, 256, 1024) * self.pick(1, 1, 2, 3) + self.pick(-1, 0, 0, 1)
        else:
            size = int(2 ** (float(torch.rand((), generator=self.generator)) * math.log2(max(largest, 2))))
        return min(max(size, smallest), largest)

    def shape(
        self, dimensions: int = 0, *, elements: int = 60_000, rows: int = 4000, even: bool = False
    ) -> tuple[int, ...]:
        """A shape whose last dimension may be long, and even if so wanted; 1 to 4 dimensions unless said otherwise."""
        last = self.size()
        last += last % 2 if even else 0
        leading: list[int] = []
        for _ in range((dimensions or self.pick(1, 2, 2, 3, 4)) - 1):
            most = min(rows, elements // max(last, 1)) // max(math.prod(leading), 1)
            leading.append(self.size(max(1, min(70, most))))
        return *leading, last


def close_to(
    actual: Tensor, expected: Tensor, *, before: Tensor | None = None, rtol: float, atol: float
) -> tuple[float, tuple[int, ...]] | None:
    """The worst error that exceeds what is allowed, as (times the allowed, index), or None.

    Args:
        actual: what was computed, any dtype.
        expected: what the formula gives, float64. NaN and infinity must be met exactly.
        before: the values that were replaced: a difference of close numbers has the error of the numbers.
        rtol, atol: allowed is ``rtol * max(|expected|, |before|) + atol``.
    """
    if actual.numel() == 0:
        return None
    actual, expected = actual.double(), expected.double()
    # What was not finite and has been overwritten allows nothing.
    replaced = torch.zeros(()) if before is None else before.double().abs().nan_to_num(0.0, 0.0, 0.0)
    scale = torch.maximum(expected.abs(), replaced)
    excess = (actual - expected).abs() / (rtol * scale.nan_to_num(0.0, 0.0, 0.0) + atol)
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    # What is not finite on one side only is infinitely wrong.
    excess = torch.where(same, 0.0, torch.where(excess.isfinite(), excess, torch.inf))
    worst = int(excess.argmax())
    if float(excess.flatten()[worst]) <= 1:
        return None
    index = torch.unravel_index(torch.tensor(worst), excess.shape)
    return float(excess.flatten()[worst]), tuple(int(i) for i in index)
