"""The loss of transformers' models in training without logits: the plain one with its gradients, or their own code."""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")
    import accelerate as hugging_face
    import transformers
    from transformers.loss import loss_utils
    from transformers.utils import ModelOutput

from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.integrations.transformers import Accelerated, accelerate, loss

_SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 160}
_LLAMA = {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "initializer_range": 0.2}
MODELS: dict[str, transformers.PreTrainedConfig] = {
    "gpt2": transformers.GPT2Config(
        n_embd=32,
        n_layer=1,
        n_head=4,
        vocab_size=160,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        resid_pdrop=0,
        attn_pdrop=0,
        embd_pdrop=0,
    ),
    "llama": transformers.LlamaConfig(**_LLAMA),
    "llama, tied": transformers.LlamaConfig(**_LLAMA, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**_LLAMA),
    "qwen2": transformers.Qwen2Config(**_LLAMA),
    "qwen3": transformers.Qwen3Config(**_LLAMA, head_dim=8),
    "opt": transformers.OPTConfig(**_SIZES, ffn_dim=48, init_std=0.2, word_embed_proj_dim=32, dropout=0),
}

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is:FutureWarning"),  # all releases have it
]


@pytest.fixture(scope="module", autouse=True)
def kernels(native: Callable[..., None]) -> None:
    native("linear", "attention", "norm", "rotary", "decoder_layer", "cross_entropy")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shape of the hidden states of each chunked loss."""
    seen: list[torch.Size] = []

    def counted(input: Tensor, *args: Any, **options: Any) -> Tensor:
        seen.append(input.shape)
        return original(input, *args, **options)

    original = loss.linear_cross_entropy
    monkeypatch.setattr(loss, "linear_cross_entropy", counted)
    return seen


def make(name: str = "llama", dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name])).to(dtype).train()


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 160, (3, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}


def step(model: transformers.PreTrainedModel, **arguments: Any) -> tuple[Any, list[Tensor]]:
    output = model(**{**batch(), **arguments})
    found = torch.autograd.grad(output[0], list(model.parameters()))
    return output, list(found)


def assert_same(found: tuple[Any, list[Tensor]], expected: tuple[Any, list[Tensor]], tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(found[0][0], expected[0][0], rtol=tolerance, atol=0)
    for a, b in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=10 * tolerance * float(b.abs().max().clamp(min=1e-2)))


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_the_plain_models(name: str, calls: list[torch.Size]) -> None:
    expected = step(make(name))
    model = make(name)
    with accelerate(model, loss="chunked") as handle:
        assert handle.loss == [""] and "chunked loss" in str(handle)
        found = step(model)
        assert calls == [(3, 9, 32)]
        assert_same(found, expected)
        assert found[0].logits is None and "logits" not in found[0]
        assert found[0].keys() == expected[0].keys() - {"logits"}
    assert step(model)[0].logits is not None and len(calls) == 1
    assert "forward" not in vars(model) and "forward" not in vars(model.lm_head)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_items_in_batch": torch.tensor(11)},
        {"num_items_in_batch": 7},
        {"ignore_index": 5},
        {"shift_labels": torch.randint(0, 160, (3, 9), generator=torch.Generator().manual_seed(2))},
        {"output_hidden_states": True},
        {"attention_mask": torch.tensor([[0, 0, *[1] * 7], [1] * 9, [1] * 9])},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_arguments_of_the_loss_mean_what_they_mean(arguments: dict[str, Any], calls: list[torch.Size]) -> None:
    labels = {"labels": torch.tensor([[9, 5, 9] * 3] * 3)} if "ignore_index" in arguments else {}
    expected = step(make(), **arguments, **labels)
    model = make()
    accelerate(model, loss="chunked")
    assert_same(step(model, **arguments, **labels), expected)
    assert len(calls) == 1


def test_a_tuple_has_no_logits() -> None:
    model = make()
    expected = model(**batch(), return_dict=False, use_cache=False)
    accelerate(model, loss="chunked")
    found = model(**batch(), return_dict=False, use_cache=False)
    assert len(expected) == 2 and len(found) == 1
    torch.testing.assert_close(found[0], expected[0])


def test_16_bits_and_autocast(calls: list[torch.Size]) -> None:
    expected = step(make())
    model = make(dtype=torch.bfloat16)
    accelerate(model, loss="chunked")
    output, gradients = step(model)
    torch.testing.assert_close(output.loss, expected[0].loss, rtol=2e-2, atol=0)
    assert output.loss.dtype == torch.float32 and {each.dtype for each in gradients} == {torch.bfloat16}
    model = make()
    accelerate(model, loss="chunked")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, gradients = step(model)
    torch.testing.assert_close(output.loss, expected[0].loss, rtol=2e-2, atol=0)
    assert {each.dtype for each in gradients} == {torch.float32} and len(calls) == 2


def test_with_checkpointing(calls: list[torch.Size]) -> None:
    expected = step(make())
    model = make()
    accelerate(model, loss="chunked")
    model.gradient_checkpointing_enable()
    assert_same(step(model), expected)
    assert len(calls) == 1


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "mixed"])
def test_the_trainer_and_generation_know_the_arguments(mixed: bool, calls: list[torch.Size], tmp_path: Path) -> None:
    """The one drops what a model does not take from batches, the other rejects it. With mixed precision accelerate
    wraps the model's forward.
    """
    data = [{name: value[row] for name, value in batch().items()} for row in range(3)]

    def losses(model: transformers.PreTrainedModel) -> list[float]:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            bf16=mixed,
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected = losses(make())
    model = make()
    handle = accelerate(model, loss="chunked")
    assert losses(model) == pytest.approx(expected, rel=2e-2 if mixed else 1e-3) and len(expected) == 3
    assert len(calls) == 5  # two for each step, but one for the third batch's
    assert handle.loss == [""] and "loss" not in handle.left
    model.eval()
    ids = batch()["input_ids"]
    assert model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, min_new_tokens=2).shape == (3, 11)


def test_a_forward_that_was_wrapped_is_the_models_own_once_it_is_removed(calls: list[torch.Size]) -> None:
    """As accelerate does for mixed precision, and leaves it."""
    model, plain = make(), make()
    handle = accelerate(model, loss="chunked")
    wrapped = functools.wraps(model.forward.__func__)(functools.partial(model.forward.__func__))
    model.forward = types.MethodType(wrapped, model)
    assert_same(step(model), step(plain))
    copied = copy.deepcopy(model)
    assert len(calls) == 1 and handle.loss == [""]
    assert_same(step(copied), step(plain))
    with accelerate(copied):  # a plain model with a wrapped forward
        assert_same(step(copied), step(plain))
    handle.remove()
    assert_same(step(model), step(plain))
    assert len(calls) == 1
    assert accelerate(model, loss="chunked").left["loss"].endswith("has another forward")


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch.func's own
def test_transforms_of_torch_run_the_models_own_code(calls: list[torch.Size]) -> None:
    """Tangents of forward-mode derivatives would be lost without a word, and `torch.func` knows no chunks."""
    model = make().requires_grad_(False)
    model.set_attn_implementation("eager")  # torch's fast one has no forward-mode derivative
    embeddings = torch.randn(3, 9, 32, generator=torch.Generator().manual_seed(2))

    def loss_of(embeddings: Tensor) -> Tensor:
        found: Tensor = model(inputs_embeds=embeddings, labels=batch()["labels"]).loss
        return found

    def derived() -> tuple[Tensor, ...]:
        jvp = torch.func.jvp(loss_of, (embeddings,), (embeddings,))[1]
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(loss_of(forward_ad.make_dual(embeddings, embeddings))).tangent
        return jvp, dual, torch.func.grad(loss_of)(embeddings)

    expected = derived()
    accelerate(model, loss="chunked")
    for found, plain in zip(derived(), expected, strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)
    assert not calls


def test_once_mixed_precision_is_taken_off_nothing_of_ours_is_left() -> None:
    model = make()
    handle = accelerate(model, loss="chunked")
    accelerator = hugging_face.Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare_model(model)
    assert handle.loss == [""]
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
    assert handle.loss == [""]
    handle.remove()
    assert "forward" not in vars(model)
    with accelerate(model, loss="chunked") as again:
        assert again.loss == [""]


def test_a_forward_that_somebody_wraps_in_their_own_way_is_given_logits(calls: list[torch.Size]) -> None:
    model = make()
    handle = accelerate(model, loss="chunked")
    ours = model.forward
    model.forward = functools.partial(ours)  # type: ignore[method-assign]  # on the instance
    assert step(model)[0].logits is not None and not calls
    assert handle.loss == [] and handle.left["loss"].endswith("has another forward")


# ---- the model's own code --------------------------------------------------------------------------------------------
class _Head(nn.Linear):
    pass


def _with_hook(model: transformers.PreTrainedModel) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: None)


def _with_other_head(model: transformers.PreTrainedModel) -> None:
    model.lm_head.__class__ = _Head


def _with_other_loss(model: transformers.PreTrainedModel) -> None:
    model.loss_function = lambda logits, labels, **_: logits.float().square().mean()


def _with_other_forward(model: transformers.PreTrainedModel) -> None:
    forward = model.lm_head.forward
    model.lm_head.forward = lambda input: forward(input) * 2


def _in_evaluation(model: transformers.PreTrainedModel) -> None:
    model.eval()


def _nothing(model: transformers.PreTrainedModel) -> None:
    pass


OWN = {
    "a hook on the last layer": (_with_hook, {}),
    "another last layer": (_with_other_head, {}),
    "another loss": (_with_other_loss, {}),
    "evaluation": (_in_evaluation, {}),
    "few logits": (_nothing, {"logits_to_keep": 9}),
    "float64": (lambda model: model.double(), {}),
}


@pytest.mark.parametrize(("change", "arguments"), OWN.values(), ids=OWN)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_what_is_not_known_runs_the_models_own_code(
    before: bool,
    change: Callable[[transformers.PreTrainedModel], None],
    arguments: dict[str, Any],
    calls: list[torch.Size],
) -> None:
    model, plain = make(), make()
    change(plain)
    if before:
        change(model)
    accelerate(model, loss="chunked")
    if not before:
        change(model)
    found, expected = step(model, **arguments), step(plain, **arguments)
    assert not calls and found[0].logits is not None
    assert_same(found, expected)


def test_a_forward_of_the_last_layers_own_is_left(calls: list[torch.Size]) -> None:
    model, plain = make(), make()
    for each in (model, plain):
        _with_other_forward(each)
    handle = accelerate(model, loss="chunked")
    assert handle.left["loss"].endswith("Linear has another forward")
    assert_same(step(model), step(plain))
    assert not calls


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (transformers.LlamaForCausalLM, "forward"),
        (loss_utils, "fixed_cross_entropy"),
        (nn.functional, "cross_entropy"),
        (nn.Linear, "forward"),
    ],
)
@pytest.mark.parametrize("wraps", [True, False], ids=["wraps", "anew"])
def test_code_that_others_have_patched_is_called(
    owner: Any, name: str, wraps: bool, before: bool, calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, model = getattr(owner, name), make()

    def patched(*args: Any, **options: Any) -> Any:
        result = own(*args, **options)
        if isinstance(result, ModelOutput):
            return type(result)(loss=result.loss / 2, logits=result.logits.clone())
        return result / 2

    if not before:
        accelerate(model, loss="chunked")
    monkeypatch.setattr(owner, name, functools.wraps(own)(patched) if wraps else patched)
    if before:
        accelerate(model, loss="chunked")
    assert_same(step(model), step(make()))
    assert not calls


@pytest.mark.parametrize("part", ["lm_head", ""])
def test_a_wrapper_that_was_put_on_later_is_called(calls: list[torch.Size], part: str) -> None:
    """By the name of what it wraps, as accelerate's hooks have it."""
    model, plain = make(), make()
    handle = accelerate(model, loss="chunked")
    for each in (model, plain):
        module = each.get_submodule(part)
        module.forward = functools.wraps(module.forward)(functools.partial(_halved, module.forward))
    assert_same(step(model), step(plain))
    assert not calls and handle.loss == [] and handle.left["loss"].endswith("has another forward")


def _halved(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    output = forward(*args, **kwargs)
    if isinstance(output, Tensor):
        return output / 2
    assert output.logits is not None
    return output


def test_without_gradients_or_labels_there_are_logits(calls: list[torch.Size]) -> None:
    model = make()
    accelerate(model, loss="chunked")
    with torch.no_grad():
        assert model(**batch()).logits.shape == (3, 9, 160)
    assert model(batch()["input_ids"]).logits.shape == (3, 9, 160)
    assert not calls


def test_a_model_of_another_code_says_so() -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Gemma2Config(**_LLAMA, head_dim=8))
    handle = accelerate(model, loss="chunked")
    assert handle.loss == [] and handle.left["loss"].endswith("the code of Gemma2ForCausalLM is not known")


def test_an_error_leaves_the_model_as_it_was(calls: list[torch.Size]) -> None:
    model = make()
    accelerate(model, loss="chunked")
    labels = torch.full((3, 9), 160)
    with pytest.raises(SdkError, match="target has an entry 160"):
        model(batch()["input_ids"], labels=labels)
    assert_same(step(model), step(make()))
    assert len(calls) == 2 and "_loss_function" not in vars(model)


def test_another_word_is_an_error() -> None:
    with pytest.raises(SdkError, match="loss is 'fused'"):
        accelerate(make(), loss="fused")
    assert isinstance(accelerate(make()), Accelerated)


def test_the_report_names_a_loss_that_somebody_replaces() -> None:
    """As trl does, which gives a model a forward with a loss of its own."""
    model = make().eval()
    handle = accelerate(model, loss="chunked")
    model.forward = types.MethodType(type(model).forward, model)  # type: ignore[method-assign]  # on the instance
    assert handle.left == {"loss": "LlamaForCausalLM: it was changed after accelerate()"}


def test_a_loss_function_that_was_set_by_hand_stays() -> None:
    model = transformers.LlamaForCausalLM(MODELS["llama"]).train()
    by_hand = model.loss_function
    model.loss_function = by_hand
    ids = torch.arange(12).reshape(2, 6)
    with accelerate(model, loss="chunked"):
        for _ in range(2):
            model(ids, labels=ids).loss.backward()
    assert vars(model)["_loss_function"] is by_hand
