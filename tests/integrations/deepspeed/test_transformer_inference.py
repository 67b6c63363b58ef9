"""What DeepSpeed's injected layers rely on between calls: caches, places, and what is written where.

Each function against its formula, through DeepSpeed's own classes, is a check of conformance: see
`conformance.front_ends`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ds_plugin_sdk.errors import OpError
from ds_plugin_sdk.integrations.deepspeed import injection
from ds_plugin_sdk.integrations.deepspeed.modules import transformer_inference as module
from ds_plugin_sdk.integrations.deepspeed.modules.transformer_inference.workspace import workspace as shared
from ds_plugin_sdk.op_builder import CombinedOpBuilder, OpBuilder, ReferenceOpBuilder, find

pytestmark = [pytest.mark.compiler, pytest.mark.timeout(900)]

BATCH, HEADS, DIM, ROOM = 2, 4, 8, 32
NONE = torch.empty(1)  # DeepSpeed's way to say that there is none


@pytest.fixture(scope="module", autouse=True)
def kernels(kernel_cache: Path) -> None:
    """The native kernels of all families, and nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_PLUGIN_CACHE_DIR", str(kernel_cache))
        patch.setenv("DS_PLUGIN_FALLBACK", "0")
        assert find("InferenceBuilder", None, "cpu")().load() is module


@pytest.fixture(autouse=True)
def workspace() -> Iterator[None]:
    """Caches of ROOM tokens, and none left behind."""
    module.allocate_workspace_fp32(HEADS * DIM, HEADS, 4, BATCH, 2, 1, False, 0, ROOM, 1)
    yield
    module.release_workspace()


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attend(qkv: torch.Tensor, layer: int = 0, kv_heads: int = -1, **options: object) -> list[torch.Tensor]:
    arguments = {
        "mask": NONE,
        "rotary_dim": -1,
        "rotate_half": False,
        "rotate_every_two": True,
        "heads": HEADS,
        "num_kv": kv_heads,
        "norm_factor": DIM**-0.25,
        "triangular": True,
        "local_attention": False,
        "window_size": 3,
        "no_masking": True,
        "layer_id": layer,
        "num_layers": 2,
        "alibi": NONE,
        "rope_theta": 10000.0,
        "is_prompt": qkv.shape[1] > 1,
        "token_idx": None,
        "position_ids": None,
        **options,
    }
    return module.softmax_context_fp32(qkv, *arguments.values())


def expected(
    qkv: torch.Tensor, kv_heads: int = HEADS, bias: torch.Tensor | float = 0.0, window: int = 0
) -> torch.Tensor:
    """Attention of whole sequences, in float64."""
    batch, tokens, _ = qkv.shape
    parts = qkv.double().view(batch, tokens, HEADS + 2 * kv_heads, DIM).transpose(1, 2)
    q, k, v = parts[:, :HEADS], parts[:, HEADS : HEADS + kv_heads], parts[:, HEADS + kv_heads :]
    k, v = (each.repeat_interleave(HEADS // kv_heads, dim=1) for each in (k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(DIM) + bias
    distance = torch.arange(tokens).unsqueeze(1) - torch.arange(tokens)
    forbidden = (distance < 0) | (distance >= (window or tokens))
    weights = torch.softmax(scores.masked_fill(forbidden, -torch.inf), dim=-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def step_by_step(qkv: torch.Tensor, prompt: int, **options: object) -> torch.Tensor:
    """A prompt, and the other tokens one by one."""
    contexts = [attend(qkv[:, :prompt], **options)[0]]
    contexts += [attend(qkv[:, i : i + 1], **options)[0] for i in range(prompt, qkv.shape[1])]
    return torch.cat(contexts, dim=1)


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [-1, 4, 2, 1])
@pytest.mark.parametrize("prompt", [1, 2, 7])
def test_tokens_one_by_one_see_what_the_prompt_saw(kv_heads: int, prompt: int) -> None:
    heads = kv_heads if kv_heads > 0 else HEADS
    qkv = numbers(BATCH, 9, (HEADS + 2 * heads) * DIM)
    close(step_by_step(qkv, prompt, kv_heads=kv_heads), expected(qkv, heads))


def test_a_window_holds_while_decoding() -> None:
    qkv = numbers(BATCH, 9, 3 * HEADS * DIM)
    close(step_by_step(qkv, 4, local_attention=True), expected(qkv, window=3))


@pytest.mark.parametrize("rotate_half", [False, True])
def test_rotary_positions_go_on_where_the_cache_ends(rotate_half: bool) -> None:
    qkv = numbers(BATCH, 9, 3 * HEADS * DIM)
    options = {"rotary_dim": 6, "rotate_half": rotate_half}
    whole = attend(qkv, **options)[0]
    close(step_by_step(qkv, 4, **options), whole)
    assert not torch.allclose(whole, attend(qkv)[0])


def test_rotary_positions_can_be_given() -> None:
    """Each row's own; attention knows distances only, so that all may stand further along."""
    qkv = numbers(BATCH, 9, 3 * HEADS * DIM)
    whole = attend(qkv, rotary_dim=6)[0]
    positions = torch.arange(9) + torch.tensor([[0], [300]])
    close(attend(qkv, rotary_dim=6, position_ids=positions)[0], whole)
    assert not torch.allclose(attend(qkv, rotary_dim=6, position_ids=2 * positions)[0], whole, atol=1e-3)


def test_alibi_and_mask_are_added_together() -> None:
    qkv = numbers(BATCH, 5, 3 * HEADS * DIM)
    alibi, mask = numbers(BATCH * HEADS, 1, 5, seed=1), torch.zeros(BATCH, 1, 1, 8)
    mask[1, ..., 0] = -1e4
    bias = alibi.double().view(BATCH, HEADS, 1, 5) + mask[..., :5].double()
    close(attend(qkv, alibi=alibi, mask=mask, no_masking=False)[0], expected(qkv, bias=bias))


def test_keys_and_values_come_back_as_far_as_they_are_filled() -> None:
    qkv = numbers(BATCH, 5, 3 * HEADS * DIM)
    attend(qkv[:, :4])
    _, keys, values = attend(qkv[:, 4:])
    split = qkv.view(BATCH, 5, 3, HEADS, DIM)
    assert torch.equal(keys, split[:, :, 1].transpose(1, 2)) and torch.equal(values, split[:, :, 2].transpose(1, 2))


def test_layers_and_models_take_turns() -> None:
    first, second = numbers(BATCH, 6, 3 * HEADS * DIM), numbers(1, 6, 3 * HEADS * DIM, seed=1)
    attend(first[:, :5], layer=0)
    attend(second[:, :5], layer=1)
    close(attend(first[:, 5:], layer=0)[0], expected(first)[:, 5:])
    close(attend(second[:, 5:], layer=1)[0], expected(second)[:, 5:])


def test_a_single_token_begins_a_sequence_after_a_reset_or_with_a_short_mask() -> None:
    qkv = numbers(BATCH, 6, 3 * HEADS * DIM)
    attend(qkv)
    module.reset_cache()
    close(attend(qkv[:, :1])[0], expected(qkv[:, :1]))
    attend(qkv)
    short = torch.zeros(BATCH, 1, 1, 1)
    close(attend(qkv[:, :1], mask=short, no_masking=False)[0], expected(qkv[:, :1]))


def test_several_tokens_follow_those_that_were_handed_over() -> None:
    """As many as the caller took of them."""
    qkv = numbers(BATCH, 8, 3 * HEADS * DIM)
    _, _, values = attend(qkv[:, :6])
    shared.go_on(0, values[:, :, :4])
    close(attend(qkv[:, 4:])[0], expected(qkv)[:, 4:])
    mask = torch.zeros(BATCH, 1, 1, 12)  # for more positions than there are
    close(attend(qkv, mask=mask, no_masking=False)[0], expected(qkv))


def test_a_sequence_that_was_overwritten_does_not_go_on() -> None:
    qkv = numbers(BATCH, 6, 3 * HEADS * DIM)
    _, _, first = attend(qkv)
    _, _, second = attend(qkv)
    shared.go_on(0, second)
    with pytest.raises(OpError, match=r"not in the cache any more .*another has begun since"):
        shared.go_on(0, first)


def test_a_step_that_failed_in_a_later_layer_comes_again() -> None:
    """With room in its mask for as many tokens as this layer holds by now."""
    qkv = numbers(BATCH, 6, 3 * HEADS * DIM)
    attend(qkv[:, :5])
    for length in (6, 6):
        mask = torch.zeros(BATCH, 1, 1, length)
        close(attend(qkv[:, 5:], mask=mask, no_masking=False)[0], expected(qkv)[:, 5:])


def test_a_prompt_in_inference_mode_is_followed_by_one_without() -> None:
    qkv = numbers(BATCH, 6, 3 * HEADS * DIM)
    with torch.inference_mode():
        attend(qkv[:, :5])
        module.repeat_kv_cache(BATCH, 1)
    caches = [cache for layer in shared.layers.values() for cache in (layer.keys, layer.values)]
    assert not any(cache.is_inference() for cache in caches)
    with torch.no_grad():
        close(attend(qkv)[0], expected(qkv))


def test_a_larger_batch_gets_a_larger_cache() -> None:
    attend(numbers(1, 4, 3 * HEADS * DIM))
    qkv = numbers(5, 4, 3 * HEADS * DIM)
    close(attend(qkv)[0], expected(qkv))


def test_a_sequence_that_is_too_long_is_rejected() -> None:
    attend(numbers(1, ROOM, 3 * HEADS * DIM))
    with pytest.raises(OpError, match=r"longer than the cache[\s\S]*max_out_tokens"):
        attend(numbers(1, 1, 3 * HEADS * DIM))


def test_a_workspace_that_cannot_be_had_is_rejected() -> None:
    with pytest.raises(RuntimeError, match="no room for the keys and values of 1000000000 tokens"):
        module.allocate_workspace_bf16(4096, 32, 4, 64, 100, 1, False, 0, 10**9, 10**9)


def test_a_released_workspace_is_taken_again() -> None:
    qkv = numbers(BATCH, 4, 3 * HEADS * DIM)
    attend(qkv)
    module.release_workspace()
    assert module.retake_workspace() is True
    close(attend(qkv)[0], expected(qkv))


def test_one_prompt_for_several_continuations() -> None:
    qkv = numbers(2, 5, 3 * HEADS * DIM)
    attend(qkv[:, :4])
    views = module.repeat_kv_cache_fp32(2, 3)
    assert [view.shape for view in views] == [(6, HEADS, 4, DIM)] * 2
    repeated = qkv.repeat_interleave(3, dim=0)
    close(attend(repeated[:, 4:])[0], expected(repeated)[:, 4:])
    module.release_workspace()
    with pytest.raises(RuntimeError, match="run the prompt"):
        module.repeat_kv_cache_fp32(2, 3)


def test_alibi_of_all_ranks_is_cut_to_this_ranks_heads() -> None:
    scores, alibi = numbers(2, 2, 3, 5), numbers(2 * 4, 1, 5, seed=1)
    result = module.softmax_fp32(scores.clone(), NONE, alibi, False, False, False, 1, False, 0.5, 2, 2)
    own = alibi.view(2, 4, 1, 5)[:, 2:]
    close(result, torch.softmax(scores.double() * 0.5 + own.double(), dim=-1))


def test_softmax_writes_into_contiguous_scores_only() -> None:
    options = (NONE, NONE, False, False, False, 1, False, 1.0, 0, 1)
    scores = numbers(2, 2, 3, 5)
    assert module.softmax_fp32(scores, *options) is scores
    strided = numbers(2, 2, 5, 3).transpose(2, 3)
    before = strided.clone()
    close(module.softmax_fp32(strided, *options), torch.softmax(before, dim=-1))
    assert torch.equal(strided, before)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("groups", [12, 24, 3])
def test_int8_weights(transpose: bool, groups: int) -> None:
    """Scales of equal parts of the weight's memory: rows, parts of rows, several rows."""
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (12, 16) if transpose else (16, 12), dtype=torch.int8)
    if not transpose and groups != 3:
        groups = {12: 16, 24: 32}[groups]
    elif not transpose:
        groups = 4
    scale = torch.rand(groups, 3) + 0.5  # the first `groups` of these numbers are what counts
    flat = weight.double().reshape(groups, -1) * scale.flatten()[:groups].double().unsqueeze(1)
    matrix = flat.half().double().reshape(weight.shape)
    x = numbers(2, 3, 16).half()
    result = module.vector_matmul_int8(x, weight, False, scale, True, transpose)
    wanted = x.double() @ (matrix.t() if transpose else matrix)
    torch.testing.assert_close(result.double(), wanted, rtol=2e-2, atol=2.0)


def test_coefficients_of_each_token_serve_their_token() -> None:
    residual, output = numbers(2, 3, 8), numbers(2, 3, 8, seed=1)
    coefficients = torch.softmax(numbers(2, 3, 2, seed=2), dim=-1)
    wanted = residual * coefficients[..., :1] + output * coefficients[..., 1:]
    assert module.moe_res_matmul(residual, coefficients, output) is output
    close(output, wanted)


@pytest.mark.parametrize(("first", "theta"), [(3, 10000.0), (253, 10000.0), (254, 5e5)])
def test_rotary_alone(first: int, theta: float) -> None:
    """Also where the table of angles ends, and with one of another base."""
    query, key = numbers(2, 5, HEADS * DIM), numbers(2, 5, HEADS * DIM, seed=1)
    for half in (False, True):
        with torch.inference_mode():
            turned, _ = module.apply_rotary_pos_emb(query, key, DIM, first, HEADS, half, theta)
        pair = (slice(0, DIM // 2), slice(DIM // 2, DIM)) if half else (slice(0, DIM, 2), slice(1, DIM, 2))
        x, y = query.view(2, 5, HEADS, DIM).double(), turned.view(2, 5, HEADS, DIM).double()
        positions = torch.arange(first, first + 5).double().unsqueeze(1)
        angle = positions * theta ** (-torch.arange(0, DIM, 2).double() / DIM)
        c, s = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
        close(y[..., pair[0]], x[..., pair[0]] * c - x[..., pair[1]] * s)
        close(y[..., pair[1]], x[..., pair[1]] * c + x[..., pair[0]] * s)


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(OpError, match=r"its number is 9; known here: 3 \(gelu\), 4 \(silu\)"):
        module.gated_activation(numbers(1, 2, 8), numbers(8), 9)


@pytest.mark.parametrize("device", ["cpu", "zap"])
def test_the_builder_is_made_of_families(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = find("InferenceBuilder", None, device)
    assert issubclass(builder, CombinedOpBuilder) and builder.NAME == "transformer_inference"
    loaded: list[tuple[str, bool]] = []

    def load(self: OpBuilder, verbose: bool = True) -> None:
        loaded.append((self.name, isinstance(self, ReferenceOpBuilder)))

    monkeypatch.setattr(OpBuilder, "load", load)
    assert builder()._load_library() is module
    assert loaded == [(family, device != "cpu") for family in builder().families()]
    assert {"norm", "softmax", "attention", "linear"} <= {family for family, _ in loaded}


class Engine:
    """As DeepSpeed's InferenceEngine, around a layer that does not fit."""

    def __init__(self, model_type: str, inject: bool, error: Exception) -> None:
        self.module = SimpleNamespace(config=SimpleNamespace(model_type=model_type))
        self._config = SimpleNamespace(replace_with_kernel_inject=inject)
        self.error = error

    def forward(self) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("model", "version", "inject", "error", "explained"),
    [
        ("gpt2", "5.1.0", True, AttributeError("no dtype"), True),
        ("llama", "4.43.4", True, AttributeError("no dtype"), True),
        ("gpt2", "4.43.4", True, AttributeError("no dtype"), False),
        ("gpt2", "5.1.0", False, AttributeError("no dtype"), False),
        ("gpt2", "5.1.0", True, IndexError("a token beyond the vocabulary"), False),
        ("llama", "4.43.4", True, ValueError("too many values to unpack (expected 2)"), True),
        ("llama", "4.43.4", True, OpError("the sequence is longer than the cache"), False),
        ("llama", "4.43.4", True, MemoryError(), False),
    ],
)
def test_only_misfits_are_explained(
    model: str, version: str, inject: bool, error: Exception, explained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(injection, "_transformers", lambda: version)
    engine_class = type("InferenceEngine", (Engine,), {"forward": Engine.forward})
    injection.explain(SimpleNamespace(InferenceEngine=engine_class))  # type: ignore[arg-type]  # has what is read of DeepSpeed's module
    with pytest.raises(OpError if explained else type(error)) as raised:
        engine_class(model, inject, error).forward()
    if explained:
        assert f"'{model}'" in str(raised.value) and "integrations.transformers" in str(raised.value)
        assert raised.value.__cause__ is error
