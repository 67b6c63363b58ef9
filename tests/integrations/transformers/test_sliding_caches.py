"""Caches of layers that attend to a window grow in place, and hold what transformers' own hold."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import LLAMA, tokens

from counted_calls import CountedCalls

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")
    import transformers
    from transformers import cache_utils

from ds_plugin_sdk.integrations.transformers import accelerate
from ds_plugin_sdk.integrations.transformers.kv_cache import GrowingLayer, GrowingSlidingLayer, Int8Layer, growing_layer

WINDOW, STEPS = 6, 20

_ALTERNATING = ["sliding_attention", "sliding_attention", "full_attention"] * 2
MODELS: dict[str, Callable[[], Any]] = {
    "mistral": lambda: transformers.MistralConfig(**LLAMA, sliding_window=WINDOW),
    "qwen2": lambda: transformers.Qwen2Config(
        **{**LLAMA, "num_hidden_layers": 6},
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**LLAMA, "num_hidden_layers": 6},
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
    ),
}


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(MODELS[request.param]()).eval()
    made.generation_config.eos_token_id = None
    return made


models = pytest.mark.parametrize("model", MODELS, indirect=True)


def generate(model: Any, prompt: torch.Tensor, **options: Any) -> Any:
    return model.generate(
        prompt,
        max_new_tokens=STEPS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


def assert_same(ours: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-3)
    assert torch.equal(ours.sequences, expected.sequences)


@pytest.mark.compiler
@pytest.mark.usefixtures("kernels")
@models
@pytest.mark.parametrize("length", [3, WINDOW - 1, WINDOW, 11])
def test_generation_is_that_of_the_plain_model(model: Any, length: int) -> None:
    expected = generate(model, tokens(count=length))
    with accelerate(model), CountedCalls() as counted:
        ours = generate(model, tokens(count=length))
    assert_same(ours, expected)
    kinds = {type(layer) for layer in ours.past_key_values.layers}
    assert GrowingSlidingLayer in kinds and kinds <= {GrowingSlidingLayer, GrowingLayer}
    for mine, theirs in zip(ours.past_key_values.layers, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(mine.values, theirs.values, rtol=1e-3, atol=1e-3)
    assert counted.calls["cached_attention"] >= model.config.num_hidden_layers * STEPS


@pytest.mark.compiler
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("model", "calls", "in_vain"),
    [
        ("mistral", STEPS - 2, 0),
        # One call until those with a window get a mask; then the first layer without one runs all that are left.
        ("qwen2", 1 + 5 + 2 * (STEPS - 4), 4),
        ("gemma3", 2 * (STEPS - 2), 0),  # layers with a window have other angles than those without
    ],
    indirect=["model"],
)
def test_layers_of_one_kind_that_follow_each_other_are_one_call(model: Any, calls: int, in_vain: int) -> None:
    """From the second step on: the prompt and the first step call each layer by itself."""
    with accelerate(model), CountedCalls() as counted:
        generate(model, tokens(1, 3))
    layers = model.config.num_hidden_layers
    assert counted.calls["decoder_layer"] == layers * STEPS + in_vain
    assert counted.calls["decoder_layers"] == 2 * layers + calls


@pytest.mark.compiler
@pytest.mark.usefixtures("kernels")
@models
@pytest.mark.parametrize(
    "options",
    [
        {"attention_mask": torch.tensor([[0] * 4 + [1] * 5, [1] * 9])},
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 4},
    ],
    ids=["padding", "beams", "assisted", "chunks"],
)
def test_what_generation_can_be_asked_for(model: Any, options: dict[str, Any]) -> None:
    prompt = tokens(1 if "prompt_lookup_num_tokens" in options else 2)
    try:
        expected = generate(model, prompt, **options)
    except ValueError as error:  # some releases of transformers refuse some of these: so do they of accelerated models
        with accelerate(model), pytest.raises(ValueError, match=re.escape(str(error))):
            generate(model, prompt, **options)
        return
    with accelerate(model):
        assert_same(generate(model, prompt, **options), expected)


@pytest.mark.compiler
@pytest.mark.usefixtures("kernels")
@models
def test_a_conversation_goes_on(model: Any) -> None:
    """After the window was filled, by a cache that the caller keeps, with the model's own code in between."""

    def turns(cache: Any, accelerated: tuple[bool, ...]) -> torch.Tensor:
        found = []
        for turn, ours in enumerate(accelerated):
            handle = accelerate(model) if ours else None
            with torch.no_grad():
                found.append(model(tokens(count=4 + turn), past_key_values=cache).logits)
                found += [model(tokens(count=1), past_key_values=cache).logits for _ in range(5)]
            if handle is not None:
                handle.remove()
        return torch.cat(found, 1)

    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    ours = turns(caches[0], (True, False, True))
    torch.testing.assert_close(ours, turns(caches[1], (False,) * 3), rtol=1e-3, atol=1e-3)


def _layers(window: int = WINDOW) -> tuple[GrowingSlidingLayer, Any]:
    return GrowingSlidingLayer(window), cache_utils.DynamicSlidingWindowLayer(window)


def _append(layers: tuple[Any, ...], count: int, rows: int = 4) -> None:
    states = torch.randn((rows, 2, count, 16))
    results = [layer.update(states, -states) for layer in layers]
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def _assert_alike(ours: Any, theirs: Any) -> None:
    assert (ours.is_initialized, ours.get_seq_length()) == (theirs.is_initialized, theirs.get_seq_length())
    if theirs.keys is None:
        assert ours.keys is None and ours.values is None
    else:
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


@pytest.mark.parametrize("counts", [(5,), (6,), (7,), (1,) * 200, (70, 1, 1), (3, 9, 1, 1, 1), (2, 2, 2, 2)], ids=str)
def test_a_layer_holds_what_transformers_own_holds(counts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layers = _layers()
    for count in counts:
        _append(layers, count)
        _assert_alike(*layers)
    asked = 3 if transformers.__version__ >= "5.1" else torch.arange(3)
    assert layers[0].get_mask_sizes(asked) == layers[1].get_mask_sizes(asked)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.crop(-3),
        lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0, 3])),
        lambda layer: layer.batch_repeat_interleave(2),
        lambda layer: layer.batch_select_indices(torch.tensor([1, 3])),
        lambda layer: (layer.offload(), layer.prefetch()),
        lambda layer: layer.reset(),
    ],
    ids=["crop", "reorder", "repeat", "select", "offload", "reset"],
)
@pytest.mark.parametrize("held", [4, 90])
def test_what_changes_a_layer(change: Callable[[Any], Any], held: int) -> None:
    """Below the window and beyond it, where cropping is an error in both."""
    torch.manual_seed(0)
    layers = _layers()
    for count in (held - 1, 1):
        _append(layers, count)
    errors = []
    for layer in layers:
        try:
            change(layer)
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))
    assert len(set(errors)) == len(errors) // 2
    _assert_alike(*layers)
    for count in (1, 3):
        _append(layers, count, 4 if layers[1].keys is None else len(layers[1].keys))
        _assert_alike(*layers)


@pytest.mark.skipif(
    not hasattr(cache_utils.DynamicSlidingWindowLayer, "activate_past_recording"),
    reason="layers of this transformers do not record what has left the window",
)
@pytest.mark.parametrize("after", [0, 4, 9])
def test_a_layer_that_records_the_past_can_be_cropped(after: int) -> None:
    torch.manual_seed(0)
    layers = _layers()
    if after:
        _append(layers, after)
    for layer in layers:
        layer.activate_past_recording()
    assert not layers[0].grows
    for count, cropped in ((4, -2), (5, -3), (1, 0)):
        _append(layers, count)
        for layer in layers:
            layer.crop(cropped)
        _assert_alike(*layers)


@pytest.mark.skipif(
    not hasattr(cache_utils.DynamicSlidingWindowLayer, "activate_past_recording"),
    reason="layers of this transformers do not record what has left the window",
)
def test_what_was_asked_of_an_empty_layer_is_asked_of_the_one_in_its_place() -> None:
    cache = transformers.DynamicCache(config=MODELS["mistral"]())
    cache.layers[0].activate_past_recording()
    assert growing_layer(cache, 0, GrowingLayer) is None and cache.layers[0].record_past
    assert growing_layer(cache, 1, GrowingLayer) is cache.layers[1] and not cache.layers[1].record_past


@pytest.mark.compiler
@pytest.mark.usefixtures("kernels")
@models
@pytest.mark.parametrize("names", [("keys",), ("values",), ("keys", "values")], ids=" and ".join)
def test_keys_or_values_that_somebody_exchanges(model: Any, names: tuple[str, ...]) -> None:
    """Alone, too; between two tokens, in a layer in the middle and in the last one."""

    def run() -> torch.Tensor:
        cache, found = transformers.DynamicCache(config=model.config), []
        with torch.no_grad():
            model(tokens(), past_key_values=cache)
            for step in range(5):
                if step in (2, 3):
                    for layer in (cache.layers[1], cache.layers[-1]):
                        for name in names:
                            setattr(layer, name, 1.1 * getattr(layer, name))
                found.append(model(tokens(count=1), past_key_values=cache).logits)
        return torch.cat(found, 1)

    expected = run()
    with accelerate(model):
        torch.testing.assert_close(run(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.compiler
@pytest.mark.usefixtures("kernels")
@models
def test_a_cache_of_inference_mode_goes_on_by_references(model: Any) -> None:
    """In float64, whose ops are torch's."""
    model = copy.deepcopy(model).double()

    def run() -> torch.Tensor:
        cache = transformers.DynamicCache(config=model.config)
        with torch.inference_mode():
            model(tokens(), past_key_values=cache)
        with torch.no_grad():
            return torch.cat([model(tokens(count=1), past_key_values=cache).logits for _ in range(3)], 1)

    expected = run()
    with accelerate(model):
        torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)  # the plain norm is in float32


@pytest.mark.compiler
@pytest.mark.usefixtures("kernels")
@models
def test_a_cache_of_inference_mode_goes_on_without(model: Any) -> None:
    """By the model's own code and by ours, where torch lets nobody write to tensors of inference mode."""

    def run(own: bool) -> torch.Tensor:
        cache = transformers.DynamicCache(config=model.config)
        with torch.inference_mode():
            model(tokens(), past_key_values=cache)
            model(tokens(count=1), past_key_values=cache)
        found = []
        with torch.no_grad():
            for step in range(3):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=own and step == 1):  # its own code then
                    found.append(model(tokens(count=1), past_key_values=cache).logits.float())
        with torch.inference_mode():
            found.append(model(tokens(count=1), past_key_values=cache).logits.clone())
        return torch.cat(found, 1)

    for own in (False, True):
        expected = run(own)
        with accelerate(model):
            ours = run(own)
        tolerance = 0.2 if own else 1e-3  # of bfloat16, in the token after its own
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.compiler
@pytest.mark.usefixtures("kernels")
@models
def test_gradients_through_a_cache(model: Any) -> None:
    """After tokens without; those that follow keep no graph."""

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(tokens(), past_key_values=cache)
        for _ in range(2):
            output = model(tokens(count=1), past_key_values=cache).logits
        (gradient,) = torch.autograd.grad(output.sum(), [model.model.layers[0].self_attn.k_proj.weight])
        with torch.no_grad():
            for _ in range(2):
                output = model(tokens(count=1), past_key_values=cache).logits
        assert not any(layer.keys.requires_grad for layer in cache.layers)
        return gradient, output

    expected = run()
    with accelerate(model):
        torch.testing.assert_close(run(), expected, rtol=1e-3, atol=1e-3)


def test_a_long_prompt_is_not_kept() -> None:
    layer, _ = _layers()
    layer.update(torch.ones(1, 2, 3000, 8), torch.ones(1, 2, 3000, 8))
    layer.update(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8))
    assert layer.get_seq_length() == 3001
    assert all(room.shape[2] < 100 for room in layer._rooms.values())


def test_memory_does_not_grow_with_the_number_of_tokens() -> None:
    layer, _ = _layers()
    for _ in range(1000):
        layer.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
    assert layer.get_seq_length() == 1000
    assert all(room.shape[2] < 100 for room in layer._rooms.values())


def test_a_window_of_one_stays_transformers_own() -> None:
    cache = cache_utils.DynamicCache()
    cache.layers = [cache_utils.DynamicSlidingWindowLayer(1)]
    assert growing_layer(cache, 0, GrowingLayer) is None
    assert type(cache.layers[0]) is cache_utils.DynamicSlidingWindowLayer


def test_a_copy_is_one_of_its_own() -> None:
    layers = _layers()
    _append(layers, 9)
    copied = copy.deepcopy(layers[0])
    layers[0].update(torch.ones(4, 2, 1, 16), torch.ones(4, 2, 1, 16))
    _assert_alike(copied, layers[1])


def _pickled(layer: Any) -> Any:
    return pickle.loads(pickle.dumps(layer))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, _pickled])
@pytest.mark.parametrize("kind", [GrowingLayer, lambda: GrowingSlidingLayer(WINDOW), Int8Layer])
def test_two_that_share_what_came_before_go_on_apart(kind: Callable[[], Any], copied: Callable[[Any], Any]) -> None:
    """As transformers' own layers do, which never write to old tensors."""
    torch.manual_seed(0)
    layer, apart = kind(), kind()
    for each in (layer, apart):
        each.update(torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8))
    other = copied(layer)
    for step in range(1, 9):
        states = torch.full((1, 2, 1, 8), 1.0 + step)
        layer.update(states, states)
        other.update(-states, -states)
        apart.update(states, states)
        assert torch.equal(layer.keys, apart.keys) and torch.equal(layer.values, apart.values)
        assert torch.equal(other.keys[:, :, -1:], -layer.keys[:, :, -1:])
        assert other.get_seq_length() == layer.get_seq_length() == 4 + step


@torch.no_grad()
@pytest.mark.parametrize("kind", [GrowingLayer, Int8Layer])
def test_new_keys_are_written_to_the_same_tensors_until_they_are_full_or_set(kind: Callable[[], Any]) -> None:
    layer = kind()
    states = torch.randn(1, 2, 4, 8)
    layer.update(states, states)
    room = layer.make_room(1)
    for _ in range(room[0].shape[2] - 4):
        assert layer.make_room(1) is room
        layer.update(states[:, :, :1], states[:, :, :1])
    full = layer.get_seq_length()
    assert full == room[0].shape[2] and layer.make_room(1) is not room
    room = layer.make_room(1)
    layer.keys = layer.keys[:, :, :2]
    layer.values = layer.values[:, :, :2]
    assert layer.make_room(1) is not room and layer.held == 2


def test_a_layer_that_is_pickled_within_a_step_holds_what_comes_next() -> None:
    """A room was made, and what should write to it did not come to that."""
    layer = GrowingSlidingLayer(WINDOW)
    for tokens_of_it in (2 * WINDOW, 1, 1):
        layer.update(*(torch.randn(1, 2, tokens_of_it, 8),) * 2)
    layer.make_room(1)
    copied, states = _pickled(layer), torch.randn(1, 2, 1, 8)
    copied.update(states, states)
    assert torch.equal(copied.keys[:, :, -1:], states)


def test_an_int8_layer_that_is_set_again_keeps_no_old_room() -> None:
    layer = Int8Layer()
    layer.update(*(torch.randn(1, 2, 4, 8),) * 2)
    gone = weakref.ref(layer.make_room(1)[0])
    layer.reset()
    layer.keys = layer.values = torch.randn(1, 2, 4, 8)
    assert gone() is None


def test_layers_with_a_window_are_exchanged_where_a_release_gives_them_a_configuration_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As transformers 5.8 to 5.13 do."""
    written = cache_utils.DynamicSlidingWindowLayer.__init__

    def init(self: Any, config: object = None, sliding_window: int | None = None) -> None:
        written(self, sliding_window=getattr(config, "sliding_window", None) or sliding_window)

    monkeypatch.setattr(cache_utils.DynamicSlidingWindowLayer, "__init__", init)
    config = MODELS["mistral"]()
    cache = transformers.DynamicCache()
    cache.layers, cache.layer_class_to_replicate = [cache_utils.DynamicSlidingWindowLayer(config)], None
    layer = growing_layer(cache, 0, GrowingLayer)
    assert isinstance(layer, GrowingSlidingLayer) and layer.sliding_window == WINDOW
