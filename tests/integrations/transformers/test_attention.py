"""Attention that our kernels may not compute stays the model's own: the same logits as the plain model."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from small_models import CONFIGS, logits, make, tokens
from torch import nn

from counted_calls import CountedCalls

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.gpt_oss import modeling_gpt_oss

from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.integrations.transformers import accelerate, attention_forward, register_attention
from ds_plugin_sdk.integrations.transformers.attention import attend

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]


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


@pytest.mark.parametrize("padded", [False, True])
def test_a_decoder_with_more_tokens_than_its_encoder(padded: bool) -> None:
    torch.manual_seed(0)
    sizes = {f"{part}_{size}": 2 for part in ("encoder", "decoder") for size in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    model: Any = transformers.BartModel(
        transformers.BartConfig(vocab_size=96, d_model=32, init_std=0.2, **sizes)
    ).eval()
    mask = torch.ones(2, 4, dtype=torch.long)
    mask[1, 2:] = 0 if padded else 1
    inputs = {"input_ids": tokens(count=4), "attention_mask": mask, "decoder_input_ids": tokens()}
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        with accelerate(model) as handle:
            assert handle.attention
            ours = model(**inputs).last_hidden_state
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


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


class SinksOfSomebodys(modeling_gpt_oss.GptOssAttention):  # type: ignore[misc]  # transformers is not typed where types are checked
    """In another file than the function that knows of sinks."""


def small_git() -> Any:
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    config = transformers.GitConfig(**sizes, initializer_range=0.5, vision_config={"num_hidden_layers": 1})
    return transformers.GitForCausalLM(config).eval()


def test_a_model_without_torchs_attention_has_its_own_mask_by_name() -> None:
    """GIT's code adds the mask to its scores: None, which torch's attention would have, looks into the future."""
    torch.manual_seed(0)
    model = small_git()
    expected = logits(model)
    register_attention()
    model.set_attn_implementation("ds_plugin")
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_a_model_that_gives_others_than_torchs_attention_something_else_is_an_error_by_name() -> None:
    """DeepSeek V3.2 hides keys by a mask from those that it knows by name, and gives indices to others."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4}
    sizes |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    sizes |= {"index_topk": 3, "index_head_dim": 16, "index_n_heads": 2, "n_group": 1, "topk_group": 1}
    sizes |= {"num_experts_per_tok": 2, "first_k_dense_replace": 1}
    model = transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**sizes)).eval()
    register_attention()
    model.set_attn_implementation("ds_plugin")
    with pytest.raises(SdkError, match=r"cannot attend by 'ds_plugin'.*gives others 'indices'"):
        logits(model)


def test_so_too_in_a_class_of_somebodys_own() -> None:
    model = make("gpt_oss")
    expected = logits(model)
    for layer in model.model.layers:
        layer.self_attn.__class__ = SinksOfSomebodys
    register_attention()
    model.set_attn_implementation("ds_plugin")
    torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3)


def test_an_encoder_that_has_its_own_attention_alone_looks_both_ways() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = transformers.SplinterModel(transformers.SplinterConfig(**sizes, vocab_size=96)).eval()
    with torch.no_grad():
        expected = model(tokens()).last_hidden_state
        register_attention()
        model.set_attn_implementation("ds_plugin")
        torch.testing.assert_close(model(tokens()).last_hidden_state, expected, rtol=1e-3, atol=1e-3)


class FalconOfSomebodys(transformers.FalconModel):  # type: ignore[misc]  # as above
    """In another file than the attention that asks for torch's by its name."""


def test_a_class_whose_base_asks_for_torchs_attention_by_name_keeps_it() -> None:
    torch.manual_seed(0)
    config = transformers.FalconConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=96, initializer_range=0.2
    )
    model = FalconOfSomebodys(config).eval()
    with torch.no_grad():
        expected = model(tokens()).last_hidden_state
        with accelerate(model) as handle:
            torch.testing.assert_close(model(tokens()).last_hidden_state, expected, rtol=1e-3, atol=1e-3)
            assert not handle.attention


def test_an_argument_that_nobody_knows_goes_to_torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_plugin_sdk.integrations.transformers import attention

    seen: dict[str, Any] = {}

    def sdpa(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        seen.update(kwargs)
        return args[3], None

    monkeypatch.setattr(attention, "sdpa_attention_forward", sdpa)
    monkeypatch.setattr(attention, "has_own_sdpa", lambda: True)
    heads = torch.zeros((1, 2, 3, 4))
    with torch.no_grad():
        attention_forward(nn.Identity(), heads, heads, heads, None, sliding_window=7)
        assert not seen
        attention_forward(nn.Identity(), heads, heads, heads, None, block_index=7)
    assert seen["block_index"] == 7


@pytest.mark.parametrize("expanded", ["keys", "values"])
@pytest.mark.parametrize("shape", [(1, 2, 5, 8), (2, 1, 5, 8), (2, 2, 1, 8)], ids=str)
def test_expanded_keys_and_values_go_to_torchs_attention(shape: tuple[int, ...], expanded: str) -> None:
    """As those of one head for all queries' heads."""
    module = make("llama").model.layers[0].self_attn
    query, states = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    key, value = [torch.randn(shape).expand(2, 2, 5, 8) if expanded == each else states for each in ("keys", "values")]
    expected = sdpa_attention_forward(module, query, key, value, None)[0]
    with torch.no_grad():
        ours = attention_forward(module, query, key, value, None)[0]
    torch.testing.assert_close(ours, expected)


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


@pytest.mark.parametrize("first", [0, 1])
def test_models_of_one_configuration_are_given_back_apart(first: int) -> None:
    config = CONFIGS["llama"]()
    models = [transformers.LlamaForCausalLM(config).eval() for _ in range(2)]
    handles = [accelerate(model) for model in models]
    handles[first].remove()
    assert len(handles[1 - first].layers) == 2
    assert handles[1 - first].attention
    handles[1 - first].remove()
    assert config._attn_implementation == "sdpa"


def test_a_model_of_the_same_configuration_needs_no_handle() -> None:
    config = CONFIGS["llama"]()
    one, other = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
    handle = accelerate(one)
    accelerate(other)
    handle.remove()
    with CountedCalls() as counted:
        logits(other)
    assert counted.calls["decoder_layer"] == 2
    handle = accelerate(one)
    del other
    gc.collect()
    handle.remove()
    assert config._attn_implementation == "sdpa"


def test_a_model_of_a_shallow_copy_of_a_configuration_is_given_back() -> None:
    with accelerate(make("llama")) as handle:
        config = copy.copy(next(iter(handle._found.attentions.values())))
    model = transformers.LlamaForCausalLM(config).eval()
    accelerate(model).remove()
    assert config._attn_implementation == "sdpa"


def test_an_attention_that_was_asked_for_by_name_stays() -> None:
    model = make("llama")
    register_attention()
    model.set_attn_implementation("ds_plugin")
    accelerate(model).remove()
    assert model.config._attn_implementation == "ds_plugin"


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


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hidden_states_are_those_of_quantized_layers(name: str) -> None:
    model = make(name)
    expected = model(tokens(), output_hidden_states=True).hidden_states
    with accelerate(model, weights="int8", cache="int8"), CountedCalls() as counted:
        caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
        for count in (9, 1, 1):
            plain = model(tokens(count=count), past_key_values=caches[0])
            counted.calls.clear()
            ours = model(tokens(count=count), past_key_values=caches[1], output_hidden_states=True)
            assert counted.calls["cached_attention_int8"] == 2
            assert torch.equal(ours.logits, plain.logits)
        states = model(tokens(), output_hidden_states=True).hidden_states
    for one, other in zip(states, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("queries", [1, 7, 8, 40])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_many_queries_are_for_the_models_own_attention(groups: int, masked: bool, queries: int) -> None:
    """From as many on as the op is torch's too; where the model would copy shared keys for a mask, the op is better."""
    register_attention()
    module = make("llama").model.layers[0].self_attn
    module.num_key_value_groups = groups
    query = torch.randn(2, 2 * groups, queries, 16)  # a scale of 1 / 4
    key, value = torch.randn(2, 2, 2, queries, 16).unbind()
    mask = torch.ones(2, 1, queries, queries, dtype=torch.bool).tril() if masked else None
    names = []
    for function in (attention_forward, cached_attention_of):
        with torch.no_grad(), torch.profiler.profile() as profiler:
            result = function(module, query, key, value, mask)[0]
        names.append({event.name for event in profiler.events()})
        torch.testing.assert_close(result, sdpa_attention_forward(module, query, key, value, mask)[0])
    assert ("aten::scaled_dot_product_attention" in names[1]) == (queries >= 8)
    repeated = masked and groups > 1
    assert ("ds_plugin::cached_attention" in names[0]) == (queries < 8 or repeated)


def cached_attention_of(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor]:
    attended = attend(query, key[:, :, :0], value[:, :, :0], key, value, key.shape[2], 0.25, mask, True)
    return (attended.transpose(1, 2),)
