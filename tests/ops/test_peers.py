"""Our functions against modules of transformers and torch, with shapes and tolerances of Liger Kernel's tests, which
hold its kernels to the same modules.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")
    from transformers import GemmaConfig, LlamaConfig, PreTrainedConfig, Qwen2Config
    from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
    from transformers.models.llama.modeling_llama import (
        LlamaMLP,
        LlamaRMSNorm,
        LlamaRotaryEmbedding,
        apply_rotary_pos_emb,
    )
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from ds_plugin_sdk.ops import activation, norm, rotary, softmax

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("compiled_once"), pytest.mark.timeout(900)]

# (dtype, absolute, relative)
Tolerance = tuple[torch.dtype, float, float]

NORM_SHAPES = [(2, 128, 512), (5, 123, 123)]
MLP_SHAPES = [(2, 256, 256, 512), (6, 42, 123, 431)]  # batch, tokens, hidden, intermediate
# Batch, tokens, heads of queries, heads of keys, size of a head.
ROPE_SHAPES = [(1, 128, 32, 32, 64), (2, 128, 32, 8, 64), (1, 423, 73, 155, 92)]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def _close(ours: Tensor, theirs: Tensor, tolerance: Tolerance) -> None:
    dtype, atol, rtol = tolerance
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs.detach(), atol=atol, rtol=rtol)


@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
@pytest.mark.parametrize("tolerance", [(torch.float32, 1e-4, 1e-6), (torch.bfloat16, 2e-1, 2e-2)], ids=str)
@pytest.mark.parametrize(("module", "offset"), [(LlamaRMSNorm, 0.0), (GemmaRMSNorm, 1.0)])
def test_rms_norm(
    module: Callable[[int], LlamaRMSNorm | GemmaRMSNorm], offset: float, tolerance: Tolerance, shape: tuple[int, ...]
) -> None:
    """Gemma adds 1 to its weight."""
    theirs = module(shape[-1]).to(tolerance[0])
    nn.init.normal_(theirs.weight)
    x = _random(*shape, dtype=tolerance[0])
    _close(norm.rms_norm(x, theirs.weight.detach() + offset, 1e-6), theirs(x), tolerance)


@pytest.mark.parametrize("shape", [(2, 8, 64), (4, 16, 128), (1, 1, 1500), (3, 512, 128)], ids=str)
@pytest.mark.parametrize("tolerance", [(torch.float32, 1e-5, 1e-5), (torch.bfloat16, 2e-2, 2e-2)], ids=str)
def test_layer_norm(tolerance: Tolerance, shape: tuple[int, ...]) -> None:
    theirs = nn.LayerNorm(shape[-1], eps=1e-6)
    nn.init.normal_(theirs.weight)
    nn.init.normal_(theirs.bias)
    theirs = theirs.to(tolerance[0])
    x = _random(*shape, dtype=tolerance[0])
    _close(norm.layer_norm(x, theirs.weight.detach(), theirs.bias.detach(), 1e-6), theirs(x), tolerance)


@pytest.mark.parametrize("shape", ROPE_SHAPES, ids=str)
@pytest.mark.parametrize(
    "tolerance", [(torch.float32, 1e-5, 1e-5), (torch.bfloat16, 1e-1, 1e-5), (torch.float16, 1e-2, 1e-5)], ids=str
)
def test_rotary(tolerance: Tolerance, shape: tuple[int, ...]) -> None:
    """By the angles that their module computes, in float32; theirs rounds them, and each product, to the dtype."""
    batch, tokens, query_heads, key_heads, head_dim = shape
    query, key = (
        _random(batch, tokens, heads, head_dim, dtype=tolerance[0]).transpose(1, 2)
        for heads in (query_heads, key_heads)
    )
    embedding = LlamaRotaryEmbedding(LlamaConfig(head_dim=head_dim, hidden_size=head_dim, num_attention_heads=1))
    cos, sin = embedding(query.float(), torch.arange(tokens).unsqueeze(0))
    theirs = apply_rotary_pos_emb(query, key, cos.to(tolerance[0]), sin.to(tolerance[0]))
    half = head_dim // 2
    for tensor, expected in zip((query, key), theirs, strict=True):
        _close(rotary.rotary(tensor, cos[..., :half], sin[..., :half]), expected, tolerance)


def test_angles() -> None:
    """Ours are of float64: theirs, of float32, differ by what that knows of 423 radians."""
    embedding = LlamaRotaryEmbedding(LlamaConfig(head_dim=92, hidden_size=92, num_attention_heads=1))
    positions = torch.arange(423).unsqueeze(0)
    for ours, theirs in zip(rotary.angles(positions, 92), embedding(torch.ones(1), positions), strict=True):
        torch.testing.assert_close(ours, theirs[..., :46], atol=423 * 2**-23, rtol=0)


@pytest.mark.parametrize("shape", MLP_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("module", "config", "name"),
    [
        (LlamaMLP, LlamaConfig, "silu"),
        (Qwen2MLP, Qwen2Config, "silu"),
        (GemmaMLP, GemmaConfig, "gelu_tanh"),
    ],
)
def test_gated_layers(
    module: Callable[[PreTrainedConfig], LlamaMLP | Qwen2MLP | GemmaMLP],
    config: Callable[..., PreTrainedConfig],
    name: activation.Activation,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> None:
    """Liger's absolute tolerance, 1 in float32, is for weights of size 1; ours are of size 1 / sqrt(columns), and so is
    the tolerance: 1 / (hidden * sqrt(intermediate)). That of bfloat16 is its rounding's.
    """
    batch, tokens, hidden, intermediate = shape
    # The heads do not matter; a configuration is rejected without rotary angles for them.
    sizes = config(hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=1, head_dim=2)
    theirs = module(sizes).to(dtype)
    for layer in (theirs.gate_proj, theirs.up_proj, theirs.down_proj):
        nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    x = _random(batch, tokens, hidden, dtype=dtype)
    with torch.no_grad():
        halves = torch.cat([theirs.up_proj(x), theirs.gate_proj(x)], dim=-1)
        ours = theirs.down_proj(activation.gated_activation(halves, None, name))
        expected = theirs(x)
    absolute = 1 / (hidden * math.sqrt(intermediate)) if dtype == torch.float32 else 2e-2
    _close(ours, expected, (dtype, absolute, 1e-5 if dtype == torch.float32 else 1e-2))


@pytest.mark.parametrize("shape", [(2, 8), (4, 16), (1, 1023), (3, 7, 256), (1, 4096), (1, 2, 4096)], ids=str)
@pytest.mark.parametrize("tolerance", [(torch.float32, 1e-5, 1e-5), (torch.bfloat16, 5e-2, 5e-2)], ids=str)
def test_softmax(tolerance: Tolerance, shape: tuple[int, ...]) -> None:
    x = _random(*shape, dtype=tolerance[0])
    scores = x.reshape(1, 1, -1, shape[-1])
    _close(softmax.softmax(scores).reshape(shape), torch.softmax(x, dim=-1), tolerance)
