"""A step whose layers are run by one call, ahead of their own calls: what happens between these counts all the same."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from small_models import LLAMA

from counted_calls import CountedCalls

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")
    import transformers
    from transformers.models.llama import modeling_llama

from ds_plugin_sdk.integrations.transformers import accelerate, kv_cache
from ds_plugin_sdk.integrations.transformers.decoder_row import Row
from ds_plugin_sdk.ops import decoder_layer

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]

LAYERS, STEPS = 3, 6

# Layers count on each other only in a loop of the file that their class is in.
_LOOP = """
def loop(layers, hidden, given, between, cache):
    for index, layer in enumerate(layers):
        hidden = between(index, layer(hidden, **given(index)), cache)
    return hidden
"""
_names: dict[str, Any] = {}
exec(compile(_LOOP, modeling_llama.__file__, "exec"), _names)
loop: Callable[..., torch.Tensor] = _names["loop"]


@torch.inference_mode(False)
def make(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": LAYERS, **options})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def as_it_is(index: int, hidden: torch.Tensor, cache: Any) -> torch.Tensor:
    return hidden


class Odd:
    """One step of several that is unlike the others."""

    def __init__(
        self,
        order: Sequence[int] = range(LAYERS),
        between: Callable[[int, torch.Tensor, Any], torch.Tensor] = as_it_is,
        masked: int | None = None,
    ) -> None:
        self.order, self.between, self.masked = order, between, masked


def double_in_place(index: int, hidden: torch.Tensor, cache: Any) -> torch.Tensor:
    return hidden.mul_(2) if index == 0 else hidden


def double_data(index: int, hidden: torch.Tensor, cache: Any) -> torch.Tensor:
    return 2 * hidden if index == 0 else hidden


def add_a_view(index: int, hidden: torch.Tensor, cache: Any) -> torch.Tensor:
    if index == 1:
        hidden[:, :, ::2].add_(1)
    return hidden


def later_layers(change: Callable[[Any], object]) -> Callable[[int, torch.Tensor, Any], torch.Tensor]:
    """After the first layer something is done to the keys and values of those after it."""

    def between(index: int, hidden: torch.Tensor, cache: Any) -> torch.Tensor:
        if index == 0:
            for layer in cache.layers[1:]:
                change(layer)
        return hidden

    return between


def one_more(layer: Any) -> None:
    layer.update(layer.keys[:, :, :1] + 1, layer.values[:, :, :1] + 1)


def replace_layers(index: int, hidden: torch.Tensor, cache: Any) -> torch.Tensor:
    if index == 0:
        cache.layers[1:] = map(copy.copy, cache.layers[1:])
    return hidden


ODD = {
    "nothing": Odd(),
    "written in place": Odd(between=double_in_place),
    "a part is written": Odd(between=add_a_view),
    "another tensor": Odd(between=double_data),
    "another order": Odd((1, 0, 2)),
    "the first layer comes later": Odd((2, 0, 1)),
    "a layer is left out": Odd((0, 2)),
    "the last layers are left out": Odd((0,)),
    "a layer comes twice": Odd((0, 1, 1, 2)),
    "a layer has a mask": Odd(masked=1),
    "caches are cropped": Odd(between=later_layers(lambda layer: layer.crop(-2))),
    "caches are reordered": Odd(between=later_layers(lambda layer: layer.reorder_cache(torch.tensor([1, 0])))),
    "caches are appended to": Odd(between=later_layers(one_more)),
    "caches are replaced": Odd(between=replace_layers),
}


def run(model: Any, odd: Odd, odd_steps: int = 1, crop: bool = False, masked: int | None = None) -> list[torch.Tensor]:
    """What steps of one token put out, the last but one or some odd; and the cache. A layer may have a mask in all."""
    cache = transformers.DynamicCache(config=model.config)
    model(torch.arange(3, 13).view(2, 5), past_key_values=cache)
    found = []
    for step in range(STEPS):
        hidden = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(step))
        angles = model.model.rotary_emb(hidden, torch.tensor([[5 + step]]))
        this = odd if STEPS - 1 - odd_steps <= step < STEPS - 1 else Odd()

        def given(index: int, angles: Any = angles, this: Odd = this) -> dict[str, Any]:
            options = {"position_embeddings": angles, "past_key_values": cache}
            layer = this.order[index]
            if index == this.masked or layer == masked:
                mask = torch.zeros(2, 1, 1, 1 + cache.get_seq_length(layer))
                mask[..., 1:3] = torch.finfo(torch.float32).min
                options["attention_mask"] = mask
            return options

        layers = [model.model.layers[index] for index in this.order]
        found.append(loop(layers, hidden, given, this.between, cache).clone())
        if crop:  # as after a guess by the first layers alone
            least = min(layer.get_seq_length() for layer in cache.layers)
            for layer in cache.layers:
                if layer.get_seq_length() > least:
                    layer.crop(least - layer.get_seq_length())
    return found + [each for layer in cache.layers for each in (layer.keys, layer.values)]


@pytest.fixture(autouse=True, params=[torch.no_grad, torch.inference_mode], ids=lambda guard: guard.__name__)
def without_gradients(request: pytest.FixtureRequest) -> Iterator[None]:
    with request.param():
        yield


def test_functions_of_libraries_give_what_the_dispatcher_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    asked = []

    def no_functions(look: bool) -> int:
        asked.append(0)
        return 0

    with accelerate(model, "int8"):
        assert decoder_layer.functions() != 0
        by_functions = run(model, Odd())
        monkeypatch.setattr(decoder_layer, "functions", no_functions)  # asked once in a step, and for the prompt
        by_dispatcher = run(model, Odd())
    assert len(asked) == STEPS + LAYERS
    for left, right in zip(by_functions, by_dispatcher, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("masked", [None, 1], ids=["alike", "of two kinds"])
@pytest.mark.parametrize("name", ODD)
def test_what_is_between_layers_counts(name: str, masked: int | None) -> None:
    """Of layers of two kinds, the first of the second kind runs the third, which is of the first."""
    model = make()
    expected = run(model, ODD[name], masked=masked)
    with accelerate(model), CountedCalls() as counted:
        torch.testing.assert_close(run(model, ODD[name], masked=masked), expected, rtol=1e-4, atol=1e-4)
    assert counted.calls["decoder_layers"] < counted.calls["decoder_layer"]


@pytest.mark.parametrize(
    ("odd", "in_vain"),
    [
        (ODD["a layer has a mask"], 2),
        (Odd(masked=LAYERS - 1), 1),
        (Odd((0, 2, 1)), 2),
        (ODD["the last layers are left out"], 2),
    ],
)
def test_of_steps_that_are_unlike_the_first_alone_is_run_ahead(odd: Odd, in_vain: int) -> None:
    model, odd_steps = make(), 3
    with accelerate(model), CountedCalls() as counted:
        run(model, odd, odd_steps, crop=True)
    called = LAYERS * (1 + STEPS - odd_steps) + len(odd.order) * odd_steps
    assert counted.calls["decoder_layer"] == called + in_vain


@torch.inference_mode(False)
@torch.no_grad()
def test_a_mask_that_is_written_between_layers_is_read() -> None:
    """Not in inference mode, where torch does not count that."""
    model = make()

    def run_masked() -> torch.Tensor:
        cache = transformers.DynamicCache(config=model.config)
        model(torch.arange(3, 13).view(2, 5), past_key_values=cache)
        for step in range(STEPS):
            hidden = torch.ones(2, 1, 32)
            mask = torch.zeros(2, 1, 1, 6 + step)
            options = {
                "position_embeddings": model.model.rotary_emb(hidden, torch.tensor([[5 + step]])),
                "past_key_values": cache,
                "attention_mask": mask,
            }

            def between(index: int, hidden: torch.Tensor, cache: Any, mask: torch.Tensor = mask) -> torch.Tensor:
                mask[..., index] = torch.finfo(torch.float32).min
                return hidden

            result = loop(model.model.layers, hidden, lambda _, options=options: options, between, cache)
        return result

    expected = run_masked()
    with accelerate(model):
        torch.testing.assert_close(run_masked(), expected, rtol=1e-4, atol=1e-4)


class Around:
    """What is around a layer, as budgets for keys and streamed weights are: it does something before its call."""

    def __init__(self, layer: Any, before: Callable[[Any, Any], object]) -> None:
        self.layer, self.before = layer, before

    def __call__(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        self.before(self.layer, options["past_key_values"])
        result: torch.Tensor = self.layer(hidden, **options)
        return result


def trim(layer: Any, cache: Any) -> None:
    index = layer.self_attn.layer_idx
    if index and (more := cache.layers[index].get_seq_length() - 5) > 0:
        cache.layers[index].crop(-more)


def bring_weights(layer: Any, cache: Any) -> None:
    """Those that were elsewhere; a state is loaded by `copy_`, which is in place."""
    layer.mlp.down_proj.weight.data.copy_(layer.elsewhere)


@pytest.mark.parametrize("before", [trim, bring_weights])
def test_what_is_done_around_layers_counts(before: Callable[[Any, Any], object]) -> None:
    model = make()
    for layer in model.model.layers:
        layer.elsewhere = layer.mlp.down_proj.weight.detach().clone()

    def run_wrapped() -> torch.Tensor:
        cache = transformers.DynamicCache(config=model.config)
        model(torch.arange(3, 13).view(2, 5), past_key_values=cache)
        for step in range(STEPS):
            hidden = torch.ones(2, 1, 32)
            angles = model.model.rotary_emb(hidden, torch.tensor([[5 + step]]))
            options = {"position_embeddings": angles, "past_key_values": cache}
            layers = [Around(layer, before) for layer in model.model.layers]
            if before is bring_weights:
                for layer in model.model.layers:
                    layer.mlp.down_proj.weight.data.zero_()
            result = loop(layers, hidden, lambda _, options=options: options, as_it_is, cache)
            for layer in model.model.layers:
                bring_weights(layer, cache)
        return result

    expected = run_wrapped()
    with accelerate(model):
        torch.testing.assert_close(run_wrapped(), expected, rtol=1e-4, atol=1e-4)


def test_layers_that_are_not_called_get_no_cache() -> None:
    model = make()
    with accelerate(model):
        run(model, Odd())
        model.config.num_hidden_layers = 1
        cache = transformers.DynamicCache()
        model(torch.tensor([[5]]), past_key_values=cache)
    assert len(cache.layers) == 1


def test_steps_run_ahead_after_outputs_were_collected() -> None:
    """The hooks that collected them stay."""
    model = make()
    with accelerate(model):
        model(torch.tensor([[5]]), output_hidden_states=True)
        with CountedCalls() as counted:
            model.generate(torch.arange(3, 9).view(1, 6), max_new_tokens=STEPS + 1, do_sample=False, pad_token_id=0)
    assert counted.calls["decoder_layers"] == 2 * LAYERS + STEPS - 1


def test_a_cache_of_another_model_is_an_error() -> None:
    """One that grows: without an error keys and values would be read beyond their ends."""
    other, cache = make(num_key_value_heads=4), transformers.DynamicCache()
    with accelerate(other):
        other(torch.arange(3, 8).view(1, 5), past_key_values=cache)
    model = make()
    with accelerate(model), pytest.raises(RuntimeError, match="expected a cache of this model"):
        model(torch.tensor([[5]]), past_key_values=cache)


def test_lists_that_are_no_layers_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    model = make()
    call = decoder_layer.call

    def keep(*args: Any) -> Any:
        seen.append(args)
        return call(*args)

    monkeypatch.setattr(decoder_layer, "call", keep)
    with accelerate(model):
        run(model, Odd())
    *given, tensors, integers, numbers = seen[-1]
    assert len(call(*given, tensors, integers, numbers)) == LAYERS
    absent = [0, *integers[1:]]
    for lists, why in (
        ((tensors, absent, numbers), "lacks a weight"),
        ((tensors, [integers[0] | 1 << 40, *integers[1:]], numbers), "one too many"),
        ((tensors[:-1], integers, numbers), "less than their layers"),
        ((tensors, integers, numbers[:-1]), "less than their layers"),
        (([*tensors, tensors[0]], integers, numbers), "more than their layers"),
        ((tensors, [*integers, 0], numbers), "more than their layers"),
        (([], [], []), "caches for 0 layers"),
    ):
        with pytest.raises(RuntimeError, match=why):
            call(*given, *lists)
    hidden, caches, angles, which, functions = given
    for numbers_of_layers, why in (
        (which[1:], "8 numbers say what 3 layers are given; expected three for each"),
        ([*which[:2], 1, *which[3:]], "given tensor 2 of 2"),
    ):
        with pytest.raises(RuntimeError, match=why):
            call(hidden, caches, angles, numbers_of_layers, functions, tensors, integers, numbers)


def test_what_another_thread_does_meanwhile_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step was odd: the next one is not run ahead."""
    model = make()
    expected = run(model, Odd())
    rows: list[Row] = []
    run_ahead, alike = Row.run_ahead, kv_cache.alike

    def seen(row: Row, *args: Any) -> Any:
        rows.append(row)
        return run_ahead(row, *args)

    def interrupted(*args: Any) -> Any:
        rows[-1]._kinds = []
        return alike(*args)

    monkeypatch.setattr(Row, "run_ahead", seen)
    monkeypatch.setattr(kv_cache, "alike", interrupted)
    with accelerate(model):
        torch.testing.assert_close(run(model, Odd()), expected, rtol=1e-4, atol=1e-4)
    assert rows


CACHES = [name for name in ODD if name.startswith("caches")]


@pytest.mark.parametrize("name", ["nothing", "written in place", *CACHES])
def test_with_an_int8_cache_it_is_as_without_running_ahead(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    with accelerate(model, cache="int8"):
        ahead = run(model, ODD[name])
        monkeypatch.setattr(Row, "run_ahead", lambda *_: None)
        alone = run(model, ODD[name])
    torch.testing.assert_close(ahead, alone, rtol=0, atol=0)


def test_layers_that_share_keys_and_values() -> None:
    model = make()
    for layer in model.model.layers:
        layer.self_attn.layer_idx = 0
    expected = run(model, Odd())
    with accelerate(model):
        torch.testing.assert_close(run(model, Odd()), expected, rtol=1e-4, atol=1e-4)


def test_steps_after_the_first_are_one_call() -> None:
    model = make()
    prompt = torch.arange(3, 9).view(1, 6)
    options = {"max_new_tokens": STEPS + 1, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = copy.deepcopy(model).generate(prompt, **options)
    with accelerate(model), CountedCalls() as counted:
        assert torch.equal(model.generate(prompt, **options), expected)
    assert counted.calls["decoder_layer"] == LAYERS * (STEPS + 1)
    assert counted.calls["decoder_layers"] == 2 * LAYERS + STEPS - 1


def test_weights_that_are_exchanged_without_torchs_counting_are_read() -> None:
    """A prompt finds out; the steps after it run ahead with what it has made of them."""
    model = make()
    weight = model.model.layers[1].self_attn.o_proj.weight
    with accelerate(model, "int8") as handle:
        run(model, Odd())
        weight.data.copy_(3 * weight.data)
        ours = run(model, Odd())
        handle.remove()
    with accelerate(model, "int8"):
        torch.testing.assert_close(ours, run(model, Odd()))
    assert not torch.allclose(ours[-1], run(make(), Odd())[-1], atol=0.1)
