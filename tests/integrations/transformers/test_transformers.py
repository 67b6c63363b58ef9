"""transformers' models on our ops: the plain model's tokens, by calls into native kernels, and back again."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from counted_calls import CountedCalls

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")
    import transformers

from ds_plugin_sdk import provenance
from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.integrations.transformers import accelerate
from ds_plugin_sdk.ops import decoder_layer
from ds_plugin_sdk.ops._products import torchs_from

TOKENS = 32
PADDED = (5, 0, 1, 0)  # on the left, of a batch of four

_SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 160}
_LLAMA = {**_SIZES, "intermediate_size": 112, "num_key_value_heads": 2, "initializer_range": 0.2}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_OPT = {**_SIZES, "ffn_dim": 128, "init_std": 0.2}
# Name -> configuration. Weights are so large that tokens differ from one another.
MODELS: dict[str, transformers.PreTrainedConfig] = {
    "gpt2": transformers.GPT2Config(
        n_embd=64, n_layer=3, n_head=4, vocab_size=160, initializer_range=0.2, bos_token_id=1, eos_token_id=2
    ),
    "llama": transformers.LlamaConfig(**_LLAMA),
    "qwen2": transformers.Qwen2Config(**_LLAMA),
    "qwen3": transformers.Qwen3Config(**_LLAMA, head_dim=16),
    "gemma": transformers.GemmaConfig(**_LLAMA, head_dim=16),
    "phi3": transformers.Phi3Config(**_LLAMA, **_SPECIAL),
    "phi3, turned in part": transformers.Phi3Config(**_LLAMA, **_SPECIAL, partial_rotary_factor=0.5),
    "glm": transformers.GlmConfig(**_LLAMA, head_dim=16, **_SPECIAL),
    "glm, turned in part": transformers.GlmConfig(**_LLAMA, head_dim=24, partial_rotary_factor=0.75, **_SPECIAL),
    "glm4": transformers.Glm4Config(**_LLAMA, head_dim=16, **_SPECIAL),
    "granite": transformers.GraniteConfig(
        **_LLAMA, residual_multiplier=0.6, attention_multiplier=0.2, logits_scaling=0.5, **_SPECIAL
    ),
    "olmo2": transformers.Olmo2Config(**_LLAMA, **_SPECIAL),
    "olmo2, one head of keys": transformers.Olmo2Config(**{**_LLAMA, "num_key_value_heads": 1}, **_SPECIAL),
    "olmo3": transformers.Olmo3Config(**_LLAMA, sliding_window=8, **_SPECIAL),
    "exaone4": transformers.Exaone4Config(
        **_LLAMA, head_dim=16, sliding_window=8, layer_types=["sliding_attention"] * 2 + ["full_attention"], **_SPECIAL
    ),
    "exaone4, no window": transformers.Exaone4Config(
        **_LLAMA, head_dim=24, sliding_window=None, layer_types=["full_attention"] * 3, **_SPECIAL
    ),
    "phi": transformers.PhiConfig(**_LLAMA, **_SPECIAL),
    "phi, heads normed": transformers.PhiConfig(**_LLAMA, qk_layernorm=True, **_SPECIAL),
    "gpt_neox": transformers.GPTNeoXConfig(**_SIZES, intermediate_size=112, initializer_range=0.2, **_SPECIAL),
    "gpt_neox, one after the other": transformers.GPTNeoXConfig(
        **_SIZES, intermediate_size=112, initializer_range=0.2, use_parallel_residual=False, **_SPECIAL
    ),
    "stablelm": transformers.StableLmConfig(**_LLAMA, **_SPECIAL),
    "stablelm, side by side": transformers.StableLmConfig(**_LLAMA, use_parallel_residual=True, **_SPECIAL),
    "ernie4_5": transformers.Ernie4_5Config(**_LLAMA, head_dim=16),
    "seed_oss": transformers.SeedOssConfig(**_LLAMA, head_dim=16, bos_token_id=1, eos_token_id=2),
    "smollm3": transformers.SmolLM3Config(**_LLAMA, no_rope_layer_interval=2, **_SPECIAL),
    "smollm3, window": transformers.SmolLM3Config(
        **_LLAMA, no_rope_layers=[1, 1, 0], use_sliding_window=True, sliding_window=8, **_SPECIAL
    ),
    "starcoder2": transformers.Starcoder2Config(**_LLAMA, bos_token_id=1, eos_token_id=2),
    "starcoder2, window": transformers.Starcoder2Config(
        **_LLAMA, sliding_window=8, hidden_act="relu", bos_token_id=1, eos_token_id=2
    ),
    "opt": transformers.OPTConfig(**_OPT, word_embed_proj_dim=64),
    "opt, norm after": transformers.OPTConfig(**_OPT, word_embed_proj_dim=48, do_layer_norm_before=False),
}

pytestmark = pytest.mark.compiler


FAMILIES_OF_OPS = ("linear", "attention", "norm", "rotary", "decoder_layer")


@pytest.fixture(scope="module", autouse=True)
def kernels(native: Callable[..., None]) -> None:
    """The native kernels, and nothing else."""
    native(*FAMILIES_OF_OPS, "transformer")  # the latter for gates that are before up


@pytest.fixture
def op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where the library that calls a layer's ops could not be had."""
    monkeypatch.setattr(decoder_layer, "call", None)


def make(name: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]).to(dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def generate(model: transformers.PreTrainedModel, **options: Any) -> Any:
    """Greedy: a prompt of four rows of different lengths, and 32 steps."""
    ids = torch.randint(3, 160, (4, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, count in enumerate(PADDED):
        mask[row, :count] = 0
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=TOKENS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


@pytest.mark.parametrize("name", MODELS)
def test_same_tokens(name: str) -> None:
    model = make(name)
    plain = generate(model)
    assert len(plain.sequences.unique()) > 20, "a model that says little tests little"
    with accelerate(model):
        ours = generate(model)
    assert torch.equal(plain.sequences, ours.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(plain.logits), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_is_one_call(name: str) -> None:
    model = make(name)
    with accelerate(model), CountedCalls() as counted:
        generate(model)
    assert counted.calls["decoder_layer"] == counted.calls["cached_attention"] == 3 * TOKENS


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_one_call_is_its_ops_one_by_one(
    name: str, dtype: torch.dtype, weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(name, dtype)
    with accelerate(model, weights=weights):
        whole = generate(model)
        with CountedCalls():  # a mode, for which the call goes by torch's dispatcher
            dispatched = generate(model)
        monkeypatch.setattr(decoder_layer, "call", None)
        parts = generate(model)
    assert torch.equal(torch.stack(whole.logits), torch.stack(parts.logits))
    assert torch.equal(torch.stack(whole.logits), torch.stack(dispatched.logits))
    for ours, theirs in zip(whole.past_key_values.layers, parts.past_key_values.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


def test_layers_of_a_step_that_are_given_different_masks() -> None:
    """Every other layer attends to a window: its mask is not that of the layer before it."""
    config = transformers.Qwen2Config(
        **{**_LLAMA, "num_hidden_layers": 4},
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention"] * 2,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    plain = generate(model)
    with accelerate(model) as handle:
        ours = generate(model)
        assert len(handle.layers) == 4
    assert torch.equal(plain.sequences, ours.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(plain.logits), rtol=1e-3, atol=1e-3)


def test_norms_before_the_residual() -> None:
    """Gemma 3: such layers run whole too; five of six attend to a window."""
    config = transformers.Gemma3TextConfig(
        **{**_LLAMA, "num_hidden_layers": 6}, head_dim=16, sliding_window=6, query_pre_attn_scalar=16
    )
    assert set(config.layer_types) == {"full_attention", "sliding_attention"}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)  # of norms, to which 1 is added
    model.generation_config.eos_token_id = None
    plain = generate(model)
    with accelerate(model) as handle, CountedCalls() as counted:
        ours = generate(model)
        assert len(handle.layers) == 6 and not handle.left
    assert counted.calls["decoder_layer"] == 6 * TOKENS
    with accelerate(model), CountedCalls() as counted, pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder_layer, "call", None)
        assert torch.equal(generate(model).sequences, plain.sequences)
    assert counted.calls["rms_norm"] == (6 * 6 + 1) * TOKENS
    assert counted.calls["linear"] == (4 * 6 + 1) * TOKENS
    assert torch.equal(plain.sequences, ours.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(plain.logits), rtol=1e-3, atol=1e-3)

    prompts = torch.randint(3, 160, (8, 24))
    with torch.no_grad():
        exact, model = model(prompts).logits, model.bfloat16()
        plain_error = float((model(prompts).logits - exact).abs().mean())
        with accelerate(model):
            assert float((model(prompts).logits - exact).abs().mean()) <= 1.1 * plain_error


def test_a_step_keeps_no_cache_alive() -> None:
    model = make("llama")
    with accelerate(model):
        cache = generate(model).past_key_values
        gone = weakref.ref(cache)
        del cache
        gc.collect()
        assert gone() is None


def test_a_step_that_has_ended_vouches_for_no_layer() -> None:
    """Also where the next step's first layer is asked and then left to its own code."""
    model = make("llama")
    with accelerate(model) as handle:
        generate(model)
        replacement: Any = handle._found.replacements["model.layers.0"]
        step = replacement._row._steps.current
        assert (step.last, step.loop.call, step.ahead) == (None, None, None)
        assert not (step.kept or step.givens)


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("name", MODELS)
def test_every_part_is_a_call_of_a_native_op(name: str) -> None:
    model = make(name)
    with accelerate(model), CountedCalls() as counted:
        generate(model)
    layers, steps = 3, TOKENS
    family = name.partition(",")[0]
    norm = "layer_norm" if family in ("gpt2", "gpt_neox", "opt", "phi", "stablelm", "starcoder2") else "rms_norm"
    assert counted.calls["cached_attention"] == layers * steps
    # Four for each layer, the head, and OPT's projections: those of the 44 tokens of a prompt may be torch's.
    projections = 2 * (steps - (torchs_from(torch.float32) <= 44)) if name == "opt, norm after" else 0
    assert counted.calls["linear"] == (4 * layers + 1) * steps + projections
    assert counted.calls[norm] >= layers * steps
    # Heads that are normed, or not all queries together, are turned apart; of SmolLM 3's three layers two are turned.
    turned = {
        **{"gpt2": 0, "opt": 0, "smollm3": 2, "exaone4": 2 * 2},
        **dict.fromkeys(("qwen3", "olmo2", "olmo3", "gpt_neox"), 2 * layers),
        **dict.fromkeys(("exaone4, no window", "phi, heads normed"), 2 * layers),
    }
    turns = turned.get(name, turned.get(family, layers))
    assert counted.calls["rotary_"] == turns * steps
    assert counted.calls["activation_and_mul"] == (layers * steps if name.startswith(("phi3", "glm")) else 0)
    origins = {op.name: op.origin for op in provenance.records()}
    for family in FAMILIES_OF_OPS:
        assert origins[family] in ("compiled", "cache", "prebuilt"), origins


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16(name: str) -> None:
    """As near to float32 as the plain model is in bfloat16, or nearer; both are compared on the prompt's logits."""
    exact = generate(make(name)).logits[0]
    model = make(name, torch.bfloat16)
    plain = generate(model).logits[0]
    with accelerate(model):
        ours = generate(model).logits[0]
    assert float((ours - exact).abs().mean()) <= 1.2 * float((plain - exact).abs().mean()) + 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_int8(name: str) -> None:
    model = make(name)
    plain = generate(model).logits[0]
    with accelerate(model, weights="int8"), CountedCalls() as counted:
        ours = generate(model).logits[0]
    assert counted.calls["linear"] > 0
    # Weights are off by up to 1/254 of their group's largest; what that does to logits of size 1.6 in three layers.
    assert 0 < float((ours - plain).abs().mean()) < 0.1
    assert float((ours.argmax(-1) == plain.argmax(-1)).float().mean()) >= 0.75


def test_int4() -> None:
    """Of rows that are whole blocks of 64; the layer that makes logits is in 8 bits."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        plain = model(tokens).logits
        with accelerate(model, weights="int4") as handle:
            ours = model(tokens).logits
            contents = {
                name: matrix.contents.weight.dtype
                for replacement in handle._found.replacements.values()
                for name, matrix in _matrices(replacement)
            }
            model.lm_head.weight *= 2  # as it is followed in int8
            torch.testing.assert_close(model(tokens).logits, 2 * ours, rtol=1e-3, atol=1e-3)
    # Down projections have rows of 160.
    assert contents == {
        "qkv": torch.uint8,
        "output": torch.uint8,
        "mlp_in": torch.uint8,
        "mlp_out": torch.int8,
        "alone": torch.int8,
    }
    error = (ours - plain).norm() / plain.norm()
    assert 0.02 < float(error) < 0.3, float(error)


def test_int4_heads_that_make_scores_have_8_bits() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 128}
    classifier = transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_labels=3, pad_token_id=0)
    ).eval()
    questions = transformers.BertForQuestionAnswering(transformers.BertConfig(**sizes, num_hidden_layers=1)).eval()
    for model, head in ((classifier, "score"), (questions, "qa_outputs")):
        with accelerate(model, weights="int4") as handle, torch.no_grad():
            model(torch.arange(1, 13)[None])
            dtypes = {
                name: matrix.contents.weight.dtype
                for name, replacement in handle._found.replacements.items()
                for _, matrix in _matrices(replacement)
            }
        assert dtypes.pop(head) == torch.int8
        assert set(dtypes.values()) == {torch.uint8}


def test_a_layer_whose_code_is_not_known_is_reported() -> None:
    """Its parts run on our ops, but each by itself: who reads the report learns why it gains less."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.Cohere2ForCausalLM(transformers.Cohere2Config(**sizes, num_key_value_heads=2, vocab_size=96))
    handle = accelerate(model.eval())
    assert len(handle.linear) == 15 and not handle.layers
    for layer in ("model.layers.0", "model.layers.1"):
        assert handle.left[layer].startswith("Cohere2DecoderLayer: its code is not known as a whole")
    assert "is no norm that is known" in handle.left["model.norm"]


def _matrices(replacement: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(replacement, "layer"):
        for name in ("qkv", "output", "mlp_in", "mlp_out"):
            yield name, getattr(replacement.layer, name)
    elif hasattr(replacement, "matrix"):
        yield "alone", replacement.matrix


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_off_again(name: str, weights: Any) -> None:
    model = make(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    strides = {key: value.stride() for key, value in model.state_dict().items()}
    attention = model.config._attn_implementation
    expected = generate(model)
    handle = accelerate(model, weights=weights)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    handle.remove()
    handle.remove()
    assert model.config._attn_implementation == attention
    assert not any("forward" in vars(module) for module in model.modules())
    assert {key: value.stride() for key, value in model.state_dict().items()} == strides
    with CountedCalls() as counted:
        again = generate(model)
    assert not counted.calls
    assert torch.equal(again.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(again.logits, expected.logits, strict=True))


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_memory_ends_with_remove(name: str, weights: Any) -> None:
    """That of packed weights, by then and not when Python's collector comes by, though the handle is kept."""
    model = make(name)
    gc.collect()
    gc.disable()
    try:
        handle = accelerate(model, weights=weights)
        generate(model)
        packed = [
            weakref.ref(matrix.contents.weight.untyped_storage())
            for replacement in handle._found.replacements.values()
            for _, matrix in _matrices(replacement)
        ]
        handle.remove()
        assert packed
        assert not any(storage() for storage in packed)
    finally:
        gc.enable()


def test_tied_weights_stay_tied() -> None:
    model = make("gpt2")
    with accelerate(model):
        assert model.lm_head.weight is model.transformer.wte.weight
        assert model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()


@pytest.mark.parametrize(
    "options", [{"cache_implementation": "static"}, {"num_beams": 2}, {"use_cache": False}], ids=str
)
@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
def test_other_ways_to_generate(name: str, options: dict[str, Any]) -> None:
    model = make(name)
    expected = generate(model, **options)
    with accelerate(model), CountedCalls() as counted:
        ours = generate(model, **options)
    # Without a cache all queries are many, for which torch's attention is the model's own.
    assert (counted.calls["cached_attention"] > 0) == (options.get("use_cache", True) or name == "llama")
    assert torch.equal(ours.sequences, expected.sequences)


def test_a_cache_can_be_cropped_and_continued() -> None:
    model = make("llama")
    ids = torch.randint(3, 160, (2, 9), generator=torch.Generator().manual_seed(2))

    @torch.no_grad()
    def logits() -> torch.Tensor:
        cache = transformers.DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        cache.crop(-3)
        assert cache.get_seq_length() == 6
        result: torch.Tensor = model(ids[:, :4], past_key_values=cache).logits
        return result

    expected = logits()
    with accelerate(model):
        torch.testing.assert_close(logits(), expected, rtol=1e-4, atol=1e-4)


def test_gradients_are_left_to_the_model() -> None:
    model = make("llama")
    ids = torch.arange(3, 11).unsqueeze(0)
    model(ids, labels=ids).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    with accelerate(model):
        model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)


def test_a_model_of_another_family_gets_attention_linear_layers_and_norms() -> None:
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=160
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    ids = torch.randint(3, 160, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).last_hidden_state
        with accelerate(model), CountedCalls() as counted:
            ours = model(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert counted.calls == {"linear": 13, "layer_norm": 5, "cached_attention": 2}


def test_wrong_use_raises() -> None:
    model = make("llama")
    with pytest.raises(SdkError, match="int3"):
        accelerate(model, weights="int3")  # type: ignore[arg-type]  # wrong on purpose
    with accelerate(model), pytest.raises(SdkError, match="already"):
        accelerate(model)


def test_quantized_weights_that_no_layer_can_have_are_an_error() -> None:
    """A model of layers that are divided among ranks, or of a library's own, would run unquantized, and nobody know."""

    class Linear(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    model = make("llama")
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is torch.nn.Linear:
                setattr(module, name, Linear(layer.in_features, layer.out_features, bias=False))
    with pytest.raises(
        SdkError,
        match=r"(?s)cannot have int8 weights.*none of its linear layers.*most often: \S+Linear is no plain linear",
    ):
        accelerate(model, weights="int8")
    with accelerate(model) as handle:
        assert not handle.linear
