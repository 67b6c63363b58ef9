"""Caches with their own way to keep keys and values are asked, as the plain model asks them."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import LLAMA, logits, make, prompt_and_step, tokens

from counted_calls import CountedCalls

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")
    import transformers
    from transformers import cache_utils

from ds_plugin_sdk.integrations.transformers import accelerate
from ds_plugin_sdk.integrations.transformers.kv_cache import GrowingLayer

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]


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


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_patch_for_all_counts_for_caches_that_are_filled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = make(name), make(name)
    accelerate(models[1])
    pairs = [(model, transformers.DynamicCache()) for model in models]
    update = cache_utils.DynamicLayer.update
    prompt, step = tokens(2, 9), tokens(2, 1)
    with torch.no_grad():
        for model, cache in pairs:
            model(prompt, past_key_values=cache)
        monkeypatch.setattr(
            cache_utils.DynamicLayer, "update", lambda self, k, v, *args, **kw: update(self, k / 2, v / 2, *args, **kw)
        )
        expected, ours = (model(step, past_key_values=cache).logits for model, cache in pairs)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


def test_an_int8_cache_that_is_filled_hands_no_integers_to_a_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = make("llama"), transformers.DynamicCache()
    update, seen = cache_utils.DynamicLayer.update, []
    with accelerate(model, cache="int8"), torch.no_grad():
        model(tokens(2, 9), past_key_values=cache)
        with monkeypatch.context() as patch:
            patch.setattr(
                cache_utils.DynamicLayer,
                "update",
                lambda self, k, v, *args, **kw: (seen.append(k.dtype), update(self, k, v, *args, **kw))[1],
            )
            model(tokens(2, 1), past_key_values=cache)
        model(tokens(2, 1), past_key_values=cache)
    assert torch.int8 not in seen


@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="transformers' older ones need quanto or hqq")
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


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_gradients_through_steps_with_a_cache(name: str) -> None:
    """What a call returned of the cache is part of a graph while the next one appends."""

    def gradient(model: Any) -> torch.Tensor:
        model.requires_grad_(False)
        weight = model.model.layers[0].self_attn.q_proj.weight.requires_grad_()
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(tokens(), past_key_values=cache)
        later = [model(tokens(count=1), past_key_values=cache).logits.square().mean() for _ in range(2)]
        (found,) = torch.autograd.grad(sum(later), [weight])
        return found

    model = make(name)
    expected = gradient(model)
    with accelerate(model):
        torch.testing.assert_close(gradient(model), expected, rtol=1e-3, atol=1e-3)


def test_a_layer_takes_its_cache_by_either_name() -> None:
    """transformers 5.24 renamed `past_key_values` to `cache`."""
    model = make("llama")
    layer = model.model.layers[0]
    names = {"past_key_values", "cache"} & {"past_key_values", *inspect.signature(type(layer).forward).parameters}
    hidden = torch.randn((1, 1, 32))
    options = {"position_embeddings": model.model.rotary_emb(hidden, torch.tensor([[0]]))}
    with accelerate(model), torch.no_grad(), CountedCalls() as counted:
        for number, name in enumerate(sorted(names), start=1):
            cache = transformers.DynamicCache()
            layer(hidden, **{name: cache}, **options)
            assert cache.get_seq_length() == 1 and counted.calls["linear"] == 4 * number


def test_a_forward_that_another_wrapper_is_around_stays_the_models() -> None:
    """Only transformers' own wrapper that renames an argument is known."""
    model = make("llama")
    kind = type(model.model.layers[0].self_attn)
    forward = kind.forward

    @functools.wraps(forward)
    def twice(*args: Any, **kwargs: Any) -> Any:
        output, weights = forward(*args, **kwargs)
        return 2 * output, weights

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", twice)
        expected = logits(model)
        with accelerate(model) as accelerated:
            assert not accelerated.layers
            torch.testing.assert_close(logits(model), expected)


@pytest.mark.parametrize(("name", "quantized"), [("gpt2", None), ("llama", None), ("gemma2", None), ("llama", "int8")])
def test_a_cache_of_another_dtype_than_the_model_goes_on(name: str, quantized: Any) -> None:
    """transformers' layers promote to the wider dtype: a bfloat16 cache becomes a float32 one."""

    def run(model: Any) -> torch.Tensor:
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model.bfloat16()(tokens(), past_key_values=cache)
            model.float()
            steps = [model(tokens(count=1), past_key_values=cache).logits for _ in range(3)]
        return torch.cat(steps, 1)

    model = make(name)
    expected = run(copy.deepcopy(model))
    with accelerate(model, cache=quantized):
        torch.testing.assert_close(run(model), expected, rtol=0.1, atol=0.1)


def test_an_int8_cache_of_another_dtype_serves_the_plain_model() -> None:
    model = make("llama").bfloat16()
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        with accelerate(model, cache="int8"):
            model(tokens(), past_key_values=cache)
        model.float()
        assert model(tokens(count=1), past_key_values=cache).logits.dtype == torch.float32


def _kept(model: Any, count: int = 9) -> Any:
    """A cache after a prompt and two tokens."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for each in (tokens(count=count), tokens(count=1), tokens(count=1)):
            model(each, past_key_values=cache)
    return cache


def _with_a_window() -> Any:
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(transformers.MistralConfig(**LLAMA, sliding_window=6)).eval()


_FILLED = pytest.mark.parametrize(
    ("make_model", "options"),
    [
        (functools.partial(make, "llama"), {}),
        (_with_a_window, {}),
        (functools.partial(make, "llama"), {"cache": "int8"}),
    ],
    ids=["plain", "sliding", "int8"],
)


def test_who_reads_keys_changes_nothing() -> None:
    """Another thread may, between two layers of a step."""
    layer = GrowingLayer()
    for count in (5, 1, 1):
        layer.update(*torch.ones(2, 2, 2, count, 8))
    room = {**layer._rooms}
    assert layer.keys is not None and layer.keys.shape[2] == 7
    assert all(layer._rooms[name] is room[name] for name in room)


def test_what_is_written_to_keys_that_were_read_counts() -> None:
    layer, transformers_own = GrowingLayer(), cache_utils.DynamicLayer()
    for each in (layer, transformers_own):
        for count in (5, 1):
            each.update(*torch.ones(2, 2, 2, count, 8))
        before = each.keys
        before.mul_(2)
        each.update(*torch.ones(2, 2, 2, 1, 8))
        before.zero_()  # of before: it is the cache's no more
        each.keys[:, :, 0] = 3
        each.update(*torch.ones(2, 2, 2, 1, 8))
    assert torch.equal(layer.keys, transformers_own.keys)
    assert torch.equal(layer.values, transformers_own.values)


@_FILLED
def test_a_pickle_is_of_transformers_own_layers(make_model: Callable[[], Any], options: Any) -> None:
    """They can be read where this package is not installed."""
    model = make_model()
    with accelerate(model, **options), torch.no_grad():
        cache = _kept(model)
        pickled = pickle.dumps(cache)
        assert b"ds_plugin" not in pickled
        read, copied = pickle.loads(pickled), copy.deepcopy(cache)
        assert [*map(type, copied.layers)] == [*map(type, cache.layers)]
        assert {type(each).__module__ for each in read.layers} == {"transformers.cache_utils"}
        assert all(each.keys.is_contiguous() and each.values.is_contiguous() for each in read.layers)
        assert all(each.keys.untyped_storage().nbytes() == each.keys.nbytes for each in read.layers)
        expected = model(tokens(count=1), past_key_values=cache).logits
        for each in (read, copied):
            torch.testing.assert_close(model(tokens(count=1), past_key_values=each).logits, expected, atol=0.02, rtol=0)


def test_positions_are_not_repeated() -> None:
    ours, transformers_own = GrowingLayer(), cache_utils.DynamicLayer()
    for layer in (ours, transformers_own):
        layer.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))
        layer.update(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 1, 8))
    assert ours.values is not None
    assert torch.equal(ours.values, transformers_own.values)


@pytest.mark.parametrize("shape", [(1, 2, 1, 8), (2, 1, 1, 8), (2, 2, 1, 1)])
def test_keys_of_another_shape_are_an_error_as_in_transformers(shape: tuple[int, ...]) -> None:
    layer = GrowingLayer()
    layer.update(torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8))
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        layer.update(torch.randn(shape), torch.randn(shape))


def test_another_batch_than_the_cache_has_is_an_error_as_in_transformers() -> None:
    model = make("llama")
    with accelerate(model), torch.no_grad():
        cache = transformers.DynamicCache(config=model.config)
        model(tokens(rows=2), past_key_values=cache)
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            model(tokens(rows=1, count=1), past_key_values=cache)
