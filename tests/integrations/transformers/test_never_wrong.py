"""What our ops may not do stays the model's own code: the same logits as the plain model, whatever was done to it."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from counted_calls import CountedCalls

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")
    import transformers
    from transformers import cache_utils

from ds_plugin_sdk.integrations.transformers import accelerate, attention_forward, register_attention
from ds_plugin_sdk.integrations.transformers.replacements import DecoderReplacement

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
_LLAMA = {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "initializer_range": 0.2}
CONFIGS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=96, initializer_range=0.2, bos_token_id=1, eos_token_id=2
    ),
    "llama": lambda: transformers.LlamaConfig(**_LLAMA),
    "qwen2": lambda: transformers.Qwen2Config(**_LLAMA),
    "opt": lambda: transformers.OPTConfig(**_SIZES, ffn_dim=64, init_std=0.2, word_embed_proj_dim=32),
    "gemma2": lambda: transformers.Gemma2Config(
        **_LLAMA, head_dim=8, attn_logit_softcapping=2.0, query_pre_attn_scalar=8, sliding_window=4
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_LLAMA, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=4
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**_LLAMA, "num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=4,
        first_k_dense_replace=2,
    ),
}

pytestmark = pytest.mark.compiler


@pytest.fixture(scope="module", autouse=True)
def kernels(native: Callable[..., None]) -> None:
    """The native kernels, and nothing else."""
    native("linear", "attention", "norm", "rotary", "decoder_layer")


def make(name: str) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    for parameter in model.parameters():  # sinks and biases are zero at first
        if not parameter.any():
            nn.init.normal_(parameter)
    model.generation_config.eos_token_id = None
    return model


def tokens(rows: int = 2, count: int = 9) -> torch.Tensor:
    return torch.randint(3, 96, (rows, count), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: Any, **options: Any) -> torch.Tensor:
    result: torch.Tensor = model(tokens(), **options).logits
    return result


def assert_as_plain(model: Any, ours: torch.Tensor | None = None) -> None:
    """That an accelerated model has the logits of one with the same parameters and modules that is not."""
    ours = logits(model) if ours is None else ours
    torch.testing.assert_close(ours, logits(copy.deepcopy(model)), rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------------- attention
@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
def test_a_static_cache_without_padding(name: str) -> None:
    """transformers gives no mask then, and keys beyond the queries, which are not to be attended to."""
    model = make(name)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(tokens(), **options)
    with accelerate(model), CountedCalls() as counted:
        ours = model.generate(tokens(), **options)
    assert counted.calls["cached_attention"] > 0
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-3)
    assert torch.equal(ours.sequences, expected.sequences)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "deepseek_v3"])
def test_softcap_sinks_and_value_heads_of_another_size(name: str) -> None:
    model = make(name)
    expected = logits(model)
    with accelerate(model):
        torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "deepseek_v3"])
def test_so_too_if_our_attention_was_asked_for_by_name(name: str) -> None:
    model = make(name)
    expected = logits(model)
    mask = torch.ones_like(tokens())
    mask[1, :4] = 0
    padded = logits(model, attention_mask=mask)[:, -1]
    register_attention()
    model.set_attn_implementation("ds_plugin")
    torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(logits(model, attention_mask=mask)[:, -1], padded, rtol=1e-3, atol=1e-3)


def test_an_argument_that_nobody_knows_goes_to_torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_plugin_sdk.integrations.transformers import attention

    seen: dict[str, Any] = {}

    def sdpa(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        seen.update(kwargs)
        return args[3], None

    monkeypatch.setattr(attention, "sdpa_attention_forward", sdpa)
    heads = torch.zeros((1, 2, 3, 4))
    with torch.no_grad():
        attention_forward(nn.Identity(), heads, heads, heads, None, sliding_window=7)
        assert not seen
        attention_forward(nn.Identity(), heads, heads, heads, None, block_index=7)
    assert seen["block_index"] == 7


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_query_that_may_attend_to_nothing_is_finite_in_a_files_own_attention(dtype: torch.dtype) -> None:
    """As padding on the left has it; such functions compute their softmax in float32."""
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    from ds_plugin_sdk.integrations.transformers import attention

    class Ungrouped(nn.Module):
        num_key_value_groups = 1

    module = Ungrouped().eval()
    query, key, value = (torch.randn(2, 1, 3, 8, dtype=dtype) for _ in range(3))
    mask = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
    mask[1, :, 0] = False
    attended, _ = attention._eager(eager_attention_forward, module, query, key, value, mask, scaling=0.3, dropout=0.0)
    assert attended.isfinite().all()


def test_a_layer_with_an_argument_that_nobody_knows_runs_its_own_code() -> None:
    model = make("llama")
    layer = model.model.layers[0]
    hidden = torch.randn((1, 3, 32))
    angles = model.model.rotary_emb(hidden, torch.arange(3)[None])
    with accelerate(model), torch.no_grad(), CountedCalls() as counted:
        layer(hidden, position_embeddings=angles)
        assert counted.calls["linear"] == 4
        layer(hidden, position_embeddings=angles, block_index=torch.zeros(1))
        layer(hidden, position_embeddings=angles, is_causal=False)
    assert counted.calls["linear"] == 4


@pytest.mark.parametrize("inference", [False, True])
def test_angles_that_are_changed_in_place_count(inference: bool) -> None:
    """They are converted once for all layers; torch counts the changes of tensors that know gradients alone."""
    model = make("llama")
    layer = model.model.layers[0]
    with torch.inference_mode(inference), torch.no_grad(), accelerate(model), CountedCalls() as counted:
        hidden = torch.randn((1, 3, 32))
        angles = tuple(part.clone() for part in model.model.rotary_emb(hidden, torch.arange(3)[None]))
        first = layer(hidden, position_embeddings=angles)
        for part, other in zip(angles, model.model.rotary_emb(hidden, 5 * torch.arange(3)[None]), strict=True):
            part.copy_(other)
        second = layer(hidden, position_embeddings=angles)
        assert counted.calls["linear"] == 8
        torch.testing.assert_close(second, type(layer).forward(layer, hidden, position_embeddings=angles))
    assert not torch.allclose(first, second, atol=1e-2)


def test_angles_of_other_tokens_or_heads_go_to_the_layers_own_code() -> None:
    model = make("llama")
    layer = model.model.layers[0]
    hidden = torch.randn((1, 3, 32))
    angles = model.model.rotary_emb(hidden, torch.arange(3)[None])
    with torch.no_grad(), accelerate(model):
        layer(hidden, position_embeddings=angles)
        with pytest.raises(RuntimeError, match="size"):
            layer(hidden[:, :2], position_embeddings=angles)


def test_an_attention_that_was_chosen_stays() -> None:
    model = make("llama")
    model.set_attn_implementation("eager")
    handle = accelerate(model)
    assert model.config._attn_implementation == "eager"
    assert handle.layers == handle.attention == []
    assert "'eager'" in str(handle)
    handle.remove()
    model.set_attn_implementation("sdpa")
    with accelerate(model) as handle:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            assert all(part is not None for part in model(tokens(), output_attentions=True).attentions)
        assert handle.layers == []


def test_outputs_of_parts_can_be_collected_and_after_that_layers_run_whole_again() -> None:
    model = make("llama")
    expected = make("llama")(tokens(), output_hidden_states=True, output_attentions=True)
    with accelerate(model) as handle, torch.no_grad():
        ours = model(tokens(), output_hidden_states=True, output_attentions=True)
        assert len(ours.attentions) == len(expected.attentions)
        for one, other in zip(ours.hidden_states, expected.hidden_states, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
        assert len(handle.layers) == 2
        with CountedCalls() as counted:
            model(tokens())
        assert counted.calls["linear"] == 9


# ---------------------------------------------------------------------- projections
class Lora(nn.Module):
    """What adapters look like: a projection, and something added to its result."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        self.delta = nn.Linear(base.in_features, base.out_features, bias=False)

    @property
    def in_features(self) -> Any:
        return self.base_layer.in_features

    @property
    def out_features(self) -> Any:
        return self.base_layer.out_features

    @property
    def weight(self) -> Any:
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        return self.base_layer.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base_layer(input) + self.delta(input)
        return result


class Doubling(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Tagged(torch.Tensor):
    """A weight of another class than torch's, as quantized and distributed ones are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is nn.functional.linear else result


def add_lora(attention: Any) -> None:
    attention.q_proj = Lora(attention.q_proj)


def add_subclass(attention: Any) -> None:
    doubling = Doubling(32, attention.v_proj.out_features, bias=False)
    doubling.load_state_dict(attention.v_proj.state_dict())
    attention.v_proj = doubling


def add_hook(attention: Any) -> None:
    attention.q_proj.register_forward_hook(lambda module, args, output: 2 * output)


def add_pre_hook(attention: Any) -> None:
    attention.o_proj.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def add_hook_to_attention(attention: Any) -> None:
    attention.register_forward_hook(lambda module, args, output: (2 * output[0], *output[1:]))


def add_forward(attention: Any) -> None:
    own = attention.o_proj.forward
    attention.o_proj.forward = lambda input: 2 * own(input)


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def add_parametrization(attention: Any) -> None:
    nn.utils.parametrize.register_parametrization(attention.k_proj, "weight", Halved())


def add_weight_of_another_class(attention: Any) -> None:
    attention.v_proj.weight = nn.Parameter(attention.v_proj.weight.detach().clone().as_subclass(Tagged))


CHANGES = [
    add_lora,
    add_subclass,
    add_hook,
    add_pre_hook,
    add_hook_to_attention,
    add_forward,
    add_parametrization,
    add_weight_of_another_class,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_done_to_a_projection_counts(change: Callable[[Any], None], when: str) -> None:
    model, plain = make("llama"), make("llama")
    unchanged = logits(plain)
    torch.manual_seed(1)
    change(plain.model.layers[1].self_attn)
    expected = logits(plain)
    assert not torch.allclose(expected, unchanged, atol=0.05), "a change that changes nothing tests nothing"
    torch.manual_seed(1)
    if when == "before":
        change(model.model.layers[1].self_attn)
    with accelerate(model) as handle:
        if when == "after":
            change(model.model.layers[1].self_attn)
        torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3)
        assert handle.layers == ["model.layers.0"]
        assert "model.layers.1" in handle.left


# peft asks transformers for what its next release calls by another name.
# ---------------------------------------------------------------------- one token after the other
def assign_weight(attention: Any) -> None:
    attention.o_proj.weight = nn.Parameter(2 * attention.o_proj.weight.detach())


def change_weight_in_place(attention: Any) -> None:
    with torch.no_grad():
        attention.o_proj.weight.mul_(2)


def give_weight_other_memory(attention: Any) -> None:
    attention.o_proj.weight.data = 2 * attention.o_proj.weight.data


def choose_another_attention(attention: Any) -> None:
    attention.config = copy.copy(attention.config)
    attention.config._attn_implementation = "eager"
    attention.scaling = attention.scaling / 4
    attention.q_proj.register_forward_hook(lambda module, args, output: 4 * output)
    attention.o_proj.register_forward_hook(lambda module, args, output: 2 * output)


LATE_CHANGES = [*CHANGES, assign_weight, change_weight_in_place, give_weight_other_memory, choose_another_attention]


def steps(model: Any, change: Callable[[Any], None] | None, layer: int = 1) -> torch.Tensor:
    """The logits of a prompt's third token, before which a layer was changed."""
    cache = transformers.DynamicCache()
    logits(model, past_key_values=cache)
    with torch.no_grad():
        for _ in range(2):
            model(tokens(count=1), past_key_values=cache)
        if change is not None:
            torch.manual_seed(1)
            change(model.model.layers[layer].self_attn)
        result: torch.Tensor = model(tokens(count=1), past_key_values=cache).logits
    return result


@pytest.mark.parametrize("change", LATE_CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_what_is_done_between_two_tokens_counts(change: Callable[[Any], None], layer: int, weights: Any) -> None:
    expected, unchanged = steps(make("llama"), change, layer), steps(make("llama"), None)
    change_of_logits = float((expected - unchanged).abs().max())
    assert change_of_logits > 0.05, "a change that changes nothing tests nothing"
    tolerance = 1e-3 if weights is None else min(0.1 * float(unchanged.abs().max()), 0.6 * change_of_logits)
    model = make("llama")
    with accelerate(model, weights):
        torch.testing.assert_close(steps(model, change, layer), expected, rtol=1e-3, atol=tolerance)


def test_what_a_layers_hook_does_to_the_next_layer_counts() -> None:
    """As offloading does, which brings a layer's weights when the one before it runs."""

    def add_hook_that_changes_the_next(attention: Any) -> None:
        model.model.layers[0].register_forward_hook(lambda *_: assign_weight(model.model.layers[1].self_attn))

    model = make("llama")
    expected, unchanged = steps(model, add_hook_that_changes_the_next), steps(make("llama"), None)
    assert not torch.allclose(expected, unchanged, atol=0.05)
    model = make("llama")
    with accelerate(model):
        torch.testing.assert_close(steps(model, add_hook_that_changes_the_next), expected, rtol=1e-3, atol=1e-3)


def test_what_somebody_elses_loop_does_between_layers_counts() -> None:
    model = make("llama")
    angles = model.model.rotary_emb(torch.zeros(1), torch.zeros(1, 1, dtype=torch.long))

    @torch.no_grad()
    def loop(weight: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(1, 1, 32)
        for layer in model.model.layers:
            hidden = layer(hidden, position_embeddings=angles)
            model.model.layers[1].self_attn.o_proj.weight.data = weight
        return hidden

    weight = model.model.layers[1].self_attn.o_proj.weight.detach().clone()
    unchanged, expected = loop(weight), loop(2 * weight)
    assert not torch.allclose(expected, unchanged, atol=0.05)
    with accelerate(model):
        for factor, plain in ((1, unchanged), (2, expected), (1, unchanged)):
            torch.testing.assert_close(loop(factor * weight), plain, rtol=1e-3, atol=1e-3)


def test_a_step_asks_all_layers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked one by one, between kernels that read all weights, the questions take several times as long."""
    asked = []

    def count(*_: Any) -> None:
        holds = DecoderReplacement.holds_apart
        monkeypatch.setattr(
            DecoderReplacement, "holds_apart", lambda *args, **kwargs: asked.append(1) or holds(*args, **kwargs)
        )

    model = make("llama")
    with accelerate(model), CountedCalls() as counted:
        steps(model, count)
    assert not asked
    assert counted.calls["cached_attention"] == 2 * 4


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_of_peft(when: str) -> None:
    peft = pytest.importorskip("peft", reason="peft comes with the extra `test`")
    torch.manual_seed(0)
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = make("llama")
    unchanged = logits(model)
    handle = accelerate(model) if when == "after" else None
    adapted = peft.get_peft_model(model, options).eval()
    handle = accelerate(model) if handle is None else handle
    ours = logits(adapted)
    assert handle.layers == []
    assert all("peft.tuners.lora" in why or "changed after" in why for why in handle.left.values()), str(handle)
    assert not torch.allclose(ours, unchanged, atol=0.05)
    adapted.merge_adapter()  # through .data
    torch.testing.assert_close(logits(adapted), ours, rtol=1e-3, atol=1e-3)
    adapted.unmerge_adapter()
    with adapted.disable_adapter():
        torch.testing.assert_close(logits(adapted), unchanged, rtol=1e-3, atol=1e-3)
    handle.remove()
    torch.testing.assert_close(ours, logits(adapted), rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_lora_of_peft_that_is_merged_into_int8() -> None:
    peft = pytest.importorskip("peft", reason="peft comes with the extra `test`")
    torch.manual_seed(0)
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = make("llama")
    adapted = peft.get_peft_model(model, options).eval()
    exact = logits(adapted)
    with accelerate(model, weights="int8"):
        logits(adapted)
        adapted.merge_adapter()
        error = (logits(adapted) - exact).abs().mean()
    assert 0 < error < 0.1


# torchao uses functions of torch's that torch calls deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_weights_of_torchao(when: str, weights: str | None) -> None:
    """Layers stay of torch's class, and their weights become tensors of a class that multiplies by itself."""
    quantization = pytest.importorskip(
        "torchao.quantization", reason="torchao comes with the extra `test` on x86-64, where it has wheels"
    )
    model = make("llama")
    unchanged = logits(model)
    handle = accelerate(model, weights=weights) if when == "after" else None
    quantization.quantize_(model.model, quantization.Int8WeightOnlyConfig())
    handle = accelerate(model, weights=weights) if handle is None else handle
    ours = logits(model)
    assert not [layer for layer in handle.layers if layer.startswith("model.layers")], str(handle)
    handle.remove()
    assert not torch.equal(logits(model), unchanged)
    # The head is no part of what was quantized.
    torch.testing.assert_close(ours, logits(model), rtol=1e-3, atol=1e-3 if weights is None else 0.1)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_compiled_model_is_the_plain_one(name: str) -> None:
    model = make(name)
    expected = logits(model)
    with accelerate(model):
        torch.testing.assert_close(logits(torch.compile(model, backend="eager")), expected)
        torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3)
    torch._dynamo.reset()


class Halving(transformers.DynamicCache):
    """A cache with its own way to keep keys and values, as quantizing and compressing ones have."""

    def update(self, keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        return super().update(keys / 2, values / 2, layer, *args, **kwargs)


class HalvingLayer(cache_utils.DynamicLayer):
    def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        return super().update(keys / 2, values / 2, *args, **kwargs)


def _of_patched_update(target: Any) -> None:
    update = target.update
    target.update = lambda keys, values, *args, **kwargs: update(keys / 2, values / 2, *args, **kwargs)


def _patched() -> Any:
    cache = transformers.DynamicCache()
    _of_patched_update(cache)
    return cache


def _patched_layers() -> Any:
    cache = transformers.Cache(layers=[cache_utils.DynamicLayer() for _ in range(2)])
    for layer in cache.layers:
        _of_patched_update(layer)
    return cache


def prompt_and_step(model: Any, cache: Any) -> torch.Tensor:
    first = logits(model, past_key_values=cache)
    with torch.no_grad():
        second = model(tokens(count=1), past_key_values=cache).logits
    return torch.cat([first, second], 1)


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
@pytest.mark.parametrize(
    "cache",
    [
        Halving,
        lambda: transformers.Cache(layer_class_to_replicate=HalvingLayer),
        lambda: transformers.Cache(layers=[HalvingLayer(), HalvingLayer()]),
        _patched,
        _patched_layers,
    ],
    ids=["subclass", "layers on demand", "layers", "patched", "patched layers"],
)
def test_a_cache_that_gives_other_keys_than_it_was_given_is_asked(name: str, cache: Callable[[], Any]) -> None:
    model = make(name)
    expected = prompt_and_step(model, cache())
    assert not torch.allclose(expected, prompt_and_step(model, transformers.DynamicCache()), atol=1e-2)
    with accelerate(model), CountedCalls() as counted:
        torch.testing.assert_close(prompt_and_step(model, cache()), expected, rtol=1e-3, atol=1e-3)
    assert counted.calls["cached_attention"] > 0


@pytest.mark.parametrize("kind", [transformers.Cache, cache_utils.DynamicLayer])
def test_a_cache_that_somebody_patched_for_all_is_asked(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    update = kind.update
    with accelerate(model):
        before = prompt_and_step(model, transformers.DynamicCache())
        monkeypatch.setattr(kind, "update", lambda self, k, v, *args, **kw: update(self, k / 2, v / 2, *args, **kw))
        ours = prompt_and_step(model, transformers.DynamicCache())
    assert not torch.allclose(ours, before, atol=1e-2)
    torch.testing.assert_close(ours, prompt_and_step(model, transformers.DynamicCache()), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="transformers' other caches need packages")
@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
def test_a_quantized_cache(name: str) -> None:
    model = make(name)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    quantized = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    expected = model.generate(tokens(), **options, **quantized)
    with accelerate(model), CountedCalls() as counted:
        ours = model.generate(tokens(), **options, **quantized)
        exact = model.generate(tokens(), **options)
    assert counted.calls["cached_attention"] > 0
    assert not torch.allclose(ours.logits[1], exact.logits[1], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-3)
    assert torch.equal(ours.sequences, expected.sequences)


def test_a_cache_that_is_told_where_to_write_is_the_layers_own_affair() -> None:
    """In transformers 5.0 a static cache writes where the layer says, which later ones count themselves."""
    model = make("llama")
    layer = model.model.layers[0]
    hidden = torch.randn((1, 1, 32))
    options = {"position_embeddings": model.model.rotary_emb(hidden, torch.tensor([[0]]))}
    static = transformers.StaticCache(config=model.config, max_cache_len=4)
    with accelerate(model), torch.no_grad(), CountedCalls() as counted:
        layer(hidden, past_key_values=static, cache_position=torch.tensor([0]), **options)
        assert counted.calls["linear"] == 0
        layer(hidden, past_key_values=transformers.DynamicCache(), cache_position=torch.tensor([0]), **options)
        assert counted.calls["linear"] == 4


def test_a_forward_that_was_taken_and_put_back_counts_as_the_classs_own() -> None:
    """As transformers 5.0 leaves modules whose outputs it has collected."""
    model = make("llama")
    with accelerate(model) as handle:
        attention = model.model.layers[0].self_attn
        attention.forward = attention.forward
        assert len(handle.layers) == 2
        assert_as_plain(model)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj", "model.layers.1.mlp.act_fn", "lm_head"])
def test_hooks_in_another_dictionary_count(name: str) -> None:
    """Hooks are often removed so, all at once."""
    model = make("llama")
    module = model.get_submodule(name)
    with accelerate(model):
        steps(model, lambda *_: None)
        unchanged = logits(model)
        module._forward_hooks = OrderedDict()
        handle = module.register_forward_hook(lambda module, inputs, output: 3 * output)
        ours = logits(model)
    expected = logits(model)
    handle.remove()
    assert not torch.allclose(expected, unchanged, atol=0.05)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


def test_hooks_on_all_modules_are_called() -> None:
    model = make("llama")
    seen: set[str] = set()
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.add(type(module).__name__)
    )
    try:
        with accelerate(model):
            logits(model)
    finally:
        handle.remove()
    assert {"LlamaMLP", "LlamaAttention", "SiLUActivation", "Linear"} <= seen


def test_dropout_that_is_on_drops() -> None:
    config = CONFIGS["gpt2"]()
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.5
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.train()
    with accelerate(model):
        assert not torch.equal(logits(model), logits(model))
        model.eval()
        model.transformer.h[0].mlp.dropout.train()  # alone, as for Monte Carlo estimates
        assert not torch.equal(logits(model), logits(model))
        model.eval()
        assert torch.equal(logits(model), logits(model))


def test_autocast_computes_in_its_dtype() -> None:
    model = make("llama")
    with torch.autocast("cpu", torch.bfloat16):
        expected = logits(model)
        with accelerate(model):
            ours = logits(model)
    assert ours.dtype == expected.dtype
    assert torch.equal(ours, expected)


# ---------------------------------------------------------------------- weights that change
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "opt"])
def test_weights_that_are_trained_loaded_or_moved_are_followed(name: str, weights: Any) -> None:
    model = make(name)
    # int8: the logits of a copy of the model that is quantized when it is compared.
    bound = {"rtol": 1e-3, "atol": 1e-3}

    def follows() -> None:
        ours, other = logits(model), copy.deepcopy(model)
        with accelerate(other, weights=weights):
            torch.testing.assert_close(ours, logits(other), **bound)
        if weights is None:
            torch.testing.assert_close(ours, logits(copy.deepcopy(model)), **bound)

    with accelerate(model, weights=weights) as handle:
        layers = handle.layers
        before = logits(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model(tokens(), labels=tokens()).loss.backward()
        optimizer.step()
        assert not torch.allclose(logits(model), before, atol=1e-2)
        follows()
        other = {key: value + 0.1 * torch.randn_like(value) for key, value in model.state_dict().items()}
        model.load_state_dict(other)
        follows()
        model.load_state_dict({key: 0.9 * value for key, value in other.items()}, assign=True)
        follows()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "bias" in key or "proj" in key:
                    parameter.mul_(1.3)
        follows()
        for parameter in model.parameters():
            parameter.data += 0.05  # torch does not count this
        follows()
        model.double().float()
        follows()
        assert handle.layers == layers != []


def test_a_layer_whose_weights_are_of_several_dtypes_runs_its_own_code() -> None:
    model = make("llama")
    with accelerate(model) as handle:
        model.model.layers[1].self_attn.q_proj.to(torch.float64)
        assert handle.layers == ["model.layers.0"]
        with pytest.raises(RuntimeError, match="dtype"):
            logits(model)


def test_a_bias_of_one_element_is_for_all_and_one_that_comes_later_an_error_that_names_it() -> None:
    model = make("gpt2")
    bias = model.transformer.h[1].mlp.c_proj.bias
    its_own, for_all = bias.data, torch.ones(1)
    bias.data = for_all
    with accelerate(model) as handle:
        assert handle.layers == ["transformer.h.0"]
        assert_as_plain(model)
    bias.data = its_own
    with accelerate(model) as handle:
        bias.data = its_own.clone()
        assert_as_plain(model)
        assert handle.layers == ["transformer.h.0", "transformer.h.1"]
        bias.data = for_all
        with pytest.raises(RuntimeError, match=r"ds_plugin::linear: bias has shape \[1\]; expected \[\d+\]"):
            logits(model)


def test_weights_in_a_larger_buffer_stay_there() -> None:
    """ZeRO keeps all parameters in one buffer, and its optimizer writes there."""
    model = make("llama")
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(flat, model.parameters())
    with accelerate(model) as handle:
        assert handle.layers == handle.linear == []
        before = logits(model)
        flat *= 1.1
        assert not torch.allclose(logits(model), before, atol=1e-2)
        assert_as_plain(model)


def test_a_parameter_of_two_layers_is_left_where_it_is() -> None:
    model = make("llama")
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    with accelerate(model) as handle:
        assert handle.layers == ["model.layers.0"]
        assert "shares" in handle.left["model.layers.1"]
        assert second.mlp.up_proj.weight is first.mlp.up_proj.weight
        assert_as_plain(model)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_a_plain_model_with_weights_of_its_own(duplicate: Callable[[Any], Any]) -> None:
    model = make("llama")
    with accelerate(model):
        other = duplicate(model)
        expected = logits(model)
        with torch.no_grad():
            other.model.layers[0].mlp.down_proj.weight.mul_(3)
        assert torch.equal(logits(model), expected)
        assert not torch.allclose(logits(other), expected, atol=1e-2)
        with accelerate(other):
            assert_as_plain(other)


def test_saved_and_loaded(tmp_path: Path) -> None:
    model = make("qwen2")
    with accelerate(model):
        expected = logits(model)
        model.save_pretrained(tmp_path)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with accelerate(other) as handle:
        assert len(handle.layers) == 2, str(handle)
        torch.testing.assert_close(logits(other), expected, rtol=1e-4, atol=1e-4)


def test_two_models_in_two_threads() -> None:
    """Each with angles of its own; the rows of their prompts stand at other positions."""
    found: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    model = make("llama")
    positions = [torch.arange(9)[None] + 100 * i for i in range(2)]
    expected = [logits(model, position_ids=where) for where in positions]

    def run(index: int) -> None:
        for _ in range(20):
            found[index].append(logits(model, position_ids=positions[index]))

    with accelerate(model):
        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for index, results in found.items():
        for result in results:
            torch.testing.assert_close(result, expected[index], rtol=1e-3, atol=1e-3)


def test_weights_stay_on_their_devices() -> None:
    model = make("llama")
    model.model.layers[1].to("meta")
    with accelerate(model) as handle:
        assert model.model.layers[1].mlp.up_proj.weight.is_meta
        assert handle.layers == ["model.layers.0"]


# ---------------------------------------------------------------------- the report
def test_the_report() -> None:
    model = make("llama")
    add_lora(model.model.layers[1].self_attn)
    handle = accelerate(model)
    assert str(handle).splitlines() == [
        "LlamaForCausalLM on the SDK's ops:",
        "  whole layers     1  model.layers.0",
        "  attention        1  the whole model",
        "  linear layers    9  model.layers.1.self_attn.q_proj.base_layer, model.layers.1.self_attn.q_proj.delta, "
        "model.layers.1.self_attn.k_proj, model.layers.1.self_attn.v_proj, model.layers.1.self_attn.o_proj, "
        "model.layers.1.mlp.gate_proj, model.layers.1.mlp.up_proj, model.layers.1.mlp.down_proj, lm_head",
        "  norms            3  model.layers.1.input_layernorm, model.layers.1.post_attention_layernorm, model.norm",
        "  left alone       1",
        f"    model.layers.1: LlamaDecoderLayer: {Lora.__module__}.Lora is no plain linear layer",
    ]
    handle.remove()
    assert str(handle) == "LlamaForCausalLM is not accelerated any more"


def test_layers_of_another_name_with_the_same_code_run_whole() -> None:
    """transformers writes LLaMA's layers anew into the files of other families."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.ArceeConfig(**_LLAMA)).eval()
    with accelerate(model) as handle:  # its MLP is another one
        assert handle.layers == []
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.SeedOssConfig(**_LLAMA, head_dim=8)).eval()
    with accelerate(model) as handle:
        assert handle.layers == ["model.layers.0", "model.layers.1"] or handle.left
        assert_as_plain(model)
