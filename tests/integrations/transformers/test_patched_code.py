"""Code that others have put into the place of transformers' and torch's runs, whenever they did so."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from small_models import halved, logits, make
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from counted_calls import CountedCalls

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")
    import transformers
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
    from transformers.models.gemma import modeling_gemma as gemma
    from transformers.models.gpt2 import modeling_gpt2 as gpt2
    from transformers.models.llama import modeling_llama as llama

from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.integrations.transformers import accelerate

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(halved(function))


def of_the_same_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """As a function of somebody's own file is."""
    half = halved(function)
    half.__name__, half.__qualname__ = function.__name__, function.__qualname__
    return half


def compared(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a new model by its own code, and accelerated."""
    model = make(name)
    expected = logits(model)
    with accelerate(model):
        return logits(model), expected


PATCHED = {
    "layer": (llama.LlamaDecoderLayer, "forward"),
    "attention": (llama.LlamaAttention, "forward"),
    "mlp": (llama.LlamaMLP, "forward"),
    "norm": (llama.LlamaRMSNorm, "forward"),
    "linear": (nn.Linear, "forward"),
    "calls of linear": (nn.Linear, "__call__"),
    "rotary embedding": (llama, "apply_rotary_pos_emb"),
    "half of it": (llama, "rotate_half"),
    "torch's linear": (functional, "linear"),
    "torch's silu": (functional, "silu"),
    "torch's attention": (functional, "scaled_dot_product_attention"),
}


@pytest.mark.parametrize("name", ["gpt2", "seed_oss", "starcoder2"])
def test_another_dropout_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that drops in inference too, for instance, to see how sure a model is."""
    model = make(name)
    with accelerate(model):
        before = logits(model)
        dropout = functional.dropout
        monkeypatch.setattr(functional, "dropout", lambda *args, **options: torch.tanh(dropout(*args, **options)))
        after, (ours, expected) = logits(model), compared(name)
    torch.testing.assert_close(after, expected)
    torch.testing.assert_close(ours, expected)
    assert not torch.allclose(before, expected, atol=1e-2)


class HalvedCall:
    """No function, and called as one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._half = halved(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._half(*args, **kwargs)


PATCHES = [
    *itertools.product(PATCHED, [halved, wrapped, of_the_same_name]),
    *((part, HalvedCall) for part, (owner, _) in PATCHED.items() if not isinstance(owner, type)),  # which is no method
]


@pytest.mark.parametrize(("part", "patch"), PATCHES)
def test_patched_code_runs(part: str, patch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Patched before a model is accelerated, also where another one was before that; and after."""
    owner, name = PATCHED[part]
    before, model = logits(make("llama")), make("llama")
    with accelerate(model):
        logits(model)
        monkeypatch.setattr(owner, name, patch(getattr(owner, name)))
        after = logits(model)
    ours, expected = compared("llama")
    assert not torch.allclose(expected, before, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(after, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


def blind(*args: Any, **kwargs: Any) -> Any:
    mask = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
    assert mask is not None
    mask = mask.clone()
    mask[..., 1:2] = False
    return mask


def test_a_mask_registered_for_sdpa_is_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    without = logits(model)
    with accelerate(model):
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sdpa", blind)
        given = logits(model)
    expected = logits(model)
    assert (expected - without).abs().max() > 1e-3
    assert (given - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["llama", "smollm3"])  # of which one layer turns nothing
def test_angles_that_differ_within_pairs_are_the_models(name: str) -> None:
    """Such as those of a hook that turns a part of each head."""

    def front_alone(module: nn.Module, args: Any, angles: Any) -> Any:
        cos, sin = (each.clone() for each in angles)
        cos[..., 2:], sin[..., 2:] = 1, 0
        return cos, sin

    model: Any = make(name)
    without = logits(model)
    model.model.rotary_emb.register_forward_hook(front_alone)
    expected = logits(model)
    assert (expected - without).abs().max() > 1e-3
    with accelerate(model):
        assert (logits(model) - expected).abs().max() < 1e-4


def test_who_holds_a_forward_calls_the_modules_own_code_after_remove() -> None:
    """As hooks of accelerate's do, which later put back what they have found."""
    model: Any = make("llama")
    expected = logits(model)
    handle = accelerate(model, weights="int8")
    head, held = model.lm_head, model.lm_head.forward
    head.forward = functools.partial(held)
    handle.remove()
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    head.forward = held
    with accelerate(model) as handle:
        assert "lm_head" not in handle.left
        torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3)


def test_the_report_names_the_function_that_is_not_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "silu", halved(functional.silu))
    with accelerate(make("llama")) as handle:
        assert "torch.nn.functional has another silu than torch's own" in str(handle)


def test_an_op_by_op_layer_sees_it_between_two_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step, all of whose layers are asked at once."""
    model, found = make("llama"), []
    for accelerated in (False, True):
        handle = accelerate(model) if accelerated else None
        cache = transformers.DynamicCache()
        logits(model, past_key_values=cache)
        with torch.no_grad(), monkeypatch.context() as patch:
            for step in range(4):
                if step == 3:
                    patch.setattr(llama, "rotate_half", halved(llama.rotate_half))
                found.append(model(torch.tensor([[5], [7]]), past_key_values=cache).logits)
        if handle is not None:
            handle.remove()
    torch.testing.assert_close(found[4:], found[:4], rtol=1e-3, atol=1e-3)


@contextmanager
def registered(attention: Callable[..., Any]) -> Iterator[None]:
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("sdpa", attention)
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", own)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3"])
def test_another_attention_by_torchs_name(name: str) -> None:
    attention = halved(ALL_ATTENTION_FUNCTIONS["sdpa"])
    model = make(name)
    with accelerate(model):
        with registered(attention):
            after = logits(model)
            ours, expected = compared(name)
            other = make(name)
            with accelerate(other) as handle:
                assert handle.attention == []
        again = logits(model)
    torch.testing.assert_close(after, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(again, logits(make(name)), rtol=1e-3, atol=1e-3)


NUMBERS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "eps of a norm in a layer": ("llama", lambda m: m.model.layers[1].input_layernorm, "variance_epsilon"),
    "eps of a norm alone": ("llama", lambda m: m.model.norm, "variance_epsilon"),
    "eps of torch's norm": ("gpt2", lambda m: m.transformer.h[0].ln_2, "eps"),
    "scale of scores": ("llama", lambda m: m.model.layers[0].self_attn, "scaling"),
    "scale of GPT-2's": ("gpt2", lambda m: m.transformer.h[1].attn, "scaling"),
    "place of norms": ("opt", lambda m: m.model.decoder.layers[0], "do_layer_norm_before"),
}


@pytest.mark.parametrize("what", NUMBERS)
def test_numbers_that_a_models_code_reads_are_read(what: str) -> None:
    name, part_of, attribute = NUMBERS[what]
    model, plain = make(name), make(name)
    with accelerate(model) as handle:
        before, whole = logits(model), handle.layers
        for each in (model, plain):
            part = part_of(each)
            old = getattr(part, attribute)
            setattr(part, attribute, not old if isinstance(old, bool) else 3 * old + 0.3)
        ours = logits(model)
        if whole:  # transformers 5.0.0 has other layers of GPT-2 and OPT, which do not run whole
            assert "changed after accelerate()" in str(handle)
    assert not torch.allclose(before, logits(plain), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours, logits(plain), rtol=1e-3, atol=1e-3)


def _of_all(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = gemma.GemmaRMSNorm._norm
    monkeypatch.setattr(gemma.GemmaRMSNorm, "_norm", lambda self, x: norm(self, x) / 2)


def _of_one(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.model.layers[1].input_layernorm._norm = lambda x: x / 2


def _function(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.model.layers[0].mlp.act_fn.act = torch.relu


@pytest.mark.parametrize("change", [_of_all, _of_one, _function])
def test_methods_and_functions_of_instances(change: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.GemmaConfig(**{**make("llama").config.to_diff_dict(), "head_dim": 8, "model_type": "gemma"})
    config.hidden_act = "gelu_pytorch_tanh"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with accelerate(model) as handle:
        assert len(handle.layers) == 2
        before = logits(model)
        change(model, monkeypatch)
        ours = logits(model)
    with accelerate(model):
        changed_before = logits(model)
    expected = logits(model)
    assert not torch.allclose(before, expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(changed_before, expected, rtol=1e-3, atol=1e-3)


def test_a_step_after_one_that_failed_asks_again() -> None:
    """Given the very tensor that the failed one was given."""
    model = make("llama")
    hidden = model.model.embed_tokens(torch.tensor([[5], [7]])).detach()

    def after_a_failure() -> torch.Tensor:
        good, other = transformers.DynamicCache(), transformers.DynamicCache()
        with torch.no_grad():
            logits(model, past_key_values=good)
            model(torch.tensor([[3, 4, 5]]), past_key_values=other)
            for _ in range(2):
                model(inputs_embeds=hidden, past_key_values=good)
            with pytest.raises((RuntimeError, SdkError)):
                model(inputs_embeds=hidden, past_key_values=other)
            for layer in model.model.layers:
                layer.input_layernorm.variance_epsilon = 3.0
            result: torch.Tensor = model(inputs_embeds=hidden, past_key_values=good).logits
        return result

    epsilon = model.model.layers[0].input_layernorm.variance_epsilon
    expected = after_a_failure()
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = epsilon
    with accelerate(model):
        torch.testing.assert_close(after_a_failure(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("everywhere", [False, True], ids=["one", "all"])
def test_another_call_of_a_modules_forward_is_seen(everywhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, original = make("llama"), nn.Module._call_impl

    def halved_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return result / 2 if isinstance(self, llama.LlamaMLP) else result

    with accelerate(model):
        if everywhere:
            monkeypatch.setattr(nn.Module, "_call_impl", halved_call)
        else:
            mlp = model.model.layers[1].mlp
            mlp._call_impl = functools.partial(halved_call, mlp)
        ours = logits(model)
    torch.testing.assert_close(ours, logits(model), rtol=1e-3, atol=1e-3)


def test_an_activation_that_is_a_function_leaves_its_layer_alone() -> None:
    """As in code of models that were written elsewhere."""
    model = make("llama")
    layer = model.model.layers[1]
    del layer.mlp.act_fn
    layer.mlp.act_fn = functional.silu
    plain = logits(model)
    with accelerate(model) as handle:
        assert handle.layers == ["model.layers.0"]
        torch.testing.assert_close(logits(model), plain, rtol=1e-3, atol=1e-3)


def test_after_an_error_the_model_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_plugin_sdk.integrations.transformers import weights

    model = make("gpt2")

    def fail(self: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(weights.Packer, "pack", fail)
    with pytest.raises(MemoryError):
        accelerate(model)
    assert model.config._attn_implementation == "sdpa"
    assert not any("forward" in vars(module) for module in model.modules())
    assert type(model.transformer.h[0]) is gpt2.GPT2Block


@pytest.mark.parametrize("given", [lambda: nn.Sequential(make("llama")), lambda: "llama", lambda: nn.Linear(2, 2)])
def test_what_is_no_model_of_transformers_is_an_error(given: Callable[[], Any]) -> None:
    model = given()
    with pytest.raises(SdkError, match=r"accelerate\(\) cannot run a .*PreTrainedModel") as error:
        accelerate(model)
    assert ("get_submodule('0')" in str(error.value)) == isinstance(model, nn.Sequential)


class _HalvedFunctions(TorchFunctionMode):
    """Halves what torch's linear gives, as a mode that rounds it would change it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result / 2 if function in (functional.linear, torch.addmm) else result


class _HalvedOperators(TorchDispatchMode):
    """The same for the operators of torch that multiply."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        return result / 2 if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) else result


@pytest.mark.parametrize("mode", [_HalvedFunctions, _HalvedOperators])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_modes_that_put_something_else_in_the_place_of_torchs_functions(name: str, mode: Callable[[], Any]) -> None:
    """They know torch's, and none of our ops, so the model's own code runs."""
    model = make(name)
    with mode():
        expected = logits(model)
    accelerate(model)
    with mode():
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    with torch.device("cpu"), CountedCalls() as counted:  # that one is known: it concerns new tensors alone
        logits(model)
    assert counted.calls["linear"] > 0


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_flops_are_counted(name: str) -> None:
    model = make(name)
    with FlopCounterMode(display=False) as plain:
        logits(model)
    accelerate(model)
    with FlopCounterMode(display=False) as ours:
        logits(model)
    assert ours.get_total_flops() == plain.get_total_flops() > 0
