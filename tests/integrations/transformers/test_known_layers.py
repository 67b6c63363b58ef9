"""Layers whose code is known run whole, in whichever family or release; those of another one are left alone."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from small_models import LLAMA, assert_as_plain, logits, make, steps

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")
    import transformers
    from transformers.models.opt import modeling_opt as opt

from ds_plugin_sdk.integrations.transformers import accelerate, families

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]


def test_layers_of_another_name_with_the_same_code_run_whole() -> None:
    """transformers writes LLaMA's layers anew into the files of other families."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.ArceeConfig(**LLAMA)).eval()
    with accelerate(model) as handle:  # its MLP is another one
        assert handle.layers == []
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.SeedOssConfig(**LLAMA, head_dim=8)).eval()
    with accelerate(model) as handle:
        assert handle.layers == ["model.layers.0", "model.layers.1"]
        assert_as_plain(model)


_OF_KNOWN_PARTS = (
    *("ernie4_5", "exaone4", "glm", "glm4", "gpt_neox", "granite", "olmo2", "olmo3", "phi", "seed_oss", "smollm3"),
    *("stablelm", "starcoder2"),
)


@pytest.mark.parametrize("name", _OF_KNOWN_PARTS)
def test_layers_of_known_parts_run_whole(name: str) -> None:
    """With biases; in training mode, where some of them drop what is added to the residual, they are their own."""
    model = make(name)
    with accelerate(model) as handle:
        assert len(handle.layers) == 2
        assert_as_plain(model)
        torch.manual_seed(3)
        trained = logits(model.train())
        torch.manual_seed(3)
        torch.testing.assert_close(trained, logits(copy.deepcopy(model)))


@pytest.mark.parametrize("layer", [0, 1])
def test_turning_heads_can_be_switched_on_and_off(layer: int) -> None:
    def switch(attention: Any) -> None:
        attention.use_rope = 1 - attention.use_rope

    expected = steps(make("smollm3"), switch, layer)
    model = make("smollm3")
    assert (expected - steps(make("smollm3"), None)).abs().max() > 0.05, "a change that changes nothing tests nothing"
    with accelerate(model):
        torch.testing.assert_close(steps(model, switch, layer), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("granite", "residual_multiplier", 0.2),
        ("gpt_neox", "use_parallel_residual", False),
        ("exaone4", "self_attn.sliding_window", None),
    ],
)
def test_how_parts_are_added_can_be_changed(name: str, attribute: str, value: object) -> None:
    model = make(name)
    before = logits(model)
    with accelerate(model):
        inner, _, last = attribute.rpartition(".")
        setattr(model.base_model.layers[1].get_submodule(inner), last, value)
        assert_as_plain(model)
        assert (logits(model) - before).abs().max() > 0.05, "a change that changes nothing tests nothing"


def test_multipliers_may_be_whole_numbers() -> None:
    model = make("granite")
    for layer in model.model.layers:
        layer.residual_multiplier = layer.self_attn.scaling = 1
    with accelerate(model) as handle:
        assert len(handle.layers) == 2
        assert_as_plain(model)
        model.model.layers[0].residual_multiplier = 2
        model.model.layers[1].self_attn.scaling = 3
        assert handle.layers == []
        assert_as_plain(model)


class OfAnotherRelease(opt.OPTDecoderLayer):  # type: ignore[misc]  # transformers is not typed where types are checked
    """As OPT's layers were in transformers 5.3."""

    def forward(self, hidden_states: torch.Tensor, output_attentions: bool = False, **options: Any) -> Any:
        return (super().forward(hidden_states, **options),)


def test_layers_of_a_release_that_put_out_tuples_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.FAMILIES, OfAnotherRelease, families.FAMILIES[opt.OPTDecoderLayer])
    model = make("opt")
    model.model.decoder.layers[1].__class__ = OfAnotherRelease
    with accelerate(model) as handle:
        assert handle.layers == ["model.decoder.layers.0"]
        assert "puts out a tuple" in handle.left["model.decoder.layers.1"]
        assert "model.decoder.layers.1.fc1" in handle.linear


def test_layers_of_a_release_without_an_attribute_are_left_alone() -> None:
    """GPT-2's attention had no ``scaling`` in transformers 5.3."""
    model = make("gpt2")
    vars(model.transformer.h[1].attn).pop("scaling", None)
    with accelerate(model) as handle:
        assert handle.layers == ["transformer.h.0"]
        assert "scaling" in handle.left["transformer.h.1"]
        assert "transformer.h.1.ln_1" in handle.norms
