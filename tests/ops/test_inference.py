"""The inference ops, kernels and reference implementations: formulas in float64, threads, views, tracing, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_plugin_sdk.conformance import op_info
from ds_plugin_sdk.conformance.op_info import Make, OpInfo
from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.ops import activation, norm, residual, rotary, softmax

FAMILIES = ("norm", "softmax", "activation", "rotary", "residual")
OPS = [info for info in op_info.infos() if info.family in FAMILIES]
NATIVE = [info for info in OPS if info.name not in ("einsum_sec_sm_ecm", "pad_transform")]

pytestmark = [pytest.mark.compiler, pytest.mark.timeout(900)]  # five libraries are compiled first


@pytest.fixture(scope="module", autouse=True)
def inference_kernels(native: Callable[..., None]) -> None:
    """The native kernels, and nothing else."""
    native(*FAMILIES)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [t for t in value or () if isinstance(t, torch.Tensor)]


def exact(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def call(info: OpInfo, arguments: dict[str, Any], implementation: str) -> list[torch.Tensor]:
    """What the op wrote, then what it returned."""
    if implementation == "kernel":
        returned = info.function(**arguments)
    else:
        values = info.schema_arguments(arguments) if info.schema_arguments else list(arguments.values())
        returned = getattr(torch.ops.ds_plugin_reference, info.name)(*values)
    written = [arguments[name] for name in info.written]
    return written or tensors_of(returned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("info", OPS, ids=lambda info: info.name)
def test_formula(info: OpInfo, dtype: torch.dtype, implementation: str) -> None:
    for sample in info.samples(Make.seeded(dtype)):
        wanted = info.formula(**{name: exact(value) for name, value in sample.arguments.items()})
        arguments = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in sample.arguments.items()}
        before = [sample.arguments[name] for name in info.written]
        found = call(info, arguments, implementation)
        expected = [t for each in wanted for t in tensors_of(each)]
        for i, (actual, formula) in enumerate(zip(found, expected, strict=True)):
            assert actual.dtype == dtype and actual.shape == formula.shape, sample.label
            replaced = before[i] if i < len(before) else None
            worst = op_info.close_to(actual, formula, before=replaced, rtol=info.rtol[dtype], atol=info.atol[dtype])
            assert worst is None, f"{sample.label}: {worst}"


@pytest.mark.parametrize("info", NATIVE, ids=lambda info: info.name)
def test_there_is_a_kernel(info: OpInfo) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"ds_plugin::{info.name}", "CPU")


def test_threads_change_nothing() -> None:
    x, w, scores = normal(300, 500), normal(500), normal(2, 8, 64, 200)
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: norm.layer_norm(x, w, w),
        lambda: norm.rms_norm(x, w),
        lambda: softmax.softmax(scores, causal=True),
        lambda: activation.bias_activation(x, w, "gelu"),
        lambda: residual.residual_add_bias_(x.clone(), x, x, w, w, scale=0.5),
    ]
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            results.append([each() for each in calls])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, many) for one, many in zip(*results, strict=True))


def test_rotary_turns_a_slice_of_a_fused_projection_in_place() -> None:
    qkv = normal(2, 5, 3, 4, 16)
    cos, sin = rotary.angles(torch.arange(5), 16)
    expected = qkv.clone()
    expected[:, :, 0] = rotary.rotary(qkv[:, :, 0].transpose(1, 2), cos, sin).transpose(1, 2)
    rotary.rotary_(qkv[:, :, 0].transpose(1, 2), cos, sin)
    assert torch.equal(qkv, expected)


@pytest.mark.parametrize("has_float64", [True, False])
def test_angles_are_exact_far_along_a_sequence(monkeypatch: pytest.MonkeyPatch, has_float64: bool) -> None:
    """In float32 the angle itself would be off by 0.005 there."""
    monkeypatch.setattr(rotary, "_has_float64", lambda device_type: has_float64)
    cos, sin = rotary.angles(torch.tensor([100_003]), 64)
    angle = 100_003 * 10000.0 ** (-torch.arange(0, 64, 2).double() / 64)
    assert float((cos[0, 0].double() - angle.cos()).abs().max()) < 1e-7
    assert float((sin[0, 0].double() - angle.sin()).abs().max()) < 1e-7


def test_masks_of_yes_and_no_and_of_two_dimensions() -> None:
    scores, keep = normal(2, 3, 4, 6), normal(2, 6, seed=1) > 0
    keep[0, 0] = True
    wanted = torch.softmax(scores.double().masked_fill(~keep[:, None, None], -torch.inf), dim=-1).nan_to_num(0.0)
    torch.testing.assert_close(softmax.softmax(scores, keep).double(), wanted, rtol=1e-5, atol=1e-6)


def test_mask_and_alibi_of_two_dtypes() -> None:
    scores, mask = normal(1, 2, 3, 5, dtype=torch.bfloat16), normal(1, 1, 1, 5, dtype=torch.bfloat16)
    alibi = normal(1, 2, 1, 5)
    result = softmax.softmax(scores, mask, alibi)
    torch.testing.assert_close(result, softmax.softmax(scores, mask.float(), alibi))


def test_ops_compile() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        normed, total = norm.pre_rms_norm(x, x, w)
        hidden = activation.gated_activation(torch.cat([normed, normed], dim=-1))
        return residual.residual_add_bias_(total, hidden, scale=0.5)

    x, w = normal(3, 40), normal(40)
    normed, total = norm.pre_rms_norm(x, x, w)
    hidden = activation.gated_activation(torch.cat([normed, normed], dim=-1))
    with torch.no_grad():
        assert torch.equal(layer(x, w), residual.residual_add_bias_(total, hidden, scale=0.5))


@pytest.mark.parametrize(
    ("rejected", "message"),
    [
        (lambda: norm.layer_norm(normal(2, 8), normal(7), normal(8)), "weight has shape"),
        (lambda: norm.pre_rms_norm(normal(2, 8), normal(8, 2), normal(8)), "residual has shape"),
        (lambda: norm.rms_norm(normal(2, 8).int(), normal(8)), "input"),
        (lambda: softmax.softmax(normal(2, 8)), "scores has shape"),
        (lambda: softmax.softmax(normal(1, 2, 3, 4), normal(1, 1, 2, 4)), "mask has shape"),
        (lambda: softmax.softmax(normal(1, 2, 3, 4), window=-1), "window is -1"),
        (lambda: activation.gated_activation(normal(2, 7)), "7 columns"),
        (lambda: activation.bias_activation(normal(2, 8), None, "tanh"), "activation is 'tanh'"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: rotary.rotary(normal(1, 2, 3, 4), normal(1, 3, 3), normal(1, 3, 3)), "cos has shape"),
        (lambda: residual.moe_res_matmul_(normal(2, 8), normal(2, 8), normal(8)), "coefficients has shape"),
        (lambda: residual.pad_transform(normal(1, 2, 12), normal(1, 2, 12), normal(1, 2, 12), 5, True), "5 heads"),
        (lambda: residual.einsum_sec_sm_ecm(normal(2, 3), normal(2, 3)), "dispatch has shape"),
    ],
)
def test_errors_name_what_is_wrong(rejected: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidTensorError) as raised:
        rejected()
    assert message in str(raised.value)
