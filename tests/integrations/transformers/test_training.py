"""Training of transformers' models on a CPU that is slow at 16-bit numbers: the plain model's gradients, sooner."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")
    import transformers

from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.integrations.transformers import accelerate, attention, training
from ds_plugin_sdk.ops import _products

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 160}
_LLAMA = {**_SIZES, "intermediate_size": 96, "num_key_value_heads": 2, "initializer_range": 0.1}
_NO_DROPOUT = {"resid_pdrop": 0, "attn_pdrop": 0, "embd_pdrop": 0}
MODELS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**_LLAMA),
    "qwen3": lambda: transformers.Qwen3Config(**_LLAMA, head_dim=16),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=160, bos_token_id=1, eos_token_id=2, **_NO_DROPOUT
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        **_SIZES, intermediate_size=96, hidden_dropout=0, attention_dropout=0
    ),
    "opt": lambda: transformers.OPTConfig(**_SIZES, ffn_dim=96, word_embed_proj_dim=64, dropout=0),
}

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is:FutureWarning"),  # all releases have it
]


@pytest.fixture(scope="module", autouse=True)
def kernels(native: Callable[..., None]) -> None:
    native("linear", "attention", "norm", "rotary", "decoder_layer", "cross_entropy")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often a linear layer, and attention, were multiplied in float32 on a CPU that should."""
    linear = importlib.import_module("ds_plugin_sdk.nn.linear")
    monkeypatch.setattr(_products, "multiplies_fast", lambda dtype: False)
    monkeypatch.setattr(linear, "_LEAST", 0)
    monkeypatch.setattr(linear, "_ROWS", 0)
    seen = {"linear": 0, "attention": 0}

    def counted(name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **options: Any) -> Tensor:
            seen[name] += 1
            return original(*args, **options)

        return call

    monkeypatch.setattr(training, "multiply", counted("linear", training.multiply))
    monkeypatch.setattr(attention, "attention_in_training", counted("attention", training.attention_in_training))
    return seen


def make(name: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(MODELS[name]()).to(dtype).train()


def batch(**more: Any) -> dict[str, Any]:
    ids = torch.randint(3, 160, (3, 20), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids, **more}


def gradients(model: Any, **more: Any) -> list[Tensor]:
    output = model(**batch(**more))
    return [each.double() for each in torch.autograd.grad(output.loss, list(model.parameters()))]


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """The norm of what is wrong in proportion to that of what is right, over all parameters."""
    wrong = torch.cat([(a - b).flatten() for a, b in zip(found, exact, strict=True)])
    return float(wrong.norm() / torch.cat([each.flatten() for each in exact]).norm())


PADDED = torch.tensor([[1] * 20, [0] * 6 + [1] * 14, [0] * 11 + [1] * 9])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mask", [None, PADDED], ids=["causal", "padded"])
def test_gradients_are_at_least_as_exact_as_the_plain_models(
    name: str, mask: Tensor | None, calls: dict[str, int]
) -> None:
    model = make(name)
    exact = make(name, torch.float64)
    exact.load_state_dict(model.state_dict())
    expected = gradients(exact, attention_mask=mask)
    plain = gradients(model, attention_mask=mask)
    assert not any(calls.values())
    with accelerate(model):
        ours = gradients(model, attention_mask=mask)
        layers = sum(isinstance(each, nn.Linear | transformers.pytorch_utils.Conv1D) for each in model.modules())
        assert calls == {"linear": layers, "attention": 2} and layers > 2
        assert error(ours, expected) < 1.1 * error(plain, expected) < 0.1
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, attention_mask=mask), plain, strict=True))


def test_inference_is_what_it_was_before_and_after_a_step(calls: dict[str, int]) -> None:
    model = make().eval()
    with accelerate(model) as handle:
        with torch.no_grad():
            before = model(**batch()).logits
        assert len(handle.layers) == 2 and not any(calls.values())
        gradients(model.train())
        assert calls["linear"] == 15
        with torch.no_grad():
            assert torch.equal(model.eval()(**batch()).logits, before)
        assert len(handle.layers) == 2 and calls["linear"] == 15


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_computes_the_same_again(reentrant: bool, calls: dict[str, int]) -> None:
    model = make()
    with accelerate(model):
        expected = gradients(model)
        once = calls["linear"]
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model(**batch()).loss.backward()
        found = [parameter.grad.double() for parameter in model.parameters()]
        assert error(found, expected) < (0.05 if reentrant else 1e-9)  # that runs once without gradients
        assert calls["linear"] == once + 2 * (once - 1) + 1  # all but the last layer, a second time


def test_hooks_are_called_and_adapters_keep_their_code(calls: dict[str, int]) -> None:
    model = make()
    seen = []
    with accelerate(model):
        model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, output: seen.append(output.shape))
        gradients(model)
        assert seen == [(3, 20, 96)] and calls["linear"] == 15

        class Adapter(nn.Linear):
            def forward(self, input: Tensor) -> Tensor:
                return super().forward(input) * 2

        adapter = Adapter(64, 96, bias=False, dtype=torch.bfloat16)
        adapter.weight = model.model.layers[1].mlp.up_proj.weight
        model.model.layers[1].mlp.up_proj = adapter
        gradients(model)
        assert calls["linear"] == 15 + 14


def test_who_replaces_torchs_linear_is_called(calls: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As profilers do that count operations."""
    seen = []
    own = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *args: seen.append(len(args)) or own(*args))
    model = make()
    with accelerate(model):
        gradients(model)
    assert len(seen) == 15 and not calls["linear"]


def test_another_forward_of_torchs_class_is_called(calls: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("gpt_neox")
    own = nn.Linear.forward
    with accelerate(model):
        monkeypatch.setattr(nn.Linear, "forward", lambda module, input: own(module, input) / 2)
        ours = gradients(model)
        assert not calls["linear"]
    assert error(ours, gradients(model)) < 0.02


def test_a_bias_that_is_no_parameter_is_added(calls: dict[str, int]) -> None:
    """As `torch.nn.utils.prune` leaves it."""
    model = make("gpt_neox")
    layer = model.gpt_neox.layers[0].mlp.dense_h_to_4h
    input = torch.randn(7, 64, dtype=torch.bfloat16)
    with accelerate(model):
        del layer.bias
        layer.bias = torch.full((96,), 7.0, dtype=torch.bfloat16)
        torch.testing.assert_close(layer(input), nn.functional.linear(input, layer.weight, layer.bias))
    assert calls["linear"] == 1


def test_a_compiled_model_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's operations, whatever the CPU; dynamo does not look for the features of this one."""
    _products.multiplies_fast.cache_clear()
    monkeypatch.setattr(_products, "_x86", lambda: 1 / 0)
    model = make()
    with accelerate(model):
        compiled = torch.compile(model.model, backend="eager", fullgraph=True)
        assert compiled(batch()["input_ids"]).last_hidden_state.shape == (3, 20, 64)


def test_who_replaces_or_forbids_torchs_attention_is_obeyed(
    calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    with accelerate(model):
        with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
            gradients(model)
        own = nn.functional.scaled_dot_product_attention
        seen = []
        monkeypatch.setattr(
            nn.functional, "scaled_dot_product_attention", lambda *a, **o: seen.append(len(a)) or own(*a, **o)
        )
        gradients(model)
    assert len(seen) == 2 and calls["attention"] == 0


def test_selective_checkpoints(calls: dict[str, int]) -> None:
    """Their modes see torch's operations."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    saved: list[Any] = []

    def policy(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        saved.extend([op] if op in products else [])
        return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE

    def checkpointed(model: Any) -> list[Tensor]:
        model.zero_grad()
        checkpoint(
            lambda ids: model(input_ids=ids, labels=ids).loss,
            batch()["input_ids"],
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        ).backward()
        return [parameter.grad.double() for parameter in model.parameters()]

    model = make("gpt_neox")
    plain, seen = checkpointed(model), len(saved)
    with accelerate(model):
        found = checkpointed(model)
    assert len(saved) == 2 * seen and seen and calls["linear"]
    assert error(found, plain) < 0.05


def test_a_mask_is_kept_as_it_was_given(calls: dict[str, int]) -> None:
    query = torch.randn(2, 2, 5, 8, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    kept: list[torch.dtype] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        training.attention_in_training(query, query, query, mask, False, 0.3)
    assert sorted(map(str, kept)) == ["torch.bfloat16"] * 4 + ["torch.bool", "torch.float32"]


def test_autocast(calls: dict[str, int]) -> None:
    model = make(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        plain = gradients(model)
    exact = make(dtype=torch.float64)
    expected = gradients(exact)
    with accelerate(model), torch.autocast("cpu", torch.bfloat16):
        ours = gradients(model)
    assert calls == {"linear": 15, "attention": 0}  # torch's attention casts by itself
    assert error(ours, expected) < 1.1 * error(plain, expected)


def test_a_cpu_that_is_fast_runs_the_models_own_code(calls: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    plain = gradients(model)
    monkeypatch.setattr(_products, "multiplies_fast", lambda dtype: True)
    with accelerate(model):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), plain, strict=True))
    assert not any(calls.values())


def test_attention_with_dropout_and_masks_that_learn_stay_torchs(calls: dict[str, int]) -> None:
    model = make()
    with accelerate(model):
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        gradients(model)
        assert calls["attention"] == 0
    query = torch.randn(1, 2, 5, 8, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.zeros(1, 1, 5, 5, dtype=torch.bfloat16)
    assert training.attends_in_training(query, query, query, mask)
    assert not training.attends_in_training(query, query, query, mask.requires_grad_())


def test_a_gradient_of_attention_that_is_derived_again_is_an_error(calls: dict[str, int]) -> None:
    """Also where what follows is linear, so that the gradient that comes in requires none."""
    query = torch.randn(1, 2, 5, 8, requires_grad=True)
    output = training.attention_in_training(query, query * 2, query * 3, None, True, 0.3)
    (first,) = torch.autograd.grad(output.sum(), query, create_graph=True)
    with pytest.raises(SdkError, match=r"no derivative of a gradient \(op 'attention_in_training'\)"):
        (first.square().sum() + query.sum()).backward()
