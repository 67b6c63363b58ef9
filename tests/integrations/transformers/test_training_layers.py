"""Norms, activations and rotary embeddings of transformers' models in training: the plain model's gradients, sooner."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")
    import transformers
    from transformers.activations import GELUTanh
    from transformers.models.llama import modeling_llama

from ds_plugin_sdk.integrations.transformers import accelerate

fused: Any = importlib.import_module("ds_plugin_sdk.nn._fused")

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 160}
_LLAMA = {**_SIZES, "intermediate_size": 96, "num_key_value_heads": 2, "initializer_range": 0.1}
_NO_DROPOUT = {"resid_pdrop": 0, "attn_pdrop": 0, "embd_pdrop": 0}
NORM, GELU, GATE, TURN = "add_rms_norm", "fused_bias_gelu", "activation_and_mul", "rotary"
LLAMAS_CALLS = {NORM: 5, GATE: 2, TURN: 4}

# Families -> a small model, and how often each op is called in a pass.
MODELS: dict[str, tuple[Callable[[], transformers.PreTrainedConfig], dict[str, int]]] = {
    "llama": (lambda: transformers.LlamaConfig(**_LLAMA), LLAMAS_CALLS),
    "mistral": (lambda: transformers.MistralConfig(**_LLAMA, sliding_window=8), LLAMAS_CALLS),
    "qwen2": (lambda: transformers.Qwen2Config(**_LLAMA), LLAMAS_CALLS),
    "qwen3": (lambda: transformers.Qwen3Config(**_LLAMA, head_dim=16), {**LLAMAS_CALLS, NORM: 9}),
    "granite": (lambda: transformers.GraniteConfig(**_LLAMA), LLAMAS_CALLS),
    "olmo2": (lambda: transformers.Olmo2Config(**_LLAMA), {GATE: 2}),
    "gemma": (lambda: transformers.GemmaConfig(**_LLAMA, head_dim=16), {GATE: 2, TURN: 4}),
    "gpt2": (
        lambda: transformers.GPT2Config(
            n_embd=64, n_layer=2, n_head=4, vocab_size=160, bos_token_id=1, eos_token_id=2, **_NO_DROPOUT
        ),
        {GELU: 2},
    ),
    "gptj": (
        lambda: transformers.GPTJConfig(
            n_embd=64, n_layer=2, n_head=4, vocab_size=160, rotary_dim=8, bos_token_id=1, eos_token_id=2, **_NO_DROPOUT
        ),
        {GELU: 2},
    ),
    "starcoder2": (
        lambda: transformers.Starcoder2Config(**_LLAMA, embedding_dropout=0, residual_dropout=0, attention_dropout=0),
        {GELU: 2, TURN: 4},
    ),
    "opt": (lambda: transformers.OPTConfig(**_SIZES, ffn_dim=96, word_embed_proj_dim=64, dropout=0), {}),
}
PADDED = torch.tensor([[1] * 20, [0] * 6 + [1] * 14, [0] * 11 + [1] * 9])

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is:FutureWarning"),  # all releases have it
]


@pytest.fixture(scope="module", autouse=True)
def kernels(native: Callable[..., None]) -> None:
    native("linear", "attention", "norm", "rotary", "decoder_layer", "transformer", "cross_entropy")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each op was called in training; no call is too small."""
    monkeypatch.setattr(fused, "_LEAST", 0)
    seen: Counter[str] = Counter()
    original = fused.Fused.call

    def call(self: Any, *tensors: Tensor, **options: Any) -> Tensor:
        seen[self.op] += 1
        return original(self, *tensors, **options)

    monkeypatch.setattr(fused.Fused, "call", call)
    return seen


def make(name: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = MODELS[name][0]()
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def batch(**more: Any) -> dict[str, Any]:
    ids = torch.randint(3, 160, (3, 20), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids, **more}


def gradients(model: Any, **more: Any) -> list[Tensor]:
    output = model(**batch(**more))
    found = torch.autograd.grad(output.loss, list(model.parameters()), allow_unused=True)
    return [torch.zeros(1, dtype=torch.float64) if each is None else each.double() for each in found]


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """The norm of what is wrong in proportion to that of what is right, over all parameters."""
    wrong = torch.cat([(a - b).flatten() for a, b in zip(found, exact, strict=True)])
    return float(wrong.norm() / torch.cat([each.flatten() for each in exact]).norm())


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", [None, PADDED], ids=["causal", "padded"])
def test_gradients_are_as_exact_as_the_plain_models(
    name: str, dtype: torch.dtype, mask: Tensor | None, calls: Counter[str]
) -> None:
    model = make(name, dtype)
    exact = make(name, torch.float64)
    exact.load_state_dict(model.state_dict())
    expected = gradients(exact, attention_mask=mask)
    plain = gradients(model, attention_mask=mask)
    assert not calls
    with accelerate(model):
        ours = gradients(model, attention_mask=mask)
        assert calls == MODELS[name][1]
        # bfloat16 multiplies in float32 where a CPU is slow at it; float32's errors are near the last digit.
        assert error(ours, expected) < 1.2 * error(plain, expected) + 2e-7
        assert error(plain, expected) < (1e-5 if dtype == torch.float32 else 0.1)
    assert not any("forward" in vars(module) for module in model.modules())
    calls.clear()
    assert equal(gradients(model, attention_mask=mask), plain) and not calls


def test_less_is_kept_for_the_backward_pass(calls: Counter[str]) -> None:
    """Of a norm no copy in float32; of a feed-forward layer not the activation; of a formula for GELU its input."""

    def kept(model: Any) -> int:
        own = {each.untyped_storage().data_ptr() for each in model.parameters()}
        memory: dict[int, Any] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            memory[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.base_model(input_ids=batch()["input_ids"], use_cache=False)
        return sum(storage.nbytes() for address, storage in memory.items() if address not in own)

    for name, dtype, share in (
        ("llama", torch.bfloat16, 0.78),
        ("llama", torch.float32, 0.87),
        ("gpt2", torch.float32, 0.7),
    ):
        model = make(name, dtype)
        plain = kept(model)
        with accelerate(model):
            assert kept(model) < share * plain, name


def test_inference_is_what_it_was_before_and_after_a_step(calls: Counter[str]) -> None:
    model = make().eval()
    with accelerate(model) as handle:
        with torch.no_grad():
            before = model(**batch()).logits
        assert len(handle.layers) == 2 and not calls
        gradients(model.train())
        assert calls == LLAMAS_CALLS
        assert len(handle.layers) == 2  # they generate in this mode, too: nothing is dropped
        model.model.layers[1].self_attn.attention_dropout = 0.1
        assert handle.left == {"model.layers.1": "LlamaDecoderLayer: it is in training mode"}
        model.model.layers[1].self_attn.attention_dropout = 0.0
        with torch.no_grad():
            assert torch.equal(model.eval()(**batch()).logits, before)
        assert len(handle.layers) == 2 and calls == LLAMAS_CALLS


def test_the_report_names_what_runs_in_training(calls: Counter[str]) -> None:
    handle = accelerate(make())
    layers = [
        f"model.layers.{index}.{name}"
        for index in range(2)
        for name in ("input_layernorm", "mlp", "post_attention_layernorm", "self_attn")
    ]
    assert handle.training == sorted([*layers, "model.norm"])
    assert "in training      9  model.layers.{0-1}.input_layernorm, " in str(handle)
    assert accelerate(make("gpt2")).training == ["transformer.h.0.mlp.act", "transformer.h.1.mlp.act"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_computes_the_same_again(reentrant: bool, calls: Counter[str]) -> None:
    model = make()
    with accelerate(model):
        expected = gradients(model)
        calls.clear()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model(**batch()).loss.backward()
        assert calls == {NORM: 2 * 4 + 1, GATE: 2 * 2, TURN: 2 * 4}  # all but the last norm, a second time
        assert equal([each.grad.double() for each in model.parameters()], expected)


@pytest.mark.parametrize("name", ["gptj", "mixtral"])
def test_quantized_weights_are_not_what_checkpointing_first_multiplies(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gradients, but in training mode: the second time layers run by their own code."""
    mixtral = (lambda: transformers.MixtralConfig(**_LLAMA, num_local_experts=4), {})
    monkeypatch.setitem(MODELS, "mixtral", mixtral)
    model = make(name)
    expected = gradients(model)
    with accelerate(model, weights="int8") as handle:
        assert not handle.linear and not handle.experts
        assert "it is in training mode" in str(handle.left)
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
        model(**batch()).loss.backward()
        assert error([each.grad.double() for each in model.parameters()], expected) < 1e-5
        model.eval()
        assert handle.linear if name == "gptj" else handle.experts


COUNTING = """
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb
from torch.nn.functional import scaled_dot_product_attention

CALLS = 0

class Counting(LlamaAttention):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        global CALLS
        CALLS += 1
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        parts = (part(hidden_states) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (each.view(shape).transpose(1, 2) for each in parts)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2)), None
"""


def test_what_an_attention_writes_to_a_global_variable_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counting.py").write_text(COUNTING, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    counting = importlib.import_module("counting")
    model = make()
    for layer in model.model.layers:
        layer.self_attn.__class__ = counting.Counting
    with accelerate(model):
        model(**batch()).loss.backward()
    assert len(model.model.layers) == counting.CALLS


def test_gradients_of_gradients_are_the_plain_models(calls: Counter[str]) -> None:
    """As penalties of a gradient's size want them; attention that can be derived twice is eager."""
    model = make()
    model.set_attn_implementation("eager")

    def penalty() -> list[Tensor]:
        parameters = list(model.parameters())
        first = torch.autograd.grad(model(**batch()).loss, parameters, create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), parameters)
        return [each.double() for each in second]

    plain = penalty()
    with accelerate(model):
        assert error(penalty(), plain) < 1e-5
    assert calls == LLAMAS_CALLS


def test_hooks_are_called(calls: Counter[str]) -> None:
    model = make()
    seen: list[str] = []
    with accelerate(model):
        layer = model.model.layers[0]
        for name in ("input_layernorm", "self_attn", "mlp", "mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj"):
            layer.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
        gradients(model)
        assert Counter(seen) == dict.fromkeys(
            ("input_layernorm", "self_attn", "mlp", "mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj"), 1
        )
        assert calls == LLAMAS_CALLS
        layer.mlp.act_fn.register_forward_hook(lambda *_: seen.append("act_fn"))
        gradients(model)
        assert seen.count("act_fn") == 1 and calls[GATE] == 3


def test_what_is_changed_after_accelerate_is_obeyed(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = make(), make()
    with accelerate(model):
        for each in (model, plain):
            each.model.layers[0].mlp.act_fn = nn.ReLU()
            each.model.layers[1].input_layernorm.variance_epsilon = 0.5
            each.model.layers[1].mlp.act_fn.forward = torch.sin
        assert error(gradients(model), gradients(plain)) < 1e-5
        assert calls == {NORM: 5, TURN: 4}
        calls.clear()
        seen: list[torch.Size] = []
        own = modeling_llama.apply_rotary_pos_emb
        monkeypatch.setattr(
            modeling_llama,
            "apply_rotary_pos_emb",
            lambda q, *rest, **more: seen.append(q.shape) or own(q, *rest, **more),
        )
        gradients(model)
        assert len(seen) == 2 and calls == {NORM: 5}
        monkeypatch.undo()


def test_another_forward_of_its_class_is_called(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As kernels from the hub, and other accelerators of models, put it there."""
    model = make()
    with accelerate(model):
        for kind in (modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP):
            monkeypatch.setattr(kind, "forward", lambda module, x: 2 * x)
        gradients(model)
        assert calls == {TURN: 4}
    assert accelerate(model).training == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "rotate_half"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_another_function_in_the_file_is_called(
    name: str, before: bool, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As other accelerators of models put it there, before accelerate() or after."""
    own = getattr(modeling_llama, name)

    def patched(*args: Any, **more: Any) -> Any:
        result = own(*args, **more)
        return (result[0] * 0.5, result[1]) if isinstance(result, tuple) else result * 0.5

    model = make()
    if before:
        monkeypatch.setattr(modeling_llama, name, patched)
    with accelerate(model) as handle:
        assert any("self_attn" in each for each in handle.training) is not before
        monkeypatch.setattr(modeling_llama, name, patched)
        ours = gradients(model)
    assert calls == {NORM: 5, GATE: 2}
    assert error(ours, gradients(model)) < 1e-5


def test_another_silu_of_torchs_is_called(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    with accelerate(model):
        monkeypatch.setattr(nn.functional, "silu", lambda x: x * 0.5)
        ours = gradients(model)
    assert calls == {NORM: 5, TURN: 4}
    assert error(ours, gradients(model)) < 1e-5


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(("name", "op"), [("gemma", GATE), ("starcoder2", GELU)])
def test_another_function_of_an_activation_is_called(name: str, op: str, before: bool, calls: Counter[str]) -> None:
    model = make(name)
    first, _ = (module for module in model.modules() if isinstance(module, GELUTanh))
    handle = None if before else accelerate(model)
    first.act = torch.relu
    with handle or accelerate(model):
        ours = gradients(model)
    assert calls[op] == 1
    assert error(ours, gradients(model)) < 1e-5


def test_tensors_of_inference_mode_and_of_no_device(calls: Counter[str]) -> None:
    """Frozen encoders run in inference mode; models without memory are made to count parameters."""
    model = make()
    with torch.inference_mode():
        given = model.get_input_embeddings()(batch()["input_ids"])
    parameters = list(model.model.layers.parameters())

    def found() -> list[Tensor]:
        loss = model(inputs_embeds=given, labels=batch()["labels"]).loss
        return [each.double() for each in torch.autograd.grad(loss, parameters)]

    plain = found()
    with accelerate(model):
        assert error(found(), plain) < 1e-5
        assert calls[NORM] == 4  # all but the first one
    meta = make().to("meta")
    with accelerate(meta):
        assert meta(input_ids=batch()["input_ids"].to("meta")).logits.is_meta


def test_layers_that_share_a_norm_and_hooks_of_parameters_are_derived_once(calls: Counter[str]) -> None:
    def penalty(model: Any) -> list[Tensor]:
        parameters = list(model.parameters())
        first = torch.autograd.grad(model(**batch()).loss, parameters, create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), parameters)
        return [each.detach().double() for each in (*first, *second)]

    def prepared() -> Any:
        model = make()
        model.set_attn_implementation("eager")
        model.model.layers[1].input_layernorm = model.model.layers[0].input_layernorm
        for each in model.parameters():
            each.register_hook(lambda grad: grad * 0.5)
        return model

    plain, model = penalty(prepared()), prepared()
    with accelerate(model):
        assert error(penalty(model), plain) < 1e-5
    assert calls == LLAMAS_CALLS


@pytest.mark.filterwarnings("ignore:For backward hooks to be called:UserWarning")  # some give no tensors
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # of embeddings, which have no gradient
def test_hooks_of_all_modules_are_called(calls: Counter[str]) -> None:
    seen: list[str] = []
    model = make()
    handle = nn.modules.module.register_module_full_backward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        gradients(model)
        expected = Counter(seen)
        seen.clear()
        with accelerate(model):
            gradients(model)
    finally:
        handle.remove()
    assert Counter(seen) == expected and expected["SiLUActivation"] == 2


def test_pairs_whose_elements_have_other_angles_are_for_the_models_own_code(calls: Counter[str]) -> None:
    class Uneven(nn.Module):
        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            angles = position_ids.unsqueeze(-1) * torch.arange(1, 17) / 20
            return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    model = make()
    model.model.rotary_emb = Uneven()
    plain = gradients(model)
    with accelerate(model):
        assert error(gradients(model), plain) < 1e-5
    assert calls == {NORM: 5, GATE: 2}


def test_angles_that_are_changed_in_place_count(calls: Counter[str]) -> None:
    class Kept(nn.Module):
        """Gives the same tensors each time."""

        def __init__(self) -> None:
            super().__init__()
            angles = torch.cat([torch.arange(20.0).unsqueeze(-1) * torch.arange(1, 9) / 20] * 2, dim=-1)[None]
            self.both = angles.cos(), angles.sin()

        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            return self.both

    model = make()
    model.model.rotary_emb = Kept()
    with accelerate(model) as handle:
        gradients(model)
        model.model.rotary_emb.both[0].mul_(0.5)
        ours = gradients(model)
        assert calls[TURN] == 8
        handle.remove()
        assert error(ours, gradients(model)) < 1e-5


def test_autocast(calls: Counter[str]) -> None:
    for name in ("llama", "gpt2"):
        model, exact = make(name), make(name, torch.float64)
        exact.load_state_dict(model.state_dict())
        with torch.autocast("cpu", torch.bfloat16):
            plain = gradients(model)
        expected = gradients(exact)
        with accelerate(model), torch.autocast("cpu", torch.bfloat16):
            ours = gradients(model)
        assert error(ours, expected) < 1.1 * error(plain, expected)
    assert calls[GATE] == 2 and not calls[GELU]


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_torchs_default_dtype_is_not_that_of_masks(default: torch.dtype) -> None:
    model = make("llama", torch.bfloat16)
    plain = gradients(model, attention_mask=PADDED)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with accelerate(model):
            ours = gradients(model, attention_mask=PADDED)
    finally:
        torch.set_default_dtype(before)
    assert error(ours, plain) < 0.1


def test_a_compiled_model_is_one_graph_of_torchs(calls: Counter[str]) -> None:
    model = make()
    with accelerate(model):
        compiled = torch.compile(model.model, backend="eager", fullgraph=True)
        assert compiled(batch()["input_ids"]).last_hidden_state.shape == (3, 20, 64)
    assert not calls


@pytest.mark.parametrize("name", ["mlp", "input_layernorm", "mlp.act_fn"])
def test_parts_are_exported_as_torchs(name: str, calls: Counter[str]) -> None:
    model = make()
    part, x = model.model.layers[0].get_submodule(name), torch.randn(2, 5, 64)
    expected = part(x)
    with accelerate(model):
        exported = torch.export.export(part, (x,)).module()
        torch.testing.assert_close(exported(x), expected)
        assert [*inspect.signature(part.forward).parameters] == [*inspect.signature(type(part).forward).parameters][1:]
    assert not calls


def test_adapters_and_frozen_weights(calls: Counter[str]) -> None:
    """What is not trained gets no gradient; a layer of another class computes what it computes."""
    model, plain = make(), make()
    for each in (model, plain):
        each.requires_grad_(False)
        each.model.layers[0].mlp.gate_proj.requires_grad_(True)
        each.model.layers[1].input_layernorm.requires_grad_(True)
    with accelerate(model):
        for each in (model, plain):
            each(**batch()).loss.backward()
        found, expected = ([p.grad for p in each.parameters() if p.grad is not None] for each in (model, plain))
        torch.testing.assert_close(found, expected)
        assert len(found) == 2 and calls == LLAMAS_CALLS


def test_small_calls_are_the_models_own(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = make()
    plain = gradients(model)
    with accelerate(model):
        assert equal(gradients(model), plain)
