"""Linear layers against float64: by our own loops and by torch's product, weights in floating point, int8 and int4."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.ops import _products
from ds_plugin_sdk.ops import linear as family
from ds_plugin_sdk.ops._products import torchs_from
from ds_plugin_sdk.ops.linear import ACTIVATIONS, dequantize_weight, linear, pack_int4, quantize_weight

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A unit in the last place of a result, and what sums and 16-bit inputs may lose of the sum of all products' sizes.
EPS = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}
SUMS = 2**-17
SHORT_INPUTS = 2**-15
# One input, tiles of two and four, more than one block of them, and as many as go to torch, or to tiles of twelve.
INPUTS = (1, 2, 3, 7, 9, 29, 130)


@pytest.fixture(scope="module", autouse=True)
def kernels(native: Callable[..., None]) -> None:
    native("linear")


def activate(x: Tensor, activation: str) -> Tensor:
    if activation == "gelu":
        return 0.5 * x * (1 + torch.erf(x / 2**0.5))
    if activation == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    return {"identity": x, "relu": x.clamp(min=0), "silu": x / (1 + torch.exp(-x))}[activation]


def of_torch(dtype: torch.dtype, columns: int) -> int:
    """From how many inputs on the op may be torch's product, with contiguous weights in floating point."""
    if dtype != torch.bfloat16:
        return 24
    by_amx = (
        torchs_from(dtype) == _products._MANY_BY_AMX and columns % 32 == 0 and "DS_PLUGIN_CPU_LEVEL" not in os.environ
    )
    return _products._MANY_BY_AMX if by_amx else _products._MANY_OF_BFLOAT16


def check(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    gated: bool,
    group: int,
    bits: Literal[4, 8] = 8,
    zeros: bool = False,
) -> None:
    """Compare with the formula in float64; `group` columns share a scale, none if 0; with `zeros` also a zero point."""
    scales = offsets = None
    matrix = weight.double()
    sizes_of = matrix.abs()
    if group:
        weight, scales = quantize_weight(weight, group, bits)
        matrix = dequantize_weight(weight, scales.double(), torch.float64)
        sizes_of = matrix.abs()
    if zeros and scales is not None:
        offsets = scales * (8 - torch.randint(0, 17, scales.shape, generator=torch.Generator().manual_seed(0)))
        wide = offsets.double().repeat_interleave(group, dim=1)
        # Sums have the sizes of both parts, which may take each other away.
        matrix, sizes_of = matrix + wide, sizes_of + wide.abs()
    actual = linear(
        input, weight, bias, scales=scales, offsets=offsets, activation=activation, gated=gated, residual=residual
    ).double()
    x = input.double()
    hidden, sizes = x @ matrix.T, x.abs() @ sizes_of.T
    if group and (input.dtype != torch.float32 or group % 16 == 0):  # other groups of float32 stay floats
        tops = x.abs().unflatten(-1, (-1, group)).amax(-1, keepdim=True).expand(*x.shape[:-1], -1, group).flatten(-2)
        sizes = sizes + SHORT_INPUTS / SUMS * tops @ matrix.abs().T
    if bias is not None:
        hidden = hidden + bias.double()
    eps = EPS[input.dtype]
    # What a sum may be off by before its activation; torch's product rounds it, and dequantized weights, too.
    many = 24 if input.dtype != torch.bfloat16 else 16 if group else of_torch(input.dtype, input.shape[-1])
    off = SUMS * sizes + (eps * (2 * sizes + hidden.abs()) if x.shape[0] >= many else 0)
    if gated:
        (first, second), (off_first, off_second) = hidden.chunk(2, -1), off.chunk(2, -1)
        expected = first * activate(second, activation)
        off = 1.2 * first.abs() * off_second + (second.abs() + off_second) * off_first + off_first * off_second
    else:
        expected, off = activate(hidden, activation), 1.2 * off
    if residual is not None:
        expected = expected + residual.double()
    allowed = off + eps * expected.abs() + 1e-6 + (eps * expected.abs() if residual is not None else 0)
    worst = ((actual - expected).abs() / allowed).max() if expected.numel() else torch.tensor(0.0)
    assert float(worst) <= 1, f"{float(worst):.2f} times the tolerance"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inputs", INPUTS)
def test_equals_the_formula(inputs: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(inputs)
    cases = product((16, 33, 100, 256), (2, 18, 130), ACTIVATIONS, (False, True))
    for number, (columns, rows, activation, gated) in enumerate(cases):
        out = rows // 2 if gated else rows
        input = torch.randn(inputs, columns, generator=generator).to(dtype)
        weight = torch.randn(rows, columns, generator=generator) / columns**0.5
        bias = torch.randn(rows, generator=generator).to(dtype) if number % 2 else None
        residual = torch.randn(inputs, out, generator=generator).to(dtype) if number % 3 else None
        check(input, weight.to(dtype), bias, residual, activation, gated, 0)
        group = {16: 16, 33: 11, 100: 20, 256: 64}[columns]
        check(input, weight, bias, residual, activation, gated, group)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inputs", INPUTS)
def test_int4_weights(inputs: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(inputs)
    cases = product(((64, 64), (256, 64), (256, 256), (1024, 128)), (2, 18, 131), ("identity", "silu"), (False, True))
    for number, ((columns, group), outputs, activation, gated) in enumerate(cases):
        rows = 2 * outputs if gated else outputs
        input = torch.randn(inputs, columns, generator=generator).to(dtype)
        weight = torch.randn(rows, columns, generator=generator) / columns**0.5
        bias = torch.randn(rows, generator=generator).to(dtype) if number % 2 else None
        residual = torch.randn(inputs, outputs, generator=generator).to(dtype) if number % 3 else None
        check(input, weight, bias, residual, activation, gated, group, 4)
        check(input, weight, bias, residual, activation, gated, group, 4, zeros=True)


@pytest.mark.parametrize("inputs", [4, 5, 15, 16, 33, 128, 129, 200, 512, 513])
@pytest.mark.parametrize(("bits", "group"), [(8, 0), (8, 32), (8, 96), (8, 544), (4, 64), (4, 576)])
def test_many_inputs_in_bfloat16(bits: Literal[4, 8], group: int, inputs: int) -> None:
    """Blocks of inputs, outputs and columns, whole and in part, as AMX has them; columns for a few of its parts."""
    generator = torch.Generator().manual_seed(inputs)
    columns = 1088 if group == 544 else 1152
    input = torch.randn(inputs, columns, generator=generator).bfloat16()
    for outputs, gated in ((50, False), (32, True), (81, True), (570, False)):
        rows = 2 * outputs if gated else outputs
        weight = torch.randn(rows, columns, generator=generator) / columns**0.5
        if group == 0:
            weight = weight.bfloat16()
        bias = torch.randn(rows, generator=generator).bfloat16()
        residual = torch.randn(inputs, outputs, generator=generator).bfloat16()
        check(input, weight, bias, residual, "silu" if gated else "identity", gated, group, bits)
        check(input, weight, None, None, "identity", gated, group, bits, zeros=bits == 4)


@pytest.mark.parametrize("inputs", [5, 16, 40, 129])
def test_weights_in_larger_ones(inputs: int) -> None:
    """Rows further apart than they are long, and aligned to their elements alone."""
    input = torch.randn(inputs, 96).bfloat16()
    for first in (0, 1, 33):
        check(input, torch.randn(70, 200).bfloat16()[3:, first : first + 96], None, None, "identity", False, 0)


@pytest.mark.parametrize(("bits", "group"), [(8, 32), (4, 64)])
def test_thousands_of_inputs(bits: Literal[4, 8], group: int) -> None:
    """More than are prepared at a time: the last one begins anew."""
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(2049, 64, generator=generator).bfloat16()
    weight = torch.randn(80, 64, generator=generator) / 8
    residual = torch.randn(2049, 40, generator=generator).bfloat16()
    check(input, weight, None, residual, "silu", True, group, bits)


def test_int4_weights_at_their_limits() -> None:
    """All at -8 or 7, and inputs at the largest of 16 bits, in a group of 4096: sums of 32 bits must not overflow."""
    input = torch.full((2, 4096), 32767.0, dtype=torch.float32).bfloat16()
    for level in (-8, 7):
        pairs = torch.full((3, 2048), 17 * (level + 8), dtype=torch.uint8)
        result = linear(input, pairs, scales=torch.ones(3, 1))
        assert torch.equal(result, torch.full((2, 3), float(input[0, 0]) * level * 4096).bfloat16())


@pytest.mark.parametrize("inputs", [1, 3])
def test_what_inputs_lose_counts_by_the_weight_not_by_its_parts(inputs: int) -> None:
    """All weights are zero, as ``8 scales - 8 scales``: small inputs beside a large one lose digits in both parts."""
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(inputs, 128, generator=generator).half()
    input[:, 5] = 1000
    levels = torch.full((3, 128), 15)
    pairs, scales, offsets = pack_int4(levels, torch.ones(3, 1), torch.full((3, 1), 15))
    assert offsets is not None
    result = linear(input, pairs, scales=scales, offsets=offsets).double()
    # Roundings of float32 in sums of 7 |x|; what 16 bits lose of the small inputs would be a hundred times that.
    assert bool((result.abs() <= 2**-20 * 7 * input.double().abs().sum(1, keepdim=True)).all()), result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inputs", [1, 5, 130])
def test_prompts_on_int4_weights_with_zero_points_of_several_blocks(inputs: int, dtype: torch.dtype) -> None:
    """As of int8 weights below: offsets of each block of rows, and not of the first."""
    generator = torch.Generator().manual_seed(inputs)
    input = torch.randn(inputs, 2048, generator=generator).to(dtype)
    weight = torch.randn(600, 2048, generator=generator) / 2048**0.5 * torch.logspace(0, -2, 600).unsqueeze(1)
    bias, residual = (torch.randn(n, generator=generator).to(dtype) for n in (600, inputs * 300))
    check(input, weight, bias, None, "identity", False, 128, 4, zeros=True)
    check(input, weight, bias, residual.view(inputs, 300), "silu", True, 256, 4, zeros=True)


@pytest.mark.parametrize(
    ("dtype", "tokens"), [(torch.bfloat16, 65), (torch.float16, 65), (torch.float32, 150)], ids=str
)
def test_a_prompt_on_weights_in_floating_point_of_several_blocks(dtype: torch.dtype, tokens: int) -> None:
    """Without instructions for their products, nor AVX2, 2 MiB of 16-bit weights are widened at a time: two blocks."""
    inputs = 2 * tokens
    input, weight = torch.randn(2, tokens, 1024).to(dtype), (torch.randn(600, 1024) / 32).to(dtype)
    bias, residual = torch.randn(600).to(dtype), torch.randn(2, tokens, 300).to(dtype)
    check(input.view(inputs, 1024), weight, bias, None, "identity", False, 0)
    check(input.view(inputs, 1024), weight, bias, residual.view(inputs, 300), "silu", True, 0)
    folded = linear(input, weight, bias)
    assert torch.equal(folded.view(inputs, 600), linear(input.view(inputs, 1024), weight, bias))
    # Where CPUs have the instructions, torch's product of operands that lie otherwise rounds otherwise.
    check(input.view(inputs, 1024).t().contiguous().t(), weight.t().contiguous().t(), bias, None, "identity", False, 0)
    apart = linear(input.transpose(0, 1).contiguous().transpose(0, 1), weight, bias)
    torch.testing.assert_close(apart, folded, rtol=2 * EPS[dtype], atol=4 * EPS[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "rows", "group"), [(2048, 600, 128), (4200, 150, 100)])
def test_prompts_on_int8_weights_of_several_blocks(columns: int, rows: int, group: int, dtype: torch.dtype) -> None:
    """Kernels dequantize 2 MiB of weights at a time, and no less than 64 rows: here two or three blocks and a rest."""
    generator = torch.Generator().manual_seed(columns)
    input = torch.randn(130, columns, generator=generator).to(dtype)
    # Of sizes that tell the rows of one block from those of the next.
    weight = torch.randn(rows, columns, generator=generator) / columns**0.5 * torch.logspace(0, -2, rows).unsqueeze(1)
    bias = torch.randn(rows, generator=generator).to(dtype)
    residual = torch.randn(130, rows // 2, generator=generator).to(dtype)
    check(input, weight, None, None, "identity", False, group)
    check(input, weight, bias, residual, "silu", True, group)
    quantized, scales = quantize_weight(weight, group)
    folded = linear(input.view(2, 65, columns), quantized, bias, scales=scales)
    assert torch.equal(folded.view(130, rows), linear(input, quantized, bias, scales=scales))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(dtype: torch.dtype) -> None:
    input = torch.randn(40, 2, dtype=dtype).t()
    weight = torch.randn(40, 6, dtype=dtype).t()
    bias, residual = torch.randn(12, dtype=dtype)[::2], torch.randn(6, 2, dtype=dtype).t()
    check(input, weight, bias, residual, "silu", False, 0)
    rows_apart = torch.randn(6, 50, dtype=dtype)[:, :40]
    check(input, rows_apart, None, None, "identity", False, 0)
    quantized, scales = quantize_weight(weight.float(), 8)
    plain = linear(input, quantized, scales=scales)
    apart = linear(input, quantized.t().contiguous().t(), scales=scales.t().contiguous().t())
    assert torch.equal(plain, apart)
    assert linear(input.reshape(1, 2, 1, 40), weight).shape == (1, 2, 1, 6)


def test_an_activation_that_is_none_of_them() -> None:
    with pytest.raises(InvalidTensorError, match=r"activation is 'swish' .*expected one of identity, relu"):
        family.activate(torch.ones(2), "swish")  # type: ignore[arg-type]  # what is under test


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)], ids=str)
def test_no_inputs(shape: tuple[int, ...]) -> None:
    assert linear(torch.randn(shape), torch.randn(3, 8)).shape == (*shape[:-1], 3)


def test_no_columns_and_no_rows() -> None:
    assert torch.equal(linear(torch.randn(2, 0), torch.randn(3, 0), torch.ones(3)), torch.ones(2, 3))
    assert linear(torch.randn(2, 8), torch.randn(0, 8)).shape == (2, 0)


@pytest.mark.parametrize("inputs", [1, 5, 130, 1030])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_what_is_not_finite_spreads(broken: float, inputs: int, bits: Literal[4, 8] | None) -> None:
    """Over the outputs of its input, and no others."""
    input = torch.ones(inputs, 64, dtype=torch.bfloat16)
    input[0, 5] = broken
    weight = torch.ones(3, 64)
    matrix, scales = quantize_weight(weight, 64, bits) if bits else (weight.bfloat16(), None)
    result = linear(input, matrix, scales=scales)
    assert not result[0].isfinite().any()
    assert result[1:].isfinite().all()


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_what_is_not_finite_leaves_other_inputs_as_they_are(bits: Literal[4, 8] | None) -> None:
    """Whichever thread makes them ready, and whenever."""
    weight = torch.randn(64, 1024)
    matrix, scales = quantize_weight(weight, 128, bits) if bits else (weight.bfloat16(), None)
    input = torch.randn(512, 1024).bfloat16()
    broken = input.clone()
    broken[0, 5] = torch.inf
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        expected = linear(input, matrix, scales=scales)
        for _ in range(50):
            linear(torch.randn_like(input), matrix, scales=scales)  # memory that is used again has other numbers
            assert torch.equal(linear(broken, matrix, scales=scales)[1:], expected[1:])
    finally:
        torch.set_num_threads(threads)


def test_sixteen_bits_of_large_and_tiny_inputs() -> None:
    """Groups of very different sizes, and of nothing but zeros, keep their own scales."""
    input = torch.randn(1, 256).bfloat16()
    input[:, :64] *= 1e30
    input[:, 64:128] *= 1e-30
    input[:, 128:192] = 0
    weight = torch.randn(5, 256)
    weight[:, :64] = 0
    check(input, weight, None, None, "identity", False, 64)


def same_by_threads(compute: Callable[[], Tensor]) -> None:
    """To the bit, with one thread, two and three."""
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(compute())
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


@pytest.mark.parametrize("inputs", [3, 29, 130, 1030])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_the_same_for_any_number_of_threads(bits: Literal[4, 8] | None, inputs: int) -> None:
    """And of inputs beside them, as soon as there are many: they are shared in blocks."""
    input, weight = torch.randn(inputs, 512).bfloat16(), torch.randn(777, 512)
    matrix, scales = quantize_weight(weight, 128, bits) if bits else (weight.bfloat16(), None)
    same_by_threads(lambda: linear(input, matrix, scales=scales))
    check(input, matrix if bits is None else weight, None, None, "identity", False, 128 if bits else 0, bits or 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs", [1, 2, 9, 12])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_the_same_wherever_a_share_ends(bits: Literal[4, 8] | None, inputs: int, dtype: torch.dtype) -> None:
    """Offsets, gates and residuals, of rows that fill no vector: rounded as they are beside others."""
    input, weight = torch.randn(inputs, 320).to(dtype), torch.randn(1002, 320)
    matrix, scales = quantize_weight(weight, 64, bits) if bits else (weight.to(dtype), None)
    offsets = scales * torch.randint(-8, 9, scales.shape) if scales is not None and bits == 4 else None
    residual = torch.randn(inputs, 501).to(dtype)
    layer = partial(linear, input, matrix, scales=scales, offsets=offsets)
    same_by_threads(layer)
    for activation in ("identity", "silu", "gelu"):
        same_by_threads(partial(layer, gated=True, residual=residual, activation=activation))


@pytest.mark.parametrize("columns", [64, 72])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_inputs_are_multiplied_by_torch(dtype: torch.dtype, columns: int) -> None:
    """From as many on as `torchs_from` says, by which models call torch themselves; with AMX some layouts sooner."""
    many = torchs_from(dtype)
    # On Zen 5 torch multiplies by columns that are apart.
    apart = _products._MANY if (dtype, many) == (torch.float32, math.inf) else many
    if many == _products._MANY_BY_AMX:
        many, apart = of_torch(dtype, columns), _products._MANY_OF_BFLOAT16
    weight = torch.randn(64, columns).to(dtype)
    for inputs in (7, 8, 23, 24, 127, 128, 129, 255, 256, 1030):
        input = torch.randn(inputs, columns).to(dtype)
        for matrix, least in ((weight, many), (weight.t().contiguous().t(), apart)):
            with torch.profiler.profile() as profiler:
                linear(input, matrix)
            products = [event.name for event in profiler.events() if event.name in ("aten::linear", "aten::copy_")]
            assert (products[:1] == ["aten::linear"]) == (inputs >= least), (inputs, matrix.stride(), products)


def products_of_torch(layer: Callable[[], Tensor]) -> int:
    with torch.profiler.profile() as profiler:
        layer()
    return sum(event.name == "aten::linear" for event in profiler.events())


@pytest.mark.parametrize("bits", [8, 4])
def test_many_inputs_of_quantized_weights_are_our_own(bits: Literal[4, 8]) -> None:
    """With AMX, and with tiles of 16-bit integers."""
    flags = _products._x86().flags
    tiles = "avx512_vnni" in flags or ("avx2" in flags and "avx512f" not in flags)
    if "DS_PLUGIN_CPU_LEVEL" in os.environ:
        pytest.skip("DS_PLUGIN_CPU_LEVEL asks for other loops than this CPU's")
    if not (tiles or "amx_bf16" in flags):
        pytest.skip("this CPU has neither AMX nor AVX512-VNNI nor AVX2: all go to torch from 128 inputs on")
    weight, scales = quantize_weight(torch.randn(64, 128), 64, bits)
    for inputs in (15, 16, 24, 512, 513, 1100):
        input = torch.randn(inputs, 128).bfloat16()
        assert products_of_torch(partial(linear, input, weight, scales=scales)) == 0, inputs


def test_a_few_outputs_of_many_inputs() -> None:
    """Inputs are shared among threads then."""
    input, weight = torch.randn(1030, 256).bfloat16(), torch.randn(4, 256)
    check(input, weight.bfloat16(), None, torch.randn(1030, 2).bfloat16(), "silu", True, 0)
    check(input, weight, None, torch.randn(1030, 2).bfloat16(), "silu", True, 64)


def test_quantize_weight() -> None:
    weight = torch.randn(5, 96)
    weight[2, 32:64] = 0
    quantized, scales = quantize_weight(weight, 32)
    assert quantized.dtype == torch.int8
    assert scales.shape == (5, 3)
    assert int(quantized.abs().max()) == 127
    error = (dequantize_weight(quantized, scales) - weight).abs().unflatten(1, (3, 32)).amax(2)
    assert bool((error <= scales * 0.5001).all())
    with pytest.raises(InvalidTensorError, match="divisor"):
        quantize_weight(weight, 7)


def test_quantize_weight_to_int4() -> None:
    weight = torch.randn(5, 256)
    weight[2, 64:128] = 0
    weight[3, :64] = torch.linspace(-1, 1, 64)
    pairs, scales = quantize_weight(weight, 64, 4)
    assert pairs.dtype == torch.uint8
    assert pairs.shape == (5, 128)
    of_each = torch.where(scales == 0, 1, scales).repeat_interleave(64, 1)
    levels = weight / of_each
    error = dequantize_weight(pairs, scales) / of_each - levels
    cut = (levels < -7.5) | (levels > 7.5)
    assert float(error[~cut].abs().max()) <= 0.5001
    assert float(error.abs().max()) <= 1.0001
    largest = weight.unflatten(1, (4, 64)).abs().amax(2)
    torch.testing.assert_close(dequantize_weight(pairs, scales).unflatten(1, (4, 64)).abs().amax(2), largest)
    # Column c of a block of 64 is in word c % 16, from bit 4 * (c // 16) up.
    ones = torch.zeros(1, 64)
    ones[0, 0], ones[0, 37] = -8, 5
    words = quantize_weight(ones, 64, 4)[0].view(1, 16, 2).to(torch.int32)
    assert (words[0, :, 0] + 256 * words[0, :, 1]).tolist() == [0x8880, 0x8888, 0x8888, 0x8888, 0x8888, 0x8D88] + [
        0x8888
    ] * 10
    for group in (32, 96):
        with pytest.raises(InvalidTensorError, match="multiple of 64"):
            quantize_weight(weight, group, 4)


@pytest.mark.parametrize("levels", [(-8, 7), (-7, 7), (-7, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int4_finds_scales_again(dtype: torch.dtype, levels: tuple[int, int]) -> None:
    """Weights that were quantized before, symmetrically, stay what they were, but for the rounding of their dtype."""
    steps = torch.randint(levels[0], levels[1] + 1, (9, 4, 64))
    steps[..., 5] = levels[0] if levels[0] == -8 else levels[1]
    weight = (steps * torch.rand(9, 4, 1)).flatten(1).to(dtype)
    ours = dequantize_weight(*quantize_weight(weight, 64, 4))
    torch.testing.assert_close(ours, weight.float(), rtol=1.5 * torch.finfo(dtype).eps, atol=0)


def test_int4_scales_are_those_of_the_smaller_error() -> None:
    weight = torch.randn(64, 512)
    weight[:8] *= 1e30  # whose squares float32 cannot hold
    weight[8:16] *= 1e-30
    weight[16:32] = torch.randint(-7, 8, (16, 512)) * 0.1
    groups = weight.double().unflatten(1, (4, 128))

    def error(scales: torch.Tensor) -> torch.Tensor:
        scales = scales.double().unsqueeze(2)
        return ((groups / scales).round().clamp(-8, 7) * scales - groups).square().sum(2)

    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True)).squeeze(2)
    at_8, at_7 = error(largest / -8), error(largest / 7)
    found = error(quantize_weight(weight, 128, 4)[1])
    atol = 1e-12 * groups.square().sum(2)  # scales are float32
    assert bool((found <= torch.minimum(at_8, at_7) * 1.0001 + atol).all())
    assert bool((at_7 < at_8).any()) and bool((at_8 < at_7).any())


def test_quantize_weight_by_parts() -> None:
    """Rows are quantized some at a time; which does not matter."""
    weight = torch.randn(3000, 128)
    for bits in (8, 4):
        whole = quantize_weight(weight, 64, bits)
        alone = [quantize_weight(row, 64, bits) for row in weight.split(1)]
        assert all(torch.equal(a, torch.cat(b)) for a, b in zip(whole, zip(*alone, strict=True), strict=True))


def test_bits_and_levels_that_there_are_not_are_errors() -> None:
    for bits in (2, 5, "4"):
        with pytest.raises(InvalidTensorError, match=f"bits is {bits!r}.*4 or 8"):
            quantize_weight(torch.ones(1, 64), 64, bits)  # type: ignore[arg-type]  # that is what is tested
    for level in (-1, 17):
        with pytest.raises(InvalidTensorError, match=f"levels are {level} to {level}.*0 to 15"):
            pack_int4(torch.full((1, 64), level), torch.ones(1, 1))


def test_pack_int4() -> None:
    """Any levels, scales and zero points of others: what comes out again is what they stand for."""
    levels, zeros = torch.randint(0, 16, (5, 256)), torch.randint(0, 17, (5, 2))
    scales = torch.rand(5, 2).half()
    pairs, wide, offsets = pack_int4(levels, scales, zeros)
    assert offsets is not None
    assert (pairs.dtype, wide.dtype, offsets.dtype) == (torch.uint8, torch.float32, torch.float32)
    expected = scales.double().unsqueeze(2) * (levels.unflatten(1, (2, 128)) - zeros.unsqueeze(2))
    actual = dequantize_weight(pairs, wide.double(), torch.float64, offsets=offsets.double())
    assert torch.equal(actual, expected.flatten(1))  # scales of 16 bits times 16 are exact in float32
    for symmetric in (None, torch.full((5, 2), 8)):
        assert pack_int4(levels, scales, symmetric)[2] is None
    for wrong in ((levels[:, :96], scales[:, :1]), (levels, scales[:4]), (levels, scales, zeros[:, :1])):
        with pytest.raises(InvalidTensorError, match="expected"):
            pack_int4(*wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        {"offsets": torch.zeros(4, 1)},
        {"offsets": torch.zeros(4, 2, dtype=torch.float64)},
        {"offsets": torch.zeros(4, 2), "weight": torch.zeros(4, 128, dtype=torch.int8)},
        {"offsets": torch.zeros(4, 2), "weight": torch.zeros(4, 128), "scales": None},
    ],
)
def test_wrong_offsets_raise(change: dict[str, Any], dtype: torch.dtype) -> None:
    arguments = {"weight": torch.zeros(4, 64, dtype=torch.uint8), "scales": torch.zeros(4, 2), **change}
    if arguments["weight"].is_floating_point():
        arguments["weight"] = arguments["weight"].to(dtype)
    with pytest.raises(InvalidTensorError, match="offsets"):
        linear(torch.zeros(2, 128, dtype=dtype), **arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(4, 7)}, "weight"),
        ({"weight": torch.zeros(4, 8, dtype=torch.int8)}, "scales"),
        ({"scales": torch.zeros(4, 1)}, "scales|weight"),
        ({"weight": torch.zeros(4, 8, dtype=torch.int8), "scales": torch.zeros(4, 3)}, "divisor"),
        ({"weight": torch.zeros(4, 8, dtype=torch.uint8), "scales": torch.zeros(4, 1)}, "int4 pairs"),
        (
            {
                "input": torch.zeros(2, 96),
                "weight": torch.zeros(4, 48, dtype=torch.uint8),
                "scales": torch.zeros(4, 1),
            },
            "multiple of 64",
        ),
        ({"bias": torch.zeros(3)}, "bias"),
        ({"residual": torch.zeros(2, 5)}, "residual"),
        ({"residual": torch.zeros(2, 4, dtype=torch.bfloat16)}, "residual"),
        ({"activation": "tanh"}, "activation"),
        ({"gated": True, "weight": torch.zeros(5, 8)}, "two halves"),
    ],
)
def test_wrong_arguments_raise(change: dict[str, object], message: str, dtype: torch.dtype) -> None:
    arguments = {"input": torch.zeros(2, 8, dtype=dtype), "weight": torch.zeros(4, 8, dtype=dtype), **change}
    for name, value in arguments.items():  # all in the dtype that is tried, but for what is wrong on purpose
        if name != "scales" and isinstance(value, Tensor) and value.dtype == torch.float32:
            arguments[name] = value.to(dtype)
    with pytest.raises(InvalidTensorError, match=message):
        linear(**arguments)  # type: ignore[arg-type]  # wrong on purpose


def test_torch_checks_the_op() -> None:
    quantized, scales = quantize_weight(torch.randn(4, 8), 8)
    torch.library.opcheck(
        torch.ops.ds_plugin.linear.default, (torch.randn(2, 8), quantized, torch.randn(4), scales, None, None, 4, True)
    )
    pairs, scales, offsets = pack_int4(torch.randint(0, 16, (4, 64)), torch.rand(4, 1), torch.zeros(4, 1))
    torch.library.opcheck(
        torch.ops.ds_plugin.linear.default, (torch.randn(2, 64), pairs, None, scales, offsets, None, 4, True)
    )


def test_agrees_with_torch() -> None:
    input, weight, bias = torch.randn(3, 64), torch.randn(10, 64), torch.randn(10)
    torch.testing.assert_close(linear(input, weight, bias), functional.linear(input, weight, bias))


@pytest.mark.parametrize("strided", ["bias", "input"])
def test_many_inputs_are_rounded_once_whatever_the_strides(strided: str) -> None:
    """Sums that nearly cancel the bias: rounded before it, too, they would lose most of their digits."""
    torch.manual_seed(0)
    given = {"input": torch.randn(4, 50, 16).bfloat16(), "bias": torch.randn(64).bfloat16()}
    weight, scales = quantize_weight(torch.randn(64, 16), 16)
    contiguous = linear(given["input"], weight, given["bias"], scales=scales)
    apart = torch.stack([given[strided]] * 3, dim=-1)[..., 1]
    assert not apart.is_contiguous()
    given[strided] = apart
    torch.testing.assert_close(linear(given["input"], weight, given["bias"], scales=scales), contiguous, rtol=0, atol=0)
