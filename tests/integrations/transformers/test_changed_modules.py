"""What is done to a model's modules counts, before and after `accelerate`: the same logits as the plain model."""

from __future__ import annotations

import copy
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import CONFIGS, LLAMA, assert_as_plain, logits, make, steps, tokens
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from counted_calls import CountedCalls

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")
    import transformers

from ds_plugin_sdk.integrations.transformers import accelerate
from ds_plugin_sdk.integrations.transformers.replacements import DecoderReplacement

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]


class Lora(nn.Module):
    """What adapters look like: a projection, and something added to its result."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        self.delta = nn.Linear(base.in_features, base.out_features, bias=False)

    @property
    def in_features(self) -> Any:
        return self.base_layer.in_features

    @property
    def out_features(self) -> Any:
        return self.base_layer.out_features

    @property
    def weight(self) -> Any:
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        return self.base_layer.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base_layer(input) + self.delta(input)
        return result


class Doubling(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Tagged(torch.Tensor):
    """A weight of another class than torch's, as quantized and distributed ones are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is nn.functional.linear else result


def add_lora(attention: Any) -> None:
    attention.q_proj = Lora(attention.q_proj)


def add_subclass(attention: Any) -> None:
    doubling = Doubling(32, attention.v_proj.out_features, bias=False)
    doubling.load_state_dict(attention.v_proj.state_dict())
    attention.v_proj = doubling


def add_hook(attention: Any) -> None:
    attention.q_proj.register_forward_hook(lambda module, args, output: 2 * output)


def add_pre_hook(attention: Any) -> None:
    attention.o_proj.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def add_hook_to_attention(attention: Any) -> None:
    attention.register_forward_hook(lambda module, args, output: (2 * output[0], *output[1:]))


def add_forward(attention: Any) -> None:
    own = attention.o_proj.forward
    attention.o_proj.forward = lambda input: 2 * own(input)


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def add_parametrization(attention: Any) -> None:
    nn.utils.parametrize.register_parametrization(attention.k_proj, "weight", Halved())


def add_weight_of_another_class(attention: Any) -> None:
    attention.v_proj.weight = nn.Parameter(attention.v_proj.weight.detach().clone().as_subclass(Tagged))


CHANGES = [
    add_lora,
    add_subclass,
    add_hook,
    add_pre_hook,
    add_hook_to_attention,
    add_forward,
    add_parametrization,
    add_weight_of_another_class,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_done_to_a_projection_counts(change: Callable[[Any], None], when: str) -> None:
    model, plain = make("llama"), make("llama")
    unchanged = logits(plain)
    torch.manual_seed(1)
    change(plain.model.layers[1].self_attn)
    expected = logits(plain)
    assert not torch.allclose(expected, unchanged, atol=0.05), "a change that changes nothing tests nothing"
    torch.manual_seed(1)
    if when == "before":
        change(model.model.layers[1].self_attn)
    with accelerate(model) as handle:
        if when == "after":
            change(model.model.layers[1].self_attn)
        torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3)
        assert handle.layers == ["model.layers.0"]
        assert "model.layers.1" in handle.left


def assign_weight(attention: Any) -> None:
    attention.o_proj.weight = nn.Parameter(2 * attention.o_proj.weight.detach())


def change_weight_in_place(attention: Any) -> None:
    with torch.no_grad():
        attention.o_proj.weight.mul_(2)


def give_weight_other_memory(attention: Any) -> None:
    attention.o_proj.weight.data = 2 * attention.o_proj.weight.data


def choose_another_attention(attention: Any) -> None:
    attention.config = copy.copy(attention.config)
    attention.config._attn_implementation = "eager"
    attention.scaling = attention.scaling / 4
    attention.q_proj.register_forward_hook(lambda module, args, output: 4 * output)
    attention.o_proj.register_forward_hook(lambda module, args, output: 2 * output)


LATE_CHANGES = [*CHANGES, assign_weight, change_weight_in_place, give_weight_other_memory, choose_another_attention]


@pytest.mark.parametrize("change", LATE_CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_what_is_done_between_two_tokens_counts(change: Callable[[Any], None], layer: int, weights: Any) -> None:
    expected, unchanged = steps(make("llama"), change, layer), steps(make("llama"), None)
    change_of_logits = float((expected - unchanged).abs().max())
    assert change_of_logits > 0.05, "a change that changes nothing tests nothing"
    tolerance = 1e-3 if weights is None else min(0.1 * float(unchanged.abs().max()), 0.6 * change_of_logits)
    model = make("llama")
    with accelerate(model, weights):
        torch.testing.assert_close(steps(model, change, layer), expected, rtol=1e-3, atol=tolerance)


@pytest.mark.parametrize("name", ["gpt2", "phi3"])
def test_another_module_in_the_place_of_dropout_counts(name: str) -> None:
    """One that was put there before, in eval mode, as tools that read or write what is inside a model do."""
    model = make(name)
    layer = model.transformer.h[1] if name == "gpt2" else model.model.layers[1]
    if name == "gpt2":
        layer.mlp.dropout = nn.Tanh().eval()
    else:
        layer.resid_mlp_dropout = nn.Tanh().eval()
    expected = steps(model, None)
    with accelerate(model) as handle:
        assert len(handle.layers) == 1
        torch.testing.assert_close(steps(model, None), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "phi3"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's attention has no rule for vmap either
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch.func's own
@torch.no_grad()
def test_vmap_and_forward_derivatives_are_the_models_own(name: str) -> None:
    model = make(name)
    plain = copy.deepcopy(model)
    embedded = torch.randn(2, 4, model.config.hidden_size)

    def logits_of(each: Any, rows: torch.Tensor) -> torch.Tensor:
        return each(inputs_embeds=rows[None], use_cache=False).logits[0]

    with accelerate(model), sdpa_kernel(SDPBackend.MATH):
        expected, found = (torch.func.vmap(lambda rows, m=m: logits_of(m, rows))(embedded) for m in (plain, model))
        torch.testing.assert_close(found, expected)
        tangents = []
        for each in (plain, model):
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(embedded[0], embedded[1])
                tangents.append(forward_ad.unpack_dual(logits_of(each, dual)).tangent)
        assert tangents[0] is not None
        torch.testing.assert_close(tangents[1], tangents[0])


def test_what_a_layers_hook_does_to_the_next_layer_counts() -> None:
    """As offloading does, which brings a layer's weights when the one before it runs."""

    def add_hook_that_changes_the_next(attention: Any) -> None:
        model.model.layers[0].register_forward_hook(lambda *_: assign_weight(model.model.layers[1].self_attn))

    model = make("llama")
    expected, unchanged = steps(model, add_hook_that_changes_the_next), steps(make("llama"), None)
    assert not torch.allclose(expected, unchanged, atol=0.05)
    model = make("llama")
    with accelerate(model):
        torch.testing.assert_close(steps(model, add_hook_that_changes_the_next), expected, rtol=1e-3, atol=1e-3)


def test_what_hooks_of_all_layers_do_in_place_counts() -> None:
    def run(model: Any) -> torch.Tensor:
        hooks: list[Any] = []
        cache = transformers.DynamicCache()
        found = [logits(model, past_key_values=cache)]
        with torch.no_grad():
            for step in range(7):
                if step == 3:
                    hooks += [layer.register_forward_hook(double) for layer in model.model.layers]
                found.append(model(tokens(count=1), past_key_values=cache).logits)
        for hook in hooks:
            hook.remove()
        return torch.cat(found, 1)

    def double(_: Any, __: Any, output: torch.Tensor) -> None:
        output.mul_(2)

    model = make("llama")
    expected = run(model)
    with accelerate(model):
        torch.testing.assert_close(run(model), expected, rtol=1e-3, atol=1e-3)


def test_what_somebody_elses_loop_does_between_layers_counts() -> None:
    model = make("llama")
    angles = model.model.rotary_emb(torch.zeros(1), torch.zeros(1, 1, dtype=torch.long))

    @torch.no_grad()
    def loop(weight: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(1, 1, 32)
        for layer in model.model.layers:
            hidden = layer(hidden, position_embeddings=angles)
            model.model.layers[1].self_attn.o_proj.weight.data = weight
        return hidden

    weight = model.model.layers[1].self_attn.o_proj.weight.detach().clone()
    unchanged, expected = loop(weight), loop(2 * weight)
    assert not torch.allclose(expected, unchanged, atol=0.05)
    with accelerate(model):
        for factor, plain in ((1, unchanged), (2, expected), (1, unchanged)):
            torch.testing.assert_close(loop(factor * weight), plain, rtol=1e-3, atol=1e-3)


def test_a_step_asks_all_layers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked one by one, between kernels that read all weights, the questions take several times as long."""
    asked = []

    def count(*_: Any) -> None:
        holds = DecoderReplacement.holds_apart
        monkeypatch.setattr(
            DecoderReplacement, "holds_apart", lambda *args, **kwargs: asked.append(1) or holds(*args, **kwargs)
        )

    model = make("llama")
    with accelerate(model), CountedCalls() as counted:
        steps(model, count)
    assert not asked
    assert counted.calls["cached_attention"] == 2 * 4


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for a name that is replaced
@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_of_peft(when: str) -> None:
    peft = pytest.importorskip("peft", reason="peft comes with the extra `test`")
    torch.manual_seed(0)
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = make("llama")
    unchanged = logits(model)
    handle = accelerate(model) if when == "after" else None
    adapted = peft.get_peft_model(model, options).eval()
    handle = accelerate(model) if handle is None else handle
    ours = logits(adapted)
    assert handle.layers == []
    assert all("peft.tuners.lora" in why or "changed after" in why for why in handle.left.values()), str(handle)
    assert not torch.allclose(ours, unchanged, atol=0.05)
    adapted.merge_adapter()  # through .data
    torch.testing.assert_close(logits(adapted), ours, rtol=1e-3, atol=1e-3)
    adapted.unmerge_adapter()
    with adapted.disable_adapter():
        torch.testing.assert_close(logits(adapted), unchanged, rtol=1e-3, atol=1e-3)
    handle.remove()
    torch.testing.assert_close(ours, logits(adapted), rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for a name that is replaced
def test_lora_of_peft_that_is_merged_into_int8() -> None:
    peft = pytest.importorskip("peft", reason="peft comes with the extra `test`")
    torch.manual_seed(0)
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = make("llama")
    adapted = peft.get_peft_model(model, options).eval()
    exact = logits(adapted)
    with accelerate(model, weights="int8"):
        logits(adapted)
        adapted.merge_adapter()
        error = (logits(adapted) - exact).abs().mean()
    assert 0 < error < 0.1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torchao uses what torch calls deprecated
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_weights_of_torchao(when: str, weights: str | None) -> None:
    """Layers stay of torch's class, and their weights become tensors of a class that multiplies by itself."""
    quantization = pytest.importorskip(
        "torchao.quantization", reason="torchao comes with the extra `test` on x86-64, where it has wheels"
    )
    model = make("llama")
    unchanged = logits(model)
    handle = accelerate(model, weights=weights) if when == "after" else None
    quantization.quantize_(model.model, quantization.Int8WeightOnlyConfig())
    handle = accelerate(model, weights=weights) if handle is None else handle
    ours = logits(model)
    assert not [layer for layer in handle.layers if layer.startswith("model.layers")], str(handle)
    handle.remove()
    assert not torch.equal(logits(model), unchanged)
    # The head is no part of what was quantized.
    torch.testing.assert_close(ours, logits(model), rtol=1e-3, atol=1e-3 if weights is None else 0.1)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_compiled_model_is_the_plain_one(name: str) -> None:
    model = make(name)
    expected = logits(model)
    with accelerate(model):
        torch.testing.assert_close(logits(torch.compile(model, backend="eager", fullgraph=True)), expected)
        torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it
@pytest.mark.parametrize("trained", [False, True])
def test_layers_that_are_compiled_one_by_one_share_their_code(trained: bool) -> None:
    """As accelerate's `compile_regions` does; after eight versions of one function torch compiles no more."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": 6}))
    counter = CompileCounter()
    with accelerate(model.train(trained)), torch.set_grad_enabled(trained):
        expected = model(tokens()).logits
        for layer in model.model.layers:
            layer.compile(backend=counter, fullgraph=True)
        found = model(tokens(), use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert 1 <= counter.frame_count <= 2
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("which", [0, 1])
def test_one_layer_is_compiled_and_the_other_is_not(name: str, which: int) -> None:
    """A step of one token that an eager layer has begun goes on in a compiled one."""
    model = make(name)
    expected = model.generate(tokens(), max_new_tokens=4, do_sample=False)
    with accelerate(model):
        layers = model.transformer.h if name == "gpt2" else model.model.layers
        model.generate(tokens(), max_new_tokens=2, do_sample=False)
        layers[which].compile(backend="eager", fullgraph=True, dynamic=True)
        assert torch.equal(model.generate(tokens(), max_new_tokens=4, do_sample=False), expected)
    torch._dynamo.reset()


def test_a_compiled_model_is_not_compiled_again_after_an_eager_step() -> None:
    model, counter = make("llama"), CompileCounter()
    with accelerate(model), torch.no_grad():
        compiled = torch.compile(model, backend=counter)
        compiled(tokens(), use_cache=False)
        frames = counter.frame_count
        assert frames > 0
        model.generate(tokens(), max_new_tokens=3, do_sample=False)
        compiled(tokens(), use_cache=False)
    assert counter.frame_count == frames
    torch._dynamo.reset()


def test_a_forward_that_was_taken_and_put_back_counts_as_the_classs_own() -> None:
    """As transformers 5.0 leaves modules whose outputs it has collected."""
    model = make("llama")
    with accelerate(model) as handle:
        attention = model.model.layers[0].self_attn
        attention.forward = attention.forward
        assert len(handle.layers) == 2
        assert_as_plain(model)


def test_a_forward_that_is_wrapped_by_its_function_is_the_classs_own() -> None:
    """As compressed-tensors wraps those of all modules when a model with its weights is called for the first time."""
    model = make("llama")
    seen: list[str] = []

    def wrap(module: Any) -> None:
        function = module.forward.__func__

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(type(self).__name__)
            return function(self, *args, **kwargs)

        module.forward = types.MethodType(forward, module)

    with accelerate(model) as handle:
        for module in model.model.modules():
            wrap(module)
        assert (handle.layers, handle.linear) == ([], ["lm_head"])
        assert "changed after" in handle.left["model.layers.0"]
        ours = logits(model)
    assert {"LlamaDecoderLayer", "LlamaMLP", "LlamaRMSNorm", "Linear"} <= set(seen)
    torch.testing.assert_close(ours, logits(make("llama")), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj", "model.layers.1.mlp.act_fn", "lm_head"])
def test_hooks_in_another_dictionary_count(name: str) -> None:
    """Hooks are often removed so, all at once."""
    model = make("llama")
    module = model.get_submodule(name)
    with accelerate(model):
        steps(model, lambda *_: None)
        unchanged = logits(model)
        module._forward_hooks = OrderedDict()
        handle = module.register_forward_hook(lambda module, inputs, output: 3 * output)
        ours = logits(model)
    expected = logits(model)
    handle.remove()
    assert not torch.allclose(expected, unchanged, atol=0.05)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


def test_hooks_on_all_modules_are_called() -> None:
    model = make("llama")
    seen: set[str] = set()
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.add(type(module).__name__)
    )
    try:
        with accelerate(model):
            logits(model)
    finally:
        handle.remove()
    assert {"LlamaMLP", "LlamaAttention", "SiLUActivation", "Linear"} <= seen


def test_dropout_that_is_on_drops() -> None:
    config = CONFIGS["gpt2"]()
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.5
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.train()
    with accelerate(model):
        assert not torch.equal(logits(model), logits(model))
        model.eval()
        model.transformer.h[0].mlp.dropout.train()  # alone, as for Monte Carlo estimates
        assert not torch.equal(logits(model), logits(model))
        model.eval()
        assert torch.equal(logits(model), logits(model))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_in_training_mode_generates_with_our_ops(name: str) -> None:
    """As TRL's GRPO calls it: without gradients, and nothing that is dropped."""
    config = CONFIGS[name]()
    for option in [each for each in vars(config) if "drop" in each]:
        setattr(config, option, 0.0)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(tokens(), **options)
    with accelerate(model), CountedCalls() as counted:
        assert torch.equal(model.generate(tokens(), **options), expected)
    assert counted.calls["decoder_layer"] == 5 * config.num_hidden_layers


def test_what_training_mode_changes_is_the_models_own() -> None:
    """Dropout that is switched on later; quantized weights; and without a cache, as checkpoints call layers."""
    model = make("llama").train()
    layer = model.model.layers[1]
    with accelerate(model), CountedCalls() as counted, torch.no_grad():
        model(tokens(), use_cache=False)
        assert counted.calls["decoder_layer"] == 0
        layer.self_attn.attention_dropout = 0.5
        assert not torch.equal(logits(model), logits(model))
        assert counted.calls["decoder_layer"] == 2 * (model.config.num_hidden_layers - 1)
        layer.self_attn.attention_dropout = 0.0
        model.config.attention_dropout = 0.5  # some families read it there
        counted.calls.clear()
        logits(model)
    assert counted.calls["decoder_layer"] == 0
    with accelerate(make("llama").train(), "int8") as handle:
        assert not handle.layers


def test_autocast_computes_in_its_dtype() -> None:
    model = make("llama")
    with torch.autocast("cpu", torch.bfloat16):
        expected = logits(model)
        with accelerate(model):
            ours = logits(model)
    assert ours.dtype == expected.dtype
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_module_that_was_exchanged_is_no_longer_reported_as_ours(weights: Any) -> None:
    """As `resize_token_embeddings` exchanges the head, which then is plain."""
    model = make("llama")
    handle = accelerate(model, weights=weights)
    assert "lm_head" in handle.linear and "model.norm" in handle.norms and not handle.left
    model.resize_token_embeddings(80)
    model.model.norm = nn.Identity()
    assert "lm_head" not in handle.linear and "model.norm" not in handle.norms
    assert set(handle.left) == {"lm_head", "model.norm"}
    assert all("another module has taken its place: call accelerate() again" in why for why in handle.left.values())
    model.model.layers = model.model.layers[:1]  # what is gone is no layer that is left
    assert set(handle.left) == {"lm_head", "model.norm"} and handle.layers == ["model.layers.0"]
    handle.remove()
    handle = accelerate(model.eval(), weights=weights)  # a new head is in training mode
    assert "lm_head" in handle.linear


def test_the_report() -> None:
    model = make("llama")
    add_lora(model.model.layers[1].self_attn)
    handle = accelerate(model)
    assert repr(handle) == str(handle)  # as a notebook shows it
    assert str(handle).splitlines() == [
        "LlamaForCausalLM on the SDK's ops:",
        "  whole layers     1  model.layers.0",
        "  attention        1  the whole model",
        "  linear layers    9  model.layers.1.self_attn.q_proj.base_layer, model.layers.1.self_attn.q_proj.delta, "
        "model.layers.1.self_attn.k_proj, model.layers.1.self_attn.v_proj, model.layers.1.self_attn.o_proj, "
        "model.layers.1.mlp.gate_proj, model.layers.1.mlp.up_proj, model.layers.1.mlp.down_proj, lm_head",
        "  norms            3  model.layers.1.input_layernorm, model.layers.1.post_attention_layernorm, model.norm",
        "  in training      9  model.layers.{0-1}.input_layernorm, model.layers.{0-1}.mlp, "
        "model.layers.{0-1}.post_attention_layernorm, model.layers.{0-1}.self_attn, model.norm",
        "  left alone       1",
        f"    model.layers.1: LlamaDecoderLayer: {Lora.__module__}.Lora is no plain linear layer",
    ]
    handle.remove()
    assert str(handle) == "LlamaForCausalLM is not accelerated any more"
