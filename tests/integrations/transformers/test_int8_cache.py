"""``accelerate(model, cache="int8")``: keys and values in 8 bits, and what is left to other code."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import LLAMA, logits, make, tokens
from torch import Tensor

from counted_calls import CountedCalls

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")
    import transformers
    from transformers import cache_utils

from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.integrations.transformers import accelerate
from ds_plugin_sdk.integrations.transformers.kv_cache import GrowingLayer, GrowingSlidingLayer, Int8Layer
from ds_plugin_sdk.ops import decoder_layer
from ds_plugin_sdk.ops.attention import dequantize_rows, quantize_rows

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]

STEPS = 16
NAMES = ("gpt2", "llama", "qwen2", "opt")


class Rounding(transformers.DynamicCache):
    """What an int8 cache stands for, in floats: the plain model's code attends to keys that were rounded."""

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        return super().update(_rounded(keys), _rounded(values), layer, *args, **kwargs)


def _rounded(rows: Tensor) -> Tensor:
    exact = rows.double()
    step = exact.abs().amax(-1, keepdim=True) / 127
    return ((exact / step).round() * step).to(rows.dtype)


def generate(model: Any, **options: Any) -> Any:
    """Greedy, three rows, of which two are padded on the left."""
    ids, mask = tokens(3), torch.ones((3, 9), dtype=torch.int64)
    mask[0, :4] = mask[2, :1] = 0
    options = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **options)


def stacked(generated: Any) -> Tensor:
    return torch.stack(generated.logits)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_cache_of_rounded_keys_and_values(name: str) -> None:
    model = make(name)
    plain, expected = generate(model), generate(model, past_key_values=Rounding())
    with accelerate(model, cache="int8") as handle, CountedCalls() as counted:
        ours = generate(model)
        assert handle.int8_cache == handle.layers != []
        assert "int8 cache       2" in str(handle)
    assert counted.calls["cached_attention_int8"] == 2 * STEPS
    assert counted.calls["cached_attention"] == 0
    assert torch.equal(ours.sequences, expected.sequences)
    # A number near a tie may be rounded to either side.
    torch.testing.assert_close(stacked(ours), stacked(expected), rtol=0, atol=5e-3)
    # And how far from the plain cache that is: of logits of size 1, those of the first step.
    error = (ours.logits[0] - plain.logits[0]).abs()
    assert 0 < float(error.mean()) < 0.03


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    exact = generate(make(name)).logits[0]
    model = make(name).to(dtype)
    plain = generate(model).logits[0].float()
    with accelerate(model, cache="int8"), CountedCalls() as counted:
        ours = generate(model).logits[0].float()
    if dtype == torch.float64:  # by the reference implementation
        assert float((ours - exact).abs().mean()) < 0.03
    else:
        assert counted.calls["cached_attention_int8"] > 0
        assert float((ours - exact).abs().mean()) <= 1.2 * float((plain - exact).abs().mean()) + 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_one_call_is_its_ops_one_by_one(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(name).to(dtype)
    with accelerate(model, cache="int8"):
        whole = generate(model)
        monkeypatch.setattr(decoder_layer, "call", None)
        parts = generate(model)
    assert torch.equal(stacked(whole), stacked(parts))


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1 / 4), (torch.bfloat16, 1 / 2)], ids=str)
def test_it_takes_a_quarter_or_half_of_the_memory(dtype: torch.dtype, share: float) -> None:
    model = make("llama").to(dtype)
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    with accelerate(model, cache="int8"):
        cache = generate(model).past_key_values
    assert {type(layer) for layer in cache.layers} == {Int8Layer}
    plain = sum(each.nbytes for layer in cache.layers for each in (layer.keys, layer.values))
    assert sum(layer.nbytes for layer in cache.layers) == plain * share * (1 + 4 / head_dim)
    assert all(layer.keys.dtype == dtype for layer in cache.layers)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
def test_beams(options: dict[str, Any]) -> None:
    model = make("llama")
    expected = generate(model, past_key_values=Rounding(), **options)
    with accelerate(model, cache="int8"), CountedCalls() as counted:
        ours = generate(model, **options)
    assert counted.calls["cached_attention_int8"] == 2 * STEPS
    assert torch.equal(ours.sequences, expected.sequences)


def test_assisted_generation_crops_it() -> None:
    model, assistant = make("llama"), make("llama")
    with torch.no_grad():
        assistant.lm_head.weight += 0.02 * torch.randn(assistant.lm_head.weight.shape)  # is wrong at times
    options = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0, "assistant_model": assistant}
    with accelerate(model, cache="int8"):
        alone = model.generate(tokens(1), **{**options, "assistant_model": None})
        ours = model.generate(tokens(1), **options)
    assert torch.equal(ours, alone)


def _filled(dtype: torch.dtype = torch.float32) -> tuple[Int8Layer, cache_utils.DynamicLayer]:
    """A layer, and transformers' own with what it stands for."""
    ours, plain = Int8Layer(), cache_utils.DynamicLayer()
    generator = torch.Generator().manual_seed(3)
    for count in (5, 1, 70):
        states = (torch.randn((4, 2, count, 16), generator=generator).to(dtype) for _ in range(2))
        ours.update(*states)
    plain.update(ours.keys, ours.values)
    return ours, plain


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.crop(-3),
        lambda layer: layer.crop(0),
        lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0, 3])),
        lambda layer: layer.batch_repeat_interleave(2),
        lambda layer: layer.batch_select_indices(torch.tensor([1, 3])),
        lambda layer: (layer.offload(), layer.prefetch()),
        lambda layer: layer.reset(),
    ],
    ids=["crop", "crop nothing", "reorder", "repeat", "select", "offload", "reset"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_changes_a_layer_keeps_its_8_bits(change: Callable[[Any], Any], dtype: torch.dtype) -> None:
    ours, plain = _filled(dtype)
    states = torch.randn((len(plain.keys), 2, 2, 16)).to(dtype)
    for layer in (ours, plain):
        change(layer)
    assert (ours.is_initialized, ours.get_seq_length()) == (plain.is_initialized, plain.get_seq_length())
    if plain.keys is None:
        assert ours.keys is None and ours.values is None
        return
    assert torch.equal(ours.keys, plain.keys) and torch.equal(ours.values, plain.values)
    if len(plain.keys) == len(states):
        ours.update(states, states)
        assert torch.equal(ours.keys[:, :, :-2], plain.keys)
        assert torch.equal(ours.keys[:, :, -2:], dequantize_rows(*quantize_rows(states), dtype))


def test_a_copy_is_one_of_its_own() -> None:
    ours, plain = _filled()
    copied = copy.deepcopy(ours)
    ours.crop(-70)
    assert torch.equal(copied.keys, plain.keys)


def test_keys_that_are_set_are_rounded() -> None:
    """By code that knows transformers' own layers alone."""
    ours, _ = _filled()
    states = torch.randn((4, 2, 9, 16))
    ours.keys, ours.values = states, -states
    torch.testing.assert_close(ours.keys, _rounded(states))
    torch.testing.assert_close(ours.values, _rounded(-states))
    assert ours.get_seq_length() == 9


@pytest.mark.parametrize("name", NAMES)
def test_the_models_own_code_goes_on_with_it(name: str) -> None:
    """Where the model is accelerated no more, and where a call asks for what our layers do not do."""
    model = make(name)
    step = {"input_ids": tokens(count=1)}
    rounding = Rounding()
    logits(model, past_key_values=rounding)
    with torch.no_grad():
        expected = model(**step, past_key_values=rounding).logits
    handle = accelerate(model, cache="int8")
    caches = [transformers.DynamicCache() for _ in range(3)]
    for cache in caches:
        logits(model, past_key_values=cache)
        assert type(cache.layers[1]) is Int8Layer
    with torch.no_grad():
        ours = model(**step, past_key_values=caches[0]).logits
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=True):
            own = model(**step, past_key_values=caches[1]).logits
        handle.remove()
        removed = model(**step, past_key_values=caches[2]).logits
    torch.testing.assert_close(ours, expected, rtol=0, atol=5e-3)
    torch.testing.assert_close(removed, expected, rtol=0, atol=5e-3)
    assert float((own.float() - expected).abs().mean()) < 0.05  # of bfloat16
    assert [cache.get_seq_length() for cache in caches] == [10, 10, 10]


def test_a_model_without_the_option_goes_on_with_it() -> None:
    model = make("llama")
    cache = transformers.DynamicCache()
    with accelerate(model, cache="int8"):
        logits(model, past_key_values=cache)
        twin = copy.deepcopy(cache)
        with torch.no_grad():
            expected = model(tokens(count=1), past_key_values=twin).logits
    with accelerate(model), CountedCalls() as counted, torch.no_grad():
        ours = model(tokens(count=1), past_key_values=cache).logits
    assert counted.calls["cached_attention_int8"] == 2
    assert torch.equal(ours, expected)


def test_gradients_are_an_error() -> None:
    model = make("llama")
    cache = transformers.DynamicCache()
    with accelerate(model, cache="int8"):
        logits(model, past_key_values=cache)
        with pytest.raises(SdkError, match="keys with gradients"):
            model(tokens(count=1), past_key_values=cache)
        assert cache.get_seq_length() == 9
        model(tokens(), labels=tokens()).loss.backward()  # a new cache: the model's own
        assert model.lm_head.weight.grad is not None


def _held(model: Any) -> Any:
    cache = transformers.DynamicCache()
    logits(model, past_key_values=cache)
    return cache


def _sliding(model: Any) -> Any:
    config = transformers.MistralConfig(**LLAMA, sliding_window=6)
    return transformers.DynamicCache(config=config)


@pytest.mark.parametrize(
    "cache",
    [
        lambda model: transformers.StaticCache(config=model.config, max_cache_len=32),
        _sliding,
        _held,
        lambda model: Rounding(),
    ],
    ids=["static", "sliding", "filled before", "subclass"],
)
def test_other_caches_stay_what_they_are(cache: Callable[[Any], Any]) -> None:
    """And get what they would get without the option."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.MistralConfig(**LLAMA, sliding_window=6)).eval()
    given = cache(model)
    twin, kinds = copy.deepcopy(given), [type(layer) for layer in given.layers]
    with accelerate(model):
        expected = logits(model, past_key_values=twin)
    with accelerate(model, cache="int8"), CountedCalls() as counted:
        ours = logits(model, past_key_values=given)
    assert torch.equal(ours, expected)
    assert counted.calls["cached_attention_int8"] == 0
    assert not any(isinstance(layer, Int8Layer) for layer in given.layers)
    assert all(map(isinstance, given.layers, kinds))


def test_layers_of_one_cache_can_differ() -> None:
    """Every other layer attends to a window."""
    config = transformers.Qwen2Config(
        **{**LLAMA, "num_hidden_layers": 4},
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention"] * 2,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    plain = generate(model)
    with accelerate(model, cache="int8"):
        ours = generate(model)
    kinds = [type(layer) for layer in ours.past_key_values.layers]
    assert kinds == [Int8Layer, GrowingSlidingLayer] * 2
    assert 0 < float((ours.logits[0] - plain.logits[0]).abs().mean()) < 0.03


def test_without_the_option_nothing_changes() -> None:
    model = make("llama")
    with accelerate(model) as handle, CountedCalls() as counted:
        cache = generate(model).past_key_values
        assert handle.int8_cache == []
    assert counted.calls["cached_attention_int8"] == 0
    assert {type(layer) for layer in cache.layers} == {GrowingLayer}


def test_wrong_use_raises() -> None:
    model = make("llama")
    with pytest.raises(SdkError, match="cache is 'int4'"):
        accelerate(model, cache="int4")  # type: ignore[arg-type]  # wrong on purpose
    other = make("gemma2")
    attention = other.config._attn_implementation
    with pytest.raises(SdkError, match="cannot have an int8 cache"):
        accelerate(other, cache="int8")
    assert other.config._attn_implementation == attention
    assert not any("forward" in vars(module) for module in other.modules())
    with accelerate(other):
        pass
