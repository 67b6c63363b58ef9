"""What a transformer layer does between its matrix products, forward and backward.

Which elements a dropout keeps is no matter of formulas: the masks are those of `ds_plugin_sdk.ops._philox`, whose
generator has published answers of its own to meet. Where a norm is taken of a sum that was rounded, the samples are
multiples of 1/8 and one half is dropped, so that the sum is exact in every dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.activation import activate
from ds_plugin_sdk.conformance.op_info.norm import one_number_a_row
from ds_plugin_sdk.conformance.op_info.op_info import MANY_COLUMNS, MANY_ROWS, Kind, Make, OpInfo, Sample
from ds_plugin_sdk.ops import _library, _philox, transformer
from ds_plugin_sdk.ops.activation import ACTIVATIONS

# Rows and columns around vectors, blocks of random numbers, and parts of sums over rows.
_SHAPES = ((1, 1), (2, 3), (3, 16), (2, 17), (3, 63), (2, 2, 64), (2, 3, 2, 17), (3, 65), (2, 130), (70, 257))
_BERT = (8, 64, 768)


# ---- formulas --------------------------------------------------------------------------------------------------------
def _kept(x: Tensor, seed: Tensor | None, p: float) -> Tensor:
    if p == 0:
        return x
    assert seed is not None
    rows = math.prod(x.shape[:-1])
    return torch.where(_philox.keep(seed, rows, x.shape[-1], p).view(x.shape), x / (1 - p), 0.0)


def _plus(x: Tensor, y: Tensor | None) -> Tensor:
    return x if y is None else x + y


def _column_sums(x: Tensor) -> Tensor:
    return x.flatten(0, -2).sum(dim=0)


def _nothing(x: Tensor) -> Tensor:
    return x.new_empty(0)


def _dropout_add(
    input: Tensor, residual: Tensor | None, bias: Tensor | None, p: float, seed: Tensor | None
) -> tuple[Tensor]:
    return (_plus(_kept(_plus(input, bias), seed, p), residual),)


def _dropout_add_backward(grad_output: Tensor, seed: Tensor | None, p: float, bias: bool) -> tuple[Tensor, Tensor]:
    grad = _kept(grad_output, seed, p)
    return grad, _column_sums(grad) if bias else _nothing(grad)


def _norm(
    input: Tensor,
    weight: Tensor,
    norm_bias: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    p: float,
    seed: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    (total,) = _dropout_add(input, residual, bias, p, seed)
    centred = total - total.mean(dim=-1, keepdim=True)
    variance = (centred**2).mean(dim=-1, keepdim=True)
    normed = centred / torch.sqrt(variance + eps) * weight + norm_bias
    return (normed,) if residual is None and bias is None and p == 0 else (normed, total)


def _norm_backward(
    grad_output: Tensor,
    grad_sum: Tensor | None,
    rows: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None,
    seed: Tensor | None,
    p: float,
    bias: bool,
) -> tuple[Tensor, ...]:
    rstd = rstd.unsqueeze(-1)
    if mean is None:
        assert norm_bias is not None
        normal = (rows - norm_bias) / weight
    else:
        normal = (rows - mean.unsqueeze(-1)) * rstd
    g = grad_output * weight
    total = rstd * (g - g.mean(dim=-1, keepdim=True) - normal * (g * normal).mean(dim=-1, keepdim=True))
    total = _plus(total, grad_sum)
    dropped = _kept(total, seed, p)
    return (
        total,
        dropped if p else _nothing(total),
        _column_sums(grad_output * normal),
        _column_sums(grad_output),
        _column_sums(dropped) if bias else _nothing(total),
    )


def _rms_norm(input: Tensor, weight: Tensor, residual: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    total = _plus(input, residual)
    normed = total / torch.sqrt((total**2).mean(dim=-1, keepdim=True) + eps) * weight
    return (normed,) if residual is None else (normed, total)


def _rms_norm_backward(
    grad_output: Tensor, grad_sum: Tensor | None, rows: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    normal = rows * rstd.unsqueeze(-1)
    g = grad_output * weight
    total = rstd.unsqueeze(-1) * (g - normal * (g * normal).mean(dim=-1, keepdim=True))
    return _plus(total, grad_sum), _column_sums(grad_output * normal)


def _gate(gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor]:
    return (activate(gate, activation) * up,)


def _gate_backward(grad_output: Tensor, gate: Tensor, up: Tensor, activation: int) -> tuple[Tensor, Tensor]:
    name = ACTIVATIONS[activation]
    return grad_output * up * _slope(gate, name), grad_output * activate(gate, name)


def _slope(x: Tensor, activation: str) -> Tensor:
    """The derivative of an activation, by formulas that lose nothing where it is much smaller than 1."""
    if activation == "relu":
        return (x > 0).to(x.dtype)
    if activation == "silu":
        rest = torch.sigmoid(x) * torch.sigmoid(-x)  # 0 far out, where x may be infinite
        return torch.sigmoid(x) + torch.where(rest == 0, 0.0, x * rest)
    if activation == "identity":
        return torch.ones_like(x)
    # From 40 on the slope is 0 or 1 in float64 too, and its terms do not overflow.
    s = x.clamp(-40, 40)
    if activation == "gelu_tanh":
        # (1 + tanh u) / 2 is sigmoid(2 u), which loses nothing where tanh is near -1.
        u = math.sqrt(2 / math.pi) * (s + 0.044715 * s**3)
        rise = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * s**2)
        return torch.sigmoid(2 * u) * (1 + 2 * s * torch.sigmoid(-2 * u) * rise)
    return torch.erfc(-s / math.sqrt(2)) / 2 + s * torch.exp(-(s**2) / 2) / math.sqrt(2 * math.pi)


def _gelu(input: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor]:
    return (activate(_plus(input, bias), "gelu_tanh" if tanh else "gelu"),)


def _gelu_backward(grad_output: Tensor, input: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    grad = grad_output * _slope(_plus(input, bias), "gelu_tanh" if tanh else "gelu")
    return grad, _nothing(grad) if bias is None else _column_sums(grad)


def _softmax(scores: Tensor, mask: Tensor | None, scale: float, p: float, seed: Tensor | None) -> tuple[Tensor]:
    x = _plus(scale * scores, mask)
    # Where all is -inf, nothing is attended to.
    nowhere = (x == -torch.inf).all(dim=-1, keepdim=True)
    probs = torch.where(nowhere, 0.0, torch.softmax(torch.where(nowhere, 0.0, x), dim=-1))
    return (_kept(probs, seed, p),)


def _softmax_backward(grad_output: Tensor, probs: Tensor, scale: float, seed: Tensor | None, p: float) -> tuple[Tensor]:
    grad = _kept(grad_output, seed, p)
    return (scale * probs * (grad - (grad * probs).sum(dim=-1, keepdim=True)),)


# ---- samples ---------------------------------------------------------------------------------------------------------
def _eighths(make: Make, *shape: int) -> Tensor:
    """Multiples of 1/8 from -2 to 2."""
    return (make.integers(-16, 17, *shape) / 8).to(make.dtype)


def _seed(make: Make) -> Tensor:
    return make.integers(-(2**62), 2**62, 1)


Tensors = dict[str, Any]
Variant = tuple[str, Callable[[Make, tuple[int, ...]], Tensors]]


def _samples(
    variants: Sequence[Variant], more: Callable[[Make], Iterable[Sample]]
) -> Callable[[Make], Iterator[Sample]]:
    """No elements, then each variant in each shape, then the shape of BERT's layers, then what else is to be tried."""

    def samples(make: Make) -> Iterator[Sample]:
        def sample(shape: tuple[int, ...], variant: Variant, kind: Kind) -> Sample:
            return Sample(f"{list(shape)}, {variant[0]}", variant[1](make, shape), kind)

        yield sample((0, 5), variants[0], "empty")
        for variant in variants:
            for shape in _SHAPES:
                yield sample(shape, variant, "random")
        yield sample(_BERT, variants[0], "real")
        yield from more(make)

    return samples


def _large(variant: Variant) -> Callable[[Make], Iterator[Sample]]:
    """A variant in many rows, and in long ones."""

    def large(make: Make) -> Iterator[Sample]:
        for shape in ((MANY_ROWS, 3), (3, MANY_COLUMNS)):
            yield Sample(f"{list(shape)}, {variant[0]}", variant[1](make, shape), "adversarial")

    return large


def _sums(p: float, bias: bool, residual: bool, norm: bool = False) -> Callable[[Make, tuple[int, ...]], Tensors]:
    def arguments(make: Make, shape: tuple[int, ...]) -> Tensors:
        columns = shape[-1]
        tensors: Tensors = {"input": _eighths(make, *shape)}
        if norm:
            tensors |= {"weight": make.signed(columns), "norm_bias": make.normal(columns)}
        return tensors | {
            "residual": _eighths(make, *shape) if residual else None,
            "bias": _eighths(make, columns) if bias else None,
            "p": p,
            "seed": _seed(make) if p else None,
            **({"eps": 0.5} if norm else {}),
        }

    return arguments


def _far_sums(make: Make, shape: tuple[int, ...]) -> Tensors:
    """Sums far from zero, whose squares float16 does not hold; they are exact in every dtype."""
    tensors = _sums(0.0, False, True, norm=True)(make, shape)
    far = 40.0 if make.dtype == torch.float32 else 14.0
    return {**tensors, "input": 512 * tensors["input"], "residual": torch.full(shape, 512 * far, dtype=make.dtype)}


def _one_number_a_row(make: Make) -> Iterator[Sample]:
    rows = one_number_a_row(make)
    tensors = _sums(0.0, False, False, norm=True)(make, tuple(rows.shape))
    yield Sample("one number a row", {**tensors, "input": rows, "eps": 1e-5}, "real")


def _large_rms_norms(make: Make, shape: tuple[int, ...]) -> Tensors:
    """Of sums whose squares float16 does not hold."""
    tensors = _rms_norms(True)(make, shape)
    return {**tensors, "input": 512 * tensors["input"], "residual": 512 * tensors["residual"]}


def _sum_grads(p: float, bias: bool) -> Callable[[Make, tuple[int, ...]], Tensors]:
    return lambda make, shape: {
        "grad_output": make.normal(*shape),
        "seed": _seed(make) if p else None,
        "p": p,
        "bias": bias,
    }


def _norm_grads(p: float, bias: bool, grad_sum: bool, inverted: bool) -> Callable[[Make, tuple[int, ...]], Tensors]:
    def arguments(make: Make, shape: tuple[int, ...]) -> Tensors:
        exact = torch.float32
        return {
            "grad_output": make.normal(*shape),
            "grad_sum": make.normal(*shape) if grad_sum else None,
            "rows": make.normal(*shape),
            "mean": None if inverted else make.normal(*shape[:-1], scale=0.1, dtype=exact),
            "rstd": make.positive(*shape[:-1], dtype=exact),
            "weight": make.signed(shape[-1]),
            "norm_bias": make.normal(shape[-1]) if inverted else None,
            "seed": _seed(make) if p else None,
            "p": p,
            "bias": bias,
        }

    return arguments


def _rms_norms(residual: bool) -> Callable[[Make, tuple[int, ...]], Tensors]:
    return lambda make, shape: {
        "input": _eighths(make, *shape),
        "weight": make.signed(shape[-1]),
        "residual": _eighths(make, *shape) if residual else None,
        "eps": 0.5,
    }


def _rms_norm_grads(grad_sum: bool) -> Callable[[Make, tuple[int, ...]], Tensors]:
    return lambda make, shape: {
        "grad_output": make.normal(*shape),
        "grad_sum": make.normal(*shape) if grad_sum else None,
        "rows": make.normal(*shape),
        "rstd": make.positive(*shape[:-1], dtype=torch.float32),
        "weight": make.signed(shape[-1]),
    }


def _gates(activation: str, scale: float = 2.0) -> Callable[[Make, tuple[int, ...]], Tensors]:
    return lambda make, shape: {
        "gate": make.normal(*shape, scale=scale),
        "up": make.normal(*shape),
        "activation": activation,
    }


def _gate_grads(activation: str, scale: float = 2.0) -> Callable[[Make, tuple[int, ...]], Tensors]:
    return lambda make, shape: {
        "grad_output": make.normal(*shape),
        **_gates(activation, scale)(make, shape),
        "activation": ACTIVATIONS.index(activation),
    }


def _gelus(tanh: bool, bias: bool, scale: float = 2.0) -> Callable[[Make, tuple[int, ...]], Tensors]:
    return lambda make, shape: {
        "input": make.normal(*shape, scale=scale),
        "bias": make.normal(shape[-1]) if bias else None,
        "tanh": tanh,
    }


def _gelu_grads(tanh: bool, bias: bool, scale: float = 2.0) -> Callable[[Make, tuple[int, ...]], Tensors]:
    return lambda make, shape: {"grad_output": make.normal(*shape), **_gelus(tanh, bias, scale)(make, shape)}


def _softmaxes(p: float, mask: str) -> Callable[[Make, tuple[int, ...]], Tensors]:
    """Masks: ``none``, ``keys`` (one row for all), ``sequences`` (one row for each of the first dimension),
    ``rows`` (one number for each row), ``full`` with an empty row."""

    def arguments(make: Make, shape: tuple[int, ...]) -> Tensors:
        masks: dict[str, Tensor | None] = {"none": None, "keys": make.normal(shape[-1])}
        masks["rows"] = make.normal(*shape[:-1], 1)
        masks["sequences"] = make.normal(shape[0], *[1] * (len(shape) - 2), shape[-1])
        full = torch.where(make.integers(0, 4, *shape) == 0, -torch.inf, 0.0).to(make.dtype)
        if full.numel():
            full.view(-1, shape[-1])[-1] = -torch.inf
        masks["full"] = full
        return {
            "scores": make.normal(*shape, scale=3),
            "mask": masks[mask],
            "scale": 0.5,
            "p": p,
            "seed": _seed(make) if p else None,
        }

    return arguments


def _softmax_grads(p: float) -> Callable[[Make, tuple[int, ...]], Tensors]:
    return lambda make, shape: {
        "grad_output": make.normal(*shape),
        "probs": torch.softmax(make.normal(*shape, dtype=torch.float32), dim=-1).to(make.dtype),
        "scale": 0.5,
        "seed": _seed(make) if p else None,
        "p": p,
    }


# ---- descriptions ----------------------------------------------------------------------------------------------------
def _call(name: str) -> Callable[..., Any]:
    """A function for an op that has no public one, because autograd alone calls it."""
    return lambda **arguments: _library.call(name, *arguments.values())


def _norm_face(input: Tensor, *others: Any, **arguments: Any) -> tuple[Tensor, ...]:
    """The function without the sum where that is the input itself."""
    output, total = transformer.dropout_add_layer_norm(input, *others, **arguments)
    return (output,) if total is input else (output, total)


def _rms_norm_face(input: Tensor, *others: Any, **arguments: Any) -> tuple[Tensor, ...]:
    """The function without the sum where that is the input itself."""
    output, total = transformer.add_rms_norm(input, *others, **arguments)
    return (output,) if total is input else (output, total)


def _numbered(arguments: Mapping[str, Any]) -> list[Any]:
    return [*list(arguments.values())[:-1], ACTIVATIONS.index(arguments["activation"])]


def _in_order(*names: str) -> Callable[[Mapping[str, Any]], list[Any]]:
    return lambda arguments: [arguments[name] for name in names]


# Sums over a row or over rows lose digits where their terms cancel.
_ATOL = {torch.float32: 2e-5, torch.bfloat16: 2e-5, torch.float16: 2e-5}
_RTOL = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11 + 1e-5}
# A gradient meets several roundings on its way: of what the forward pass kept, and of what it is made from.
_GRADIENTS = {torch.float32: 2e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def _describe(
    name: str,
    formula: Callable[..., tuple[Tensor, ...]],
    variants: Sequence[Variant],
    differentiable: tuple[str, ...] = (),
    schema: Callable[[Mapping[str, Any]], Sequence[Any]] | None = None,
    function: Callable[..., Any] | None = None,
    broadcasts: tuple[str, ...] = ("mask", "seed"),
    more: Callable[[Make], Iterable[Sample]] = lambda make: (),
) -> OpInfo:
    """An op; without a function the derivative of one."""
    return OpInfo(
        name,
        "transformer",
        function or _call(name),
        formula,
        _samples(variants, more),
        lambda make: make.pick(*variants)[1](make, make.shape(make.pick(2, 2, 3, 4), rows=300)),
        differentiable=differentiable,
        rtol=_RTOL,
        atol=_ATOL,
        gradient_rtol=_GRADIENTS,
        gradient_atol=_GRADIENTS,
        broadcasts=broadcasts,
        schema_arguments=schema,
        large=_large(variants[0]),
    )


OPS = (
    _describe(
        "dropout_add",
        _dropout_add,
        (
            ("bias, residual, half dropped", _sums(0.5, True, True)),
            ("bias, a tenth dropped", _sums(0.1, True, False)),
            ("residual alone", _sums(0.0, False, True)),
        ),
        ("input", "residual", "bias"),
        _in_order("input", "bias", "residual", "seed", "p"),
        transformer.dropout_add,
    ),
    _describe(
        "dropout_add_backward",
        _dropout_add_backward,
        (
            ("bias, a tenth dropped", _sum_grads(0.1, True)),
            ("a tenth dropped", _sum_grads(0.1, False)),
            ("bias", _sum_grads(0.0, True)),
        ),
        broadcasts=("grad_output", "seed"),
    ),
    _describe(
        "dropout_add_layer_norm",
        _norm,
        (
            ("bias, residual, half dropped", _sums(0.5, True, True, norm=True)),
            ("half dropped", _sums(0.5, False, False, norm=True)),
            ("bias, residual", _sums(0.0, True, True, norm=True)),
            ("far from zero", _far_sums),
            ("norm alone", _sums(0.0, False, False, norm=True)),
        ),
        ("input", "weight", "norm_bias", "residual", "bias"),
        _in_order("input", "bias", "residual", "weight", "norm_bias", "seed", "p", "eps"),
        _norm_face,
        more=_one_number_a_row,
    ),
    _describe(
        "dropout_add_layer_norm_backward",
        _norm_backward,
        (
            ("bias, sum, a tenth dropped", _norm_grads(0.1, True, True, False)),
            ("inverted, bias, a tenth dropped", _norm_grads(0.1, True, False, True)),
            ("inverted, sum", _norm_grads(0.0, False, True, True)),
            ("norm alone", _norm_grads(0.0, False, False, False)),
        ),
    ),
    _describe(
        "add_rms_norm",
        _rms_norm,
        (("residual", _rms_norms(True)), ("norm alone", _rms_norms(False)), ("large", _large_rms_norms)),
        ("input", "weight", "residual"),
        _in_order("input", "residual", "weight", "eps"),
        _rms_norm_face,
    ),
    _describe(
        "add_rms_norm_backward",
        _rms_norm_backward,
        (("sum", _rms_norm_grads(True)), ("norm alone", _rms_norm_grads(False))),
    ),
    _describe(
        "activation_and_mul",
        _gate,
        (
            *((each, _gates(each)) for each in ACTIVATIONS),
            *((f"{each}, large", _gates(each, 1e3)) for each in ACTIVATIONS),
        ),
        ("gate", "up"),
        _numbered,
        function=transformer.activation_and_mul,
    ),
    _describe(
        "activation_and_mul_backward",
        _gate_backward,
        (
            *((each, _gate_grads(each)) for each in ACTIVATIONS),
            *((f"{each}, large", _gate_grads(each, 1e3)) for each in ACTIVATIONS),
        ),
    ),
    _describe(
        "fused_bias_gelu",
        _gelu,
        (
            ("tanh, bias", _gelus(True, True)),
            ("erf, bias", _gelus(False, True)),
            ("tanh", _gelus(True, False)),
            ("erf, large", _gelus(False, False, 1e4)),
            ("tanh, large", _gelus(True, True, 1e4)),
        ),
        ("input", "bias"),
        function=transformer.fused_bias_gelu,
    ),
    _describe(
        "fused_bias_gelu_backward",
        _gelu_backward,
        (
            ("tanh, bias", _gelu_grads(True, True)),
            ("erf, bias", _gelu_grads(False, True)),
            ("tanh", _gelu_grads(True, False)),
            ("erf, large", _gelu_grads(False, False, 1e4)),
            ("tanh, large", _gelu_grads(True, True, 1e4)),
        ),
    ),
    _describe(
        "masked_softmax_dropout",
        _softmax,
        (
            ("mask of keys, a tenth dropped", _softmaxes(0.1, "keys")),
            ("mask of rows", _softmaxes(0.0, "rows")),
            ("full mask, half dropped", _softmaxes(0.5, "full")),
            ("mask of sequences", _softmaxes(0.0, "sequences")),
            ("scores alone", _softmaxes(0.0, "none")),
        ),
        ("scores",),
        _in_order("scores", "mask", "scale", "seed", "p"),
        transformer.masked_softmax_dropout,
    ),
    _describe(
        "masked_softmax_dropout_backward",
        _softmax_backward,
        (("a tenth dropped", _softmax_grads(0.1)), ("nothing dropped", _softmax_grads(0.0))),
    ),
)
