"""Models of files and classes that somebody has written: accelerated as far as their code is known, and the same."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import halved, logits, make, tokens
from torch import nn

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")
    from transformers.models.llama import modeling_llama as llama

from ds_plugin_sdk.integrations.transformers import accelerate

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]


def of_somebodys(folder: Path, monkeypatch: pytest.MonkeyPatch, more: str = "") -> Any:
    """A file of code that comes with a model, is LLaMA's, and has `more` at its end."""
    source = Path(llama.__file__).read_text(encoding="utf-8").replace("from ...", "from transformers.")
    source = source.replace("from .config", "from transformers.models.llama.config")
    (folder / "modeling_somebodys.py").write_text(source + more, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "modeling_somebodys", raising=False)
    return importlib.import_module("modeling_somebodys")


def test_a_file_of_somebodys_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose functions are patched later."""
    modeling_somebodys = of_somebodys(tmp_path, monkeypatch)
    torch.manual_seed(0)
    model = modeling_somebodys.LlamaForCausalLM(make("llama").config).eval()
    with accelerate(model) as handle:
        assert len(handle.layers) == 2
        before = logits(model)
        monkeypatch.setattr(modeling_somebodys, "rotate_half", halved(modeling_somebodys.rotate_half))
        ours = logits(model)
    assert not torch.allclose(before, ours, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(ours, logits(model), rtol=1e-3, atol=1e-3)


def test_a_file_with_a_model_that_lacks_torchs_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others keep theirs, with gradients too, and not the slow one that the file has."""
    own = "class Other(LlamaPreTrainedModel):\n    _supports_sdpa = False\n"
    file = of_somebodys(tmp_path, monkeypatch, own)
    model = file.LlamaForCausalLM(make("llama").config)
    monkeypatch.setattr(file, "eager_attention_forward", None)
    with accelerate(model) as handle:
        assert handle.attention
        model(tokens()).logits.sum().backward()


def test_a_file_with_an_attention_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's name, in a table that is the file's own."""
    own = """
from transformers.modeling_utils import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

def doubled(*args, **options):
    attended, weights = sdpa_attention_forward(*args, **options)
    return attended * 2, weights

ALL_ATTENTION_FUNCTIONS = AttentionInterface()
ALL_ATTENTION_FUNCTIONS["sdpa"] = doubled
"""
    model = of_somebodys(tmp_path, monkeypatch, own).LlamaForCausalLM(make("llama").config).eval()
    expected = logits(model)
    with accelerate(model) as handle:
        torch.testing.assert_close(logits(model), expected)
        assert not handle.layers and not handle.attention
        assert "has another function than transformers' own as 'sdpa'" in str(handle)


class Attention(nn.Module):
    """Somebody's own, without a configuration."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return hidden_states / 2, None


@pytest.mark.parametrize("attention", [Attention, lambda: None], ids=["another", "none"])
def test_an_attention_that_is_not_known_is_left_alone(attention: Callable[[], Any]) -> None:
    model = make("llama")
    model.model.layers[1].self_attn = attention()
    with accelerate(model) as handle:
        assert handle.layers == ["model.layers.0"]
        if isinstance(model.model.layers[1].self_attn, Attention):
            ours = logits(model)
            handle.remove()
            torch.testing.assert_close(ours, logits(model), rtol=1e-3, atol=1e-3)


_IN_A_NOTEBOOK = """
import transformers

class Written(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        if {asked}:
            return super().forward(*args, **kwargs)
        raise NotImplementedError

class Around(transformers.LlamaPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = transformers.LlamaModel(config)
        self.lm_head = transformers.LlamaForCausalLM(config).lm_head
        self.post_init()

    def forward(self, ids):
        states = self.model(ids).last_hidden_state
        return transformers.modeling_outputs.CausalLMOutput(logits=self.lm_head(states))
"""


@pytest.mark.parametrize(
    ("kind", "asked", "attentions"),
    [
        ("Written", "True", [""]),
        ("Around", "True", [""]),
        ("Written", "self.config._attn_implementation in ('eager', 'sdpa')", []),
        ("Written", "self.config._attn_implementation == 'sdpa'", []),
    ],
)
@pytest.mark.parametrize("imported", [True, False])
def test_a_model_of_a_notebook_is_as_one_of_a_file(
    kind: str, asked: str, attentions: list[str], imported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its source cannot be read."""
    notebook = types.ModuleType("notebook")
    exec(_IN_A_NOTEBOOK.format(asked=asked), vars(notebook))
    if imported:
        monkeypatch.setitem(sys.modules, "notebook", notebook)
    llama_model = make("llama")
    llama_model._can_set_attn_implementation()  # is kept on the class, and inherited
    torch.manual_seed(0)
    model = vars(notebook)[kind](llama_model.config).eval()
    plain = logits(model)
    with accelerate(model) as handle:
        assert handle.attention == attentions
        assert bool(handle.layers) == bool(attentions)
        torch.testing.assert_close(logits(model), plain, rtol=1e-3, atol=1e-3)


class Halved(llama.LlamaMLP):
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return super()._call_impl(*args, **kwargs) / 2


class ScaledWeight(llama.LlamaRMSNorm):
    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return value * 1.5 if name == "weight" else value


class ComputedEps(llama.LlamaRMSNorm):
    def _eps(self) -> float:
        return 0.5

    variance_epsilon = property(_eps, lambda self, value: None)


@pytest.mark.parametrize(
    ("name", "kind", "of"),
    [
        ("mlp", Halved, lambda model: model.config),
        ("input_layernorm", ScaledWeight, lambda _: 32),
        ("post_attention_layernorm", ComputedEps, lambda _: 32),
    ],
)
def test_a_class_that_computes_its_calls_or_attributes_is_left_alone(
    name: str, kind: type[nn.Module], of: Callable[[Any], Any]
) -> None:
    model = make("llama")
    layer = model.model.layers[1]
    other = kind(of(model))
    other.load_state_dict(getattr(layer, name).state_dict())
    setattr(layer, name, other)
    plain = logits(model)
    with accelerate(model) as handle:
        assert handle.layers == ["model.layers.0"]
        torch.testing.assert_close(logits(model), plain, rtol=1e-3, atol=1e-3)


class Silu(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # that is what is tested
@pytest.mark.parametrize("part", ["act_fn", "down_proj"])
def test_a_part_of_torchscript_stays_what_it_is(part: str) -> None:
    model = make("llama")
    expected = logits(model)
    for layer in model.model.layers:
        setattr(layer.mlp, part, torch.jit.script(Silu() if part == "act_fn" else layer.mlp.down_proj))
    with accelerate(model) as handle:
        assert handle.linear and not handle.layers
        torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3)
