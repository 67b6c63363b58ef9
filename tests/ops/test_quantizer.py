"""The quantizer ops: bits in memory, error bounds, errors. `conformance.op_info.quantizer` has their formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.ops import quantizer as q

FORMATS = [(8, True), (8, False), (4, True), (4, False)]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", autouse=True)
def quantizer_kernels(native: Callable[..., None]) -> None:
    """The native kernels, and nothing else."""
    native("quantizer")


def ops(implementation: str) -> object:
    return torch.ops.ds_plugin if implementation == "kernel" else torch.ops.ds_plugin_reference


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_levels_and_bytes_are_those_of_the_cuda_source(implementation: str) -> None:
    """By hand: the range is [-8, 8], so 4-bit levels are the values, 8 is out of reach, and ties go to even."""
    x = torch.tensor([[-8.0, 8.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.0]])
    levels, params = ops(implementation).quantize(x, 1, 4, True)
    # -8 and 7; 0 and 2; 2 and 0; -2 and 3: the first of each pair in the upper half.
    assert levels.tolist() == [[0x87 - 256, 0x02, 0x20, 0xE3 - 256]]
    assert params.tolist() == [[1.0]]
    assert ops(implementation).dequantize(levels, params, 4, True, torch.float32).tolist() == [
        [-8.0, 7.0, 0.0, 2.0, 2.0, 0.0, -2.0, 3.0]
    ]


def test_asymmetric_levels_lie_about_the_middle(implementation: str) -> None:
    x = torch.tensor([10.0, 26.0, 18.0, 18.5])
    levels, params = ops(implementation).quantize(x, 1, 8, False)
    assert levels.tolist() == [-128, 127, 0, 8]
    assert params.tolist() == [[1 / 16, 18.0]]


def test_groups_are_swizzled_as_deepspeed_draws_it(implementation: str) -> None:
    """Two nodes of four devices: 0 1 2 3 4 5 6 7 becomes 0 4 1 5 2 6 3 7."""
    x = torch.arange(8.0).repeat_interleave(2) + 1
    _, params = ops(implementation).swizzle_quantize(x, 8, 8, True, 1, 2, 4)
    assert (params.flatten() * 128 - 1).round().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
def test_the_round_trip_loses_half_a_step(dtype: torch.dtype, bits: int, symmetric: bool) -> None:
    """All but what lies beyond the last level, which loses a whole one."""
    x = normal(32, 126, dtype=dtype)
    levels, params = q.quantize(x, groups=32, bits=bits, symmetric=symmetric)
    back = q.dequantize(levels, params, bits=bits, symmetric=symmetric)
    step, offset = params[:, :1], 0 if symmetric else params[:, 1:]
    last = offset + (2 ** (bits - 1) - 1) * step
    error = (back - x.float()).abs() / step
    inside = x.float() <= last
    assert error[inside].max() <= 0.5 + 1e-4
    assert 0.5 < error[~inside].max() <= 1 + 1e-4


@pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_kernel_and_reference_give_the_same_bits(dtype: torch.dtype, bits: int, symmetric: bool) -> None:
    x = normal(6, 1030, dtype=dtype)
    kernel, reference = (ops(name).quantize(x, 6, bits, symmetric) for name in ("kernel", "reference"))
    assert all(torch.equal(a, b) for a, b in zip(kernel, reference, strict=True))


@pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
def test_a_sum_is_that_of_the_devices(bits: int, symmetric: bool) -> None:
    """Within half a step of the sum of what was sent, whatever the groups of the sum are."""
    parts = [normal(240, seed=device) for device in range(5)]
    sent = [q.quantize(part, groups=12, bits=bits, symmetric=symmetric) for part in parts]
    total = torch.stack([q.dequantize(*each, bits=bits, symmetric=symmetric) for each in sent]).sum(0)
    levels, params = (torch.cat(each) for each in zip(*sent, strict=True))
    for out_groups in (1, 3, 12, 24):
        got = q.quantized_reduce(levels, params, out_groups=out_groups, devices=5, bits=bits, symmetric=symmetric)
        back = q.dequantize(*got, bits=bits, symmetric=symmetric)
        assert got[1].shape == (out_groups, 1 if symmetric else 2)
        error = (back - total).abs().view(out_groups, -1) / got[1][:, :1]
        assert error.max() <= 1 + 1e-4 and error.median() <= 0.5


def test_large_and_tiny_values_keep_their_size() -> None:
    x = torch.tensor([[1e30, -1e30, 5e29, 0], [1e-30, -1e-30, 5e-31, 0], [0, 0, 0, 0]])
    levels, params = q.quantize(x, groups=3)
    torch.testing.assert_close(q.dequantize(levels, params), x, rtol=2 / 127, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
def test_what_is_not_finite_spoils_its_group_alone(
    value: float, bits: int, symmetric: bool, implementation: str
) -> None:
    x = normal(3, 34)
    x[1, 7] = value
    levels, params = ops(implementation).quantize(x, 3, bits, symmetric)
    back = ops(implementation).dequantize(levels, params, bits, symmetric, torch.float16)
    assert back.isnan().all(dim=1).tolist() == [False, True, False]
    assert back[[0, 2]].isfinite().all()


def test_stochastic_rounding_keeps_the_mean(implementation: str) -> None:
    """The mean of 4000 roundings, whose standard deviation is at most half a step, is within 4 of its own."""
    generator = torch.Generator().manual_seed(0)
    for symmetric in (True, False):
        value = torch.tensor([-1.0, 0.3, 0.02, 0.77, 0.9])
        total = torch.zeros(5, dtype=torch.float64)
        for _ in range(4000):
            x = value.clone()
            ops(implementation).fake_quantize_(x, torch.rand(5, generator=generator), 1, 4, symmetric)
            total += x.double()
        step = 2 / 16
        assert (total / 4000 - value)[:4].abs().max() < 4 * step / 2 / 4000**0.5


def test_a_leaf_that_is_not_contiguous_stays_one(implementation: str) -> None:
    """Autograd records nothing, also where the kernel works on a copy."""
    x = normal(6, 4).t().requires_grad_()
    rounded = x.detach().contiguous()
    for tensor in (x, rounded):
        ops(implementation).fake_quantize_(tensor, None, 4, 4, True)
    assert x.is_leaf and x.grad_fn is None
    assert torch.equal(x, rounded)


def test_dequantize_range_reads_unsigned_levels(implementation: str) -> None:
    data = torch.tensor([[0x0F, 0xA1]], dtype=torch.uint8)
    scale, minimum = torch.tensor([2.0]).half(), torch.tensor([-1.0]).half()
    of = ops(implementation).dequantize_range
    assert of(data, scale, minimum, 4, 4).tolist() == [[-1.0, 6.5, 4.0, -0.5]]
    assert of(data, scale, minimum, 2, 8).tolist() == [[6.5, 79.5]]


X = normal(4, 6)
LEVELS, PARAMS = torch.zeros(4, 6, dtype=torch.int8), torch.ones(4, 1)
BYTES = torch.zeros(4, 6, dtype=torch.uint8)
REJECTED: list[tuple[str, str, Callable[[], object]]] = [
    ("bits is 3", "8 or 4", lambda: q.quantize(X, groups=4, bits=3)),
    ("groups is 0", "positive", lambda: q.quantize(X, groups=0)),
    ("24 elements", "multiple of groups", lambda: q.quantize(X, groups=5)),
    ("groups of 3", "even", lambda: q.quantize(X, groups=8, bits=4)),
    ("no dimension", "at least one", lambda: q.quantize(torch.ones(()), groups=1)),
    ("x", "float32", lambda: q.quantize(LEVELS, groups=4)),
    ("groups is 4", "multiple of pipeline", lambda: q.swizzle_quantize(X, groups=4, nodes=3)),
    ("params has shape", "[groups, 2]", lambda: q.dequantize(LEVELS, PARAMS, symmetric=False)),
    ("params has shape", "[groups, 1]", lambda: q.dequantize(LEVELS, PARAMS[:0])),
    ("dtype", "float32, bfloat16 or float16", lambda: q.dequantize(LEVELS, PARAMS, dtype=torch.float64)),
    ("levels", "int8", lambda: q.dequantize(BYTES, PARAMS)),
    ("params has 4 groups", "devices", lambda: q.quantized_reduce(LEVELS, PARAMS, out_groups=1, devices=3)),
    ("the sum has", "out_groups", lambda: q.quantized_reduce(LEVELS, PARAMS, out_groups=5, devices=2)),
    ("levels has 24 values", "5", lambda: q.dequantize_range(BYTES, PARAMS, PARAMS, group_size=5)),
    ("minimum has 3", "4", lambda: q.dequantize_range(BYTES, PARAMS, PARAMS[:3], group_size=6)),
    ("bits is 17", "2 to 16", lambda: q.fake_quantize_(X, groups=4, bits=17)),
    ("noise has shape", "[4, 6]", lambda: q.fake_quantize_(X, groups=4, noise=X[:2])),
    ("share memory", "one element", lambda: q.fake_quantize_(torch.ones(1).expand(4), groups=1)),
]


@pytest.mark.parametrize(("what", "expected", "call"), REJECTED, ids=[f"{a}, {b}" for a, b, _ in REJECTED])
def test_what_does_not_fit_is_rejected(
    what: str, expected: str, call: Callable[[], object], implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernel and reference say the same: what is wrong, and what was expected."""
    if implementation == "reference":
        monkeypatch.setattr(torch.ops, "ds_plugin", torch.ops.ds_plugin_reference)
    before = X.clone()
    with pytest.raises(InvalidTensorError) as error:
        call()
    assert what in str(error.value) and expected in str(error.value)
    assert torch.equal(X, before)


def test_float64_takes_the_reference() -> None:
    x = normal(3, 10).double()
    levels = q.quantize(x, groups=3)[0]
    assert torch.equal(levels, torch.ops.ds_plugin_reference.quantize(x, 3, 8, True)[0])
    q.fake_quantize_(x, groups=3)
    assert x.dtype == torch.float64
