"""Weights that are trained, loaded, moved, copied or shared: an accelerated model follows them."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from small_models import assert_as_plain, logits, make, tokens
from torch import nn

from counted_calls import CountedCalls

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")
    import transformers

from ds_plugin_sdk.integrations.transformers import accelerate, replacement

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]


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


@pytest.mark.parametrize("rows", [slice(None), slice(-2, None)])
def test_weights_that_make_logits_are_compared_with_each_token(rows: slice) -> None:
    """Also where the layers before them did not run in between; those of words that were added are the last ones."""
    model, other = make("llama"), make("llama")
    with accelerate(model, weights="int8"), torch.no_grad():
        cache = transformers.DynamicCache(config=model.config)
        for count in (4, 1, 1):
            model(tokens(count=count), past_key_values=cache)
        for each in (model, other):
            each.lm_head.weight.data[rows] *= -4
        hidden = torch.randn(1, 1, model.config.hidden_size)
        torch.testing.assert_close(model.lm_head(hidden), other.lm_head(hidden), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_word_that_is_written_is_seen_by_the_next_prompt(weights: Any) -> None:
    """Also where only the last token of a prompt makes logits, as in ``generate``."""
    model, other = make("llama"), make("llama")
    with accelerate(model, weights=weights), torch.no_grad():
        for row in (0, 17, model.config.vocab_size - 1):
            model(tokens(), logits_to_keep=1)
            model(tokens(count=1), logits_to_keep=1)
            for each in (model, other):
                each.lm_head.weight.data[row] *= -4
            with accelerate(other, weights=weights):
                expected = other(tokens(), logits_to_keep=1).logits
            torch.testing.assert_close(model(tokens(), logits_to_keep=1).logits, expected)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_weights_that_are_cut_where_they_lie_are_as_large_as_the_models(weights: Any) -> None:
    """As who trims a vocabulary or an MLP does: its first rows are where they were."""
    model = make("llama")
    with accelerate(model, weights=weights):
        logits(model)
        model.lm_head.weight.data = model.lm_head.weight.data[:60]
        for layer in model.model.layers:
            for part in (layer.mlp.gate_proj, layer.mlp.up_proj):
                part.weight.data = part.weight.data[:32]
            layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data[:, :32].clone()
        ours = logits(model)
    assert ours.shape[-1] == 60
    bound = {"rtol": 1e-3, "atol": 1e-3} if weights is None else {"rtol": 0.1, "atol": 0.5}
    torch.testing.assert_close(ours, logits(model), **bound)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_heads_that_are_pruned_are_gone(name: str) -> None:
    model = make(name)
    with accelerate(model):
        logits(model)
        for attention in (layer.self_attn for layer in model.model.layers):
            for part, rows in ((attention.q_proj, 16), (attention.k_proj, 8), (attention.v_proj, 8)):
                part.weight = nn.Parameter(part.weight.data[:rows].clone())
                if part.bias is not None:
                    part.bias = nn.Parameter(part.bias.data[:rows].clone())
            attention.o_proj.weight = nn.Parameter(attention.o_proj.weight.data[:, :16].clone())
        ours = logits(model)
    torch.testing.assert_close(ours, logits(model), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_heads_of_one_product_that_are_pruned_are_gone(weights: Any) -> None:
    """Queries, keys and values are one layer, whose own code takes as many heads as it makes."""
    model = make("gpt_neox")
    with accelerate(model, weights=weights):
        logits(model)
        for attention in (layer.attention for layer in model.gpt_neox.layers):
            product = attention.query_key_value
            product.weight, product.bias = nn.Parameter(product.weight[:48]), nn.Parameter(product.bias[:48])
            attention.dense.weight = nn.Parameter(attention.dense.weight.data[:, :16].clone())
        ours = logits(model)
    bound = {"rtol": 1e-3, "atol": 1e-3} if weights is None else {"rtol": 0.1, "atol": 0.5}
    torch.testing.assert_close(ours, logits(model), **bound)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_prompt_may_be_one_token(name: str) -> None:
    """As those of decoders that follow an encoder: what was changed through ``.data`` before it counts."""
    model = make(name)
    with accelerate(model, weights="int8"), torch.no_grad():
        model(tokens(count=1))
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.data *= -4
        ours = model(tokens(count=1)).logits
    with torch.no_grad():
        expected = model(tokens(count=1)).logits
    assert (ours - expected).abs().mean() < 0.1 * expected.abs().mean()


def test_a_layer_whose_weights_are_of_several_dtypes_runs_its_own_code() -> None:
    model = make("llama")
    with accelerate(model) as handle:
        model.model.layers[1].self_attn.q_proj.to(torch.float64)
        assert handle.layers == ["model.layers.0"]
        with pytest.raises(RuntimeError, match="dtype"):
            logits(model)


def test_a_bias_of_one_element_is_for_all_also_where_it_comes_later() -> None:
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
        assert_as_plain(model)


_NORMS = ["model.norm", "model.layers.1.self_attn.k_norm", "model.layers.1.post_attention_layernorm"]


@pytest.mark.parametrize("name", _NORMS)
def test_a_norm_with_one_number_multiplies_all_by_it(name: str) -> None:
    model = make("exaone4")
    norm = model.get_submodule(name)
    its_own, for_all = norm.weight, nn.Parameter(torch.full((1,), 1.5))
    with accelerate(model):
        norm.weight = for_all
        assert_as_plain(model)
        norm.weight = its_own
        assert_as_plain(model)
    norm.weight = for_all
    with accelerate(model):
        assert_as_plain(model)


def test_a_norm_of_another_size_is_the_models_error() -> None:
    """The op would take it: it has as many numbers as all heads, which OLMo's norms as one."""
    model = make("exaone4")
    with accelerate(model) as handle:
        norm = model.model.layers[1].self_attn.q_norm
        norm.weight = nn.Parameter(torch.ones(32))
        with pytest.raises(RuntimeError, match="must match the size of tensor"):
            logits(model)
        assert handle.layers == ["model.layers.0"]


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
        assert not any(vars(module).keys() & _PUT_ON for module in other.modules())
        with accelerate(other):
            assert_as_plain(other)


_PUT_ON = {"forward", "_ds_plugin_replacement", "__getstate__", "_replicate_for_data_parallel"}


def test_replicas_of_data_parallel_compute_with_their_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """`nn.DataParallel`, which transformers' Trainer uses where there are two GPUs, copies modules' dictionaries."""

    def on_devices(tensors: list[torch.Tensor], devices: list[int], detach: bool = False) -> list[list[torch.Tensor]]:
        scales = [1 + device if all(isinstance(each, nn.Parameter) for each in tensors) else 1 for device in devices]
        return [[scale * tensor for tensor in tensors] for scale in scales]

    replicate = sys.modules["torch.nn.parallel.replicate"]
    monkeypatch.setattr(replicate, "_broadcast_coalesced_reshape", on_devices)
    model = make("llama")
    doubled = copy.deepcopy(model)
    doubled.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    expected = logits(model)
    with accelerate(model, loss="chunked"):
        first, second = nn.parallel.replicate(model, [0, 1], detach=True)
        torch.testing.assert_close(logits(first), expected)
        torch.testing.assert_close(logits(second), logits(doubled))
        assert_as_plain(model)


def test_a_shallow_copy_is_a_plain_module() -> None:
    model = make("llama")
    with accelerate(model):
        for name in ("lm_head", "model.norm", "model.layers.0"):
            assert not vars(copy.copy(model.get_submodule(name))).keys() & _PUT_ON


def test_an_old_handle_takes_nothing_of_a_newer_one() -> None:
    model = make("llama")
    old = accelerate(model)
    for module in model.modules():
        vars(module).pop("forward", None)
    with accelerate(model):
        old.remove()
        assert not vars(copy.copy(model.lm_head)).keys() & _PUT_ON
        assert vars(model.lm_head).keys() >= _PUT_ON


def test_threads_give_modules_of_a_class_the_same_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two functions one would not be known for ours, and its layers would stay the model's own code."""

    def own(module: nn.Module) -> None:
        pass

    monkeypatch.setattr(inspect, "signature", _slowly(inspect.signature))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(replacement._forward_like, (own, own))
    assert first is second


def _slowly(function: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*args: Any) -> Any:
        time.sleep(0.05)
        return function(*args)

    return slow


def test_a_forward_without_a_signature_is_no_error() -> None:
    with pytest.raises(ValueError, match="signature"):
        inspect.signature(vars)
    assert replacement._forward_like(vars).__name__ == "vars"


def test_copies_of_what_a_module_has_are_of_plain_modules() -> None:
    """As torch copies modules with parametrizations, without asking them for their state."""
    model = make("llama")
    with accelerate(model):
        nn.utils.parametrize.register_parametrization(model.lm_head, "weight", nn.Identity())
        copied = copy.deepcopy(model)
    with accelerate(copied) as handle:
        assert len(handle.layers) == 2
        assert_as_plain(copied)


def test_a_copy_of_a_module_that_is_wrapped_computes_by_its_class() -> None:
    """As hooks of accelerate wrap forwards."""
    model = make("llama")
    with accelerate(model):
        head = model.lm_head
        head.forward = functools.partial(head.forward)
        copied = copy.deepcopy(head)
        with torch.no_grad():
            copied.weight.zero_()
            assert not copied(torch.ones(2, copied.in_features)).any()
            assert head(torch.ones(2, copied.in_features)).any()
        del head.forward


def test_saved_and_loaded(tmp_path: Path) -> None:
    model = make("qwen2")
    with accelerate(model):
        expected = logits(model)
        model.save_pretrained(tmp_path)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with accelerate(other) as handle:
        assert len(handle.layers) == 2, str(handle)
        torch.testing.assert_close(logits(other), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_what_keeps_one_name_of_each_storage_saves_all_weights(name: str, tmp_path: Path) -> None:
    """Hugging Face's Accelerator leaves out what is in the same storage as another tensor, with a warning alone."""
    model = make(name)
    with accelerate(model):
        parameters = {key: value.clone() for key, value in model.state_dict(keep_vars=True).items()}
        storages = {value.untyped_storage().data_ptr() for value in model.parameters()}
        assert len(storages) == len({id(value) for value in model.parameters()})
        safetensors.torch.save_model(model, str(tmp_path / "whole.safetensors"))
    found = safetensors.torch.load_file(tmp_path / "whole.safetensors")
    assert len(found) >= len(storages)  # tied weights have one name
    assert all(torch.equal(found[key], parameters[key]) for key in found)


def test_a_call_with_weights_of_another_model() -> None:
    model, other = make("llama"), make("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    expected = logits(other)
    with accelerate(model) as handle, torch.no_grad():
        layers, before = handle.layers, logits(model)
        called = torch.func.functional_call(model, dict(other.named_parameters()), (tokens(),))
        torch.testing.assert_close(called.logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits(model), before) and handle.layers == layers


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


# In a process where nothing has registered our ops yet.
WEIGHTS_LATER = """
import torch, transformers
from ds_plugin_sdk.integrations.transformers import accelerate
with torch.device("meta"):
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=96, intermediate_size=48
    )
    model = transformers.LlamaForCausalLM(config).eval()
handle = accelerate(model)
model.to_empty(device="cpu")
model.init_weights()
with torch.no_grad():
    ours = model(torch.arange(9)[None]).logits
    handle.remove()
    torch.testing.assert_close(ours, model(torch.arange(9)[None]).logits, rtol=1e-3, atol=1e-3)
"""


def test_a_model_without_numbers_gets_them_later(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_PLUGIN_CACHE_DIR", str(kernel_cache))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WEIGHTS_LATER], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


_BERT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_layers_that_run_alone_go_on_in_another_dtype(weights: Any, dtype: torch.dtype) -> None:
    model = transformers.BertModel(transformers.BertConfig(**_BERT)).eval()
    with accelerate(model, weights) as handle:
        for _ in range(2):
            # Quantized weights are the op's for any number of inputs.
            for given in (tokens(1, 3), tokens(2, 40))[: 1 if weights is None else 2]:
                with CountedCalls() as counted:
                    model(given)
                assert counted.calls["linear"] == len(handle.linear)
            model.to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("change", ["assign", "data"])
def test_weights_of_layers_that_run_alone_are_packed_again(change: str) -> None:
    """By a call with many inputs too, which torch multiplies: the memory of the weights before is free then."""
    model = transformers.BertModel(transformers.BertConfig(**_BERT)).eval()
    layer = model.encoder.layer[0].output.dense
    with accelerate(model):
        if change == "assign":
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        else:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        moved = layer.weight.data_ptr()
        expected = copy.deepcopy(model)(tokens(2, 40)).last_hidden_state
        torch.testing.assert_close(model(tokens(2, 40)).last_hidden_state, expected, rtol=1e-4, atol=1e-5)
        assert layer.weight.data_ptr() != moved


def test_weights_given_back_in_inference_mode_can_be_trained() -> None:
    model = make("llama")
    with torch.inference_mode(), accelerate(model):
        logits(model)
    assert not any(parameter.is_inference() for parameter in model.parameters())
    model(tokens()).logits.sum().backward()
