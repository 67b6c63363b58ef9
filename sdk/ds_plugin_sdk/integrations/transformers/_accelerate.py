"""`accelerate`: finds the layers of a model that the SDK's ops can run, and gives them another ``forward``."""

from __future__ import annotations

import functools
import inspect
import re
import types
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import transformers
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.integrations.transformers import families, int4
from ds_plugin_sdk.integrations.transformers.attention import (
    ATTENTION,
    SDPA,
    Name,
    has_other_sdpa,
    has_own_sdpa,
    register_attention,
)
from ds_plugin_sdk.integrations.transformers.decoder_row import Row
from ds_plugin_sdk.integrations.transformers.experts import ExpertsReplacement, is_experts
from ds_plugin_sdk.integrations.transformers.int4_layouts import is_int4
from ds_plugin_sdk.integrations.transformers.kv_cache import AppendingLayer, GrowingLayer, Int8Layer
from ds_plugin_sdk.integrations.transformers.loss import LossReplacement
from ds_plugin_sdk.integrations.transformers.replacement import Replacement, is_replaced
from ds_plugin_sdk.integrations.transformers.replacements import (
    DecoderReplacement,
    LinearReplacement,
    NormReplacement,
)
from ds_plugin_sdk.integrations.transformers.source_text import asks_for_sdpa, source_of
from ds_plugin_sdk.integrations.transformers.training_layers import TRAINED, is_rms, training_replacement
from ds_plugin_sdk.integrations.transformers.understood import (
    NotUnderstoodError,
    check_as_written,
    check_no_other_forward,
    name_of,
    norm_of,
)
from ds_plugin_sdk.integrations.transformers.weights import Packer, Quantized, Weights
from ds_plugin_sdk.registry import load_kernels
from ds_plugin_sdk.thread_lock import ThreadLock

_FAMILIES_OF_OPS = ("linear", "attention", "norm", "rotary", "decoder_layer")

_MODELS = "transformers.models."
_ASKS = "its code asks whether its attention is 'sdpa'"


@dataclass
class _Found:
    """What `accelerate` has made of a model: replaced modules and attentions, and what was left, by their names."""

    replacements: dict[str, Replacement] = field(default_factory=dict)
    attentions: dict[str, transformers.PreTrainedConfig] = field(default_factory=dict)
    left: dict[str, tuple[str, str]] = field(default_factory=dict)  # name -> class, why
    cache: type[AppendingLayer] = GrowingLayer  # what whole layers put into the place of empty dynamic ones


class Accelerated:
    """A model that runs on the SDK's ops until `remove` is called, or the ``with`` block ends.

    Printed, it is a report: which layers run whole on our ops, which parts of others, and what was left and why.
    """

    def __init__(self, model: transformers.PreTrainedModel, found: _Found, undo: list[Callable[[], None]]) -> None:
        self._title = type(model).__name__
        self._model = weakref.ref(model)
        self._found = found
        self._undo = undo

    def remove(self) -> None:
        """Give the model back as it was, and free what its layers were read from. Again is no error."""
        while self._undo:
            self._undo.pop()()
        self._found.replacements.clear()

    @property
    def layers(self) -> list[str]:
        """Names of decoder layers that run whole."""
        return self._replaced(DecoderReplacement)

    @property
    def linear(self) -> list[str]:
        """Names of linear layers that are replaced alone."""
        return self._replaced(LinearReplacement)

    @property
    def experts(self) -> list[str]:
        """Names of modules with the weights of several experts, of which each token meets some."""
        return self._replaced(ExpertsReplacement)

    @property
    def norms(self) -> list[str]:
        """Names of norms that are replaced alone."""
        return self._replaced(NormReplacement)

    @property
    def loss(self) -> list[str]:
        """Names of models whose loss in training is computed without logits; empty for the model itself."""
        return self._replaced(LossReplacement)

    @property
    def training(self) -> list[str]:
        """Names of RMS norms, activations, feed-forward layers and attentions that run on our ops in training, where
        their device has kernels for it.
        """
        rms = [name for name in self.norms if is_rms(self._found.replacements[name].module)]
        return sorted([*rms, *(name for kind in TRAINED for name in self._replaced(kind))])

    @property
    def int8_cache(self) -> list[str]:
        """Names of decoder layers that keep keys and values in 8 bits, where the cache is transformers' dynamic one."""
        return self.layers if self._found.cache is Int8Layer else []

    @property
    def attention(self) -> list[str]:
        """Names of models whose attention runs on our op; empty for the model itself."""
        return [name for name, config in self._found.attentions.items() if config._attn_implementation == ATTENTION]

    @property
    def left(self) -> dict[str, str]:
        """Name -> why, for layers that stay the model's own code."""
        found = {name: f"{kind}: {why}" for name, (kind, why) in self._found.left.items()}
        now = self._modules()
        present = {*now.values()}
        for name, replacement in self._found.replacements.items():
            if not self._undo or _is_ours(replacement, present):
                continue
            if replacement.module in present:
                found[name or "loss"] = f"{name_of(replacement.module)}: {replacement.why_not}"
            elif name in now:  # else it is gone
                why = "another module has taken its place: call accelerate() again"
                found[name] = f"{name_of(replacement.module)}: {why}"
        return found

    def _modules(self) -> dict[str, nn.Module]:
        """That the model has now. Adapters put their own into the places of others, which then have other names."""
        model = self._model()
        return {} if model is None else dict(model.named_modules())

    def _replaced(self, kind: type[Replacement]) -> list[str]:
        present = {*self._modules().values()}
        return [
            name
            for name, replacement in self._found.replacements.items()
            if self._undo and type(replacement) is kind and _is_ours(replacement, present)
        ]

    def __repr__(self) -> str:
        if not self._undo:
            return f"{self._title} is not accelerated any more"
        lines = [f"{self._title} on the SDK's ops:"]
        attention, loss = ([name or "the whole model" for name in names] for names in (self.attention, self.loss))
        for title, names in (
            ("whole layers", self.layers),
            ("attention", attention),
            ("linear layers", self.linear),
            *((("experts", self.experts),) if self.experts else ()),
            ("norms", self.norms),
            ("in training", self.training),
            *((("int8 cache", self.int8_cache),) if self.int8_cache else ()),
            *((("chunked loss", loss),) if loss else ()),
        ):
            lines.append(f"  {title:<14}{len(names):>4}  {', '.join(_patterns(names))}".rstrip())
        reasons: dict[str, list[str]] = defaultdict(list)
        for name, why in self.left.items():
            reasons[why].append(name)
        lines.append(f"  {'left alone':<14}{sum(map(len, reasons.values())):>4}")
        lines += [f"    {', '.join(_patterns(names))}: {why}" for why, names in reasons.items()]
        return "\n".join(lines)

    def __enter__(self) -> Accelerated:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def accelerate(
    model: transformers.PreTrainedModel,
    weights: Weights = None,
    *,
    cache: Literal["int8"] | None = None,
    loss: Literal["chunked"] | None = None,
) -> Accelerated:
    """Run a model's inference on the SDK's ops: native kernels, or reference implementations where there are none.

    Only what is known for certain is replaced: plain layers without hooks, whose code and parameters are known. All
    else, and every call with autocast, dropout or arguments that are not known here, runs the model's own code. Wrap
    your own loops in ``torch.no_grad()``; ``generate`` does so itself. Greedy tokens in float32 are those of the plain
    model; 16-bit results differ in rounding.

    In training, where gradients are recorded, RMS norms, gated activations, GELU by formula and rotary embeddings whose
    code is known are one op each, forward and backward (`ds_plugin_sdk.nn`); linear layers and attention multiply
    16-bit numbers in float32 on CPUs that are slow at them, and linear layers float32 by tiles on AMD's Zen 5
    (`ds_plugin_sdk.nn.linear`); the loss is computed without logits if that is asked for. All else is the model's own
    code.

    Args:
        model: on its device or devices; float32, bfloat16, float16, or float64 by the reference implementations; in
            eval mode or in training mode.
        weights: ``"int8"`` to read weights of linear layers and experts in 8 bits with a scale for each 128 of a row;
            where 128 does not divide a row, for the largest number below that does, 32 at least, else for the smallest
            above; ``"int4"`` for 4 bits, but 8 for layers outside `model.base_model`, which make logits or scores,
            and for rows that are no multiple of 64. The model's own parameters stay as they are, so that
            `Accelerated.remove` can bring them back: memory grows by half (bfloat16), or a quarter. None keeps their
            dtype; parameters are moved into one block of memory. Layers that came in 4 bits (GPTQ, AWQ, torchao) keep
            them in any case, as copies in the layout of our op, or in 8 bits where groups are no multiples of 64.
        cache: ``"int8"`` to keep keys and values in 8 bits with a scale for each token and head, where decoder layers
            run whole and the cache is transformers' dynamic one, empty before the first call. Layers with a window
            keep floats; static, quantized and other caches, and those of other layers, stay what they are.
        loss: ``"chunked"`` to compute the loss of a causal language model in training, where labels are given and
            gradients recorded, some tokens at a time (`ds_plugin_sdk.nn.linear_cross_entropy`). Such a call returns no
            logits: they are None, or not in the tuple.

    Returns:
        A handle to undo it; printed, it says what was replaced and what was left and why.

    Raises:
        SdkError: the model is accelerated already; `weights`, `cache` or `loss` is something else; or no layer of the
            model can have the weights or the cache that are asked for.
    """
    _check(model, weights, cache, loss)
    _load_kernels(model, *_FAMILIES_OF_OPS, *families.families_of_ops(model))
    register_attention()
    found, packer = _Found(cache=GrowingLayer if cache is None else Int8Layer), Packer(weights)
    undo: list[Callable[[], None]] = [lambda: None]
    try:
        with _sharing:
            _use_attention(model, found, undo)
        _find_layers(model, packer, found, weights)
        _check_served(model, found, packer, weights, cache)
        if loss is not None:
            _find_loss(model, found)
        undo += packer.pack()
        for replacement in found.replacements.values():
            replacement.put_on()
            undo.append(replacement.take_off)
    except BaseException:
        Accelerated(model, found, undo).remove()
        raise
    return Accelerated(model, found, undo)


def _is_ours(replacement: Replacement, present: set[nn.Module]) -> bool:
    return replacement.module in present and is_replaced(replacement.module) and replacement.holds()


def _what_to_pass(module: object) -> str:
    """Advice for who has passed something else than a model of transformers."""
    modules = module.named_modules() if isinstance(module, nn.Module) else ()
    found = [name for name, each in modules if isinstance(each, transformers.PreTrainedModel)]
    if found:
        return f"pass the model that is in it: get_submodule({found[0]!r})"
    return "other models have the same ops by the modules and functions of ds_plugin_sdk.nn"


def _load_kernels(model: transformers.PreTrainedModel, *names: str) -> None:
    for device in {parameter.device.type for parameter in model.parameters() if not parameter.is_meta}:
        for name in names:
            load_kernels(name, device)


def _check(model: transformers.PreTrainedModel, weights: Weights, cache: str | None, loss: str | None) -> None:
    if not isinstance(model, nn.Module) or not callable(getattr(model, "get_output_embeddings", None)):
        raise SdkError(
            f"accelerate() cannot run a {type(model).__module__}.{type(model).__qualname__}",
            why="it is for models of transformers, PreTrainedModel",
            hint=_what_to_pass(model),
        )
    if weights not in (None, *get_args(Quantized)):
        raise SdkError(
            f"weights is {weights!r}", why="weights are kept as they are, or quantized", hint='None, "int8" or "int4"'
        )
    if cache not in (None, "int8"):
        raise SdkError(f"cache is {cache!r}", why="keys are kept as they are, or quantized", hint='None or "int8"')
    if loss not in (None, "chunked"):
        raise SdkError(f"loss is {loss!r}", why="a loss is the model's own, or chunked", hint='None or "chunked"')
    if any(is_replaced(module) for module in model.modules()):
        raise SdkError("the model is accelerated already", why="accelerate() was called on it", hint="call remove()")


def _check_served(
    model: transformers.PreTrainedModel, found: _Found, packer: Packer, weights: Weights, cache: str | None
) -> None:
    """What was asked for is had by some layer at least: the report of the others would not be read."""
    report = "print(accelerate(model)) says what is left alone, and why"
    experts = any(isinstance(each, ExpertsReplacement) for each in found.replacements.values())
    if weights is not None and packer.is_empty and not experts:
        raise SdkError(
            f"{name_of(model)} cannot have {weights} weights",
            why=f"none of its linear layers runs on our ops{_most_frequent_reason(found, 'Linear', 'Conv1D')}",
            hint=f"leave weights out; {report}",
        )
    if cache is not None and not any(isinstance(each, DecoderReplacement) for each in found.replacements.values()):
        raise SdkError(
            f"{name_of(model)} cannot have an {cache} cache",
            why=f"none of its decoder layers runs whole on our ops{_most_frequent_reason(found, 'Layer', 'Block')}",
            hint=f"leave cache out; {report}",
        )


def _most_frequent_reason(found: _Found, *kinds: str) -> str:
    """That of modules whose classes' names end so."""
    reasons = Counter(why for kind, why in found.left.values() if kind.endswith(kinds)).most_common(1)
    return f"; most often: {reasons[0][0]}" if reasons else ""


# ---------------------------------------------------------------------- layers
def _find_layers(model: transformers.PreTrainedModel, packer: Packer, found: _Found, weights: Weights) -> None:
    base = getattr(model, "base_model", model)
    heads = {*model.modules()} - {*base.modules()} | {model.get_output_embeddings()}
    matrix_of = functools.partial(int4.matrix_of, dtype=model.dtype)
    done: set[nn.Module] = set()
    rows: dict[str, Row] = defaultdict(Row)  # by what they are in
    for name, module in model.named_modules():
        if module in done or isinstance(module, torch.jit.ScriptModule):
            continue
        try:
            attention = families.attention_of(module)
            if attention is not None:
                row = rows[name.rpartition(".")[0]]
                found.replacements[name] = _decoder(module, attention, packer, row, found.cache, matrix_of)
                done.update(module.modules())
                for inner, each in list(module.named_modules())[1:]:
                    _in_training(f"{name}.{inner}", each, found)
            elif isinstance(module, nn.Linear | Conv1D) or is_int4(module):
                matrix = matrix_of(module, sensitive=module in heads)
                packer.add(matrix)
                found.replacements[name] = LinearReplacement(module, matrix)
            elif is_experts(module):
                found.replacements[name] = ExpertsReplacement(module, weights)
            elif isinstance(module, nn.LayerNorm) or re.search("RMSNorm|LayerNorm$", type(module).__name__):
                found.replacements[name] = NormReplacement(module, norm_of(module))
            elif isinstance(module, GradientCheckpointingLayer):
                why = "its code is not known as a whole: its parts run by themselves, as far as they are known"
                found.left[name] = (name_of(module), why)
            else:
                _in_training(name, module, found)
        except NotUnderstoodError as why:
            found.left[name] = (name_of(module), str(why))
            _in_training(name, module, found)  # one whose memory is ZeRO's is trained all the same


def _in_training(name: str, module: nn.Module, found: _Found) -> None:
    replacement = training_replacement(module)
    if replacement is not None:
        found.replacements[name] = replacement


def _find_loss(model: transformers.PreTrainedModel, found: _Found) -> None:
    try:
        found.replacements[""] = LossReplacement(model)
    except NotUnderstoodError as why:
        found.left["loss"] = (name_of(model), str(why))


def _decoder(
    module: nn.Module,
    attention: nn.Module,
    packer: Packer,
    row: Row,
    cache: type[AppendingLayer],
    matrix_of: families.MatrixOf,
) -> DecoderReplacement:
    check_no_other_forward(module)
    check_as_written(module)
    if getattr(getattr(attention, "config", None), "_attn_implementation", None) != ATTENTION:
        raise NotUnderstoodError("its attention is not torch's")
    layer = families.describe(module, matrix_of)
    packer.add(*layer.matrices)
    return DecoderReplacement(module, attention, layer, row, cache)


# ---------------------------------------------------------------------- attention
def _use_attention(model: transformers.PreTrainedModel, found: _Found, undo: list[Callable[[], None]]) -> None:
    """Put our attention in the place of torch's; other ones were chosen, or are needed, and stay."""
    ours: list[transformers.PreTrainedConfig] = []
    _attending[model] = ours
    undo.append(functools.partial(_attention_again, model, ours))
    users: dict[int, list[tuple[str, transformers.PreTrainedModel]]] = defaultdict(list)
    for name, module in model.named_modules():
        if isinstance(module, transformers.PreTrainedModel):
            users[id(module.config)].append((name, module))
    for same in users.values():
        name, config = same[0][0], same[0][1].config
        before = config._attn_implementation
        why = _why_not_attention(before, [user for _, user in same])
        if why is None:
            if before == SDPA:
                config._attn_implementation_internal = Name.OURS
            found.attentions[name] = config
            ours.append(config)
        else:
            found.left[f"{name}.attention".lstrip(".")] = (name_of(same[0][1]), why)


def _why_not_attention(before: str | None, users: Iterable[transformers.PreTrainedModel]) -> str | None:
    if before not in (SDPA, ATTENTION):
        return f"its attention is {before!r}, which may do more than 'sdpa'"
    if not has_own_sdpa():
        return "another function than transformers' own is registered as 'sdpa'"
    for user in users:
        why = _why_not_code(user)
        if why is not None:
            return why
    return None


def _why_not_code(user: transformers.PreTrainedModel) -> str | None:
    kinds = {kind for module in _own_modules(user) for kind in type(module).__mro__}
    files = {kind.__module__ for kind in kinds}
    if any(map(has_other_sdpa, files)):
        return "its file has another function than transformers' own as 'sdpa'"
    models = [kind for kind in type(user).__mro__ if issubclass(kind, transformers.PreTrainedModel)]
    read: list[Any] = [kind for kind in models[:-1] if source_of(kind.__module__)]  # the last is PreTrainedModel
    if not all(kind._can_set_attn_implementation() for kind in read):
        return "its attention does not go through transformers' registry"
    asks = any(_asks_for_sdpa(kind) for kind in kinds if not _is_shared(kind.__module__))
    # What else is in a file of somebody's own, with a class of a module alone, is no code of models.
    texts = {*(kind.__module__ for kind in read), *(file for file in files if file.startswith(_MODELS))}
    return _ASKS if asks or any(map(asks_for_sdpa, texts)) else None


def _own_modules(model: transformers.PreTrainedModel) -> list[nn.Module]:
    """A model's modules, but for those of models within it that have configurations of their own."""
    modules = [*model.modules()]
    models = [each for each in modules if isinstance(each, transformers.PreTrainedModel)]
    others = {id(part) for each in models if each.config is not model.config for part in each.modules()}
    return [module for module in modules if id(module) not in others]


def _is_shared(file: str) -> bool:
    """Whether a file, by its module's name, is torch's, Python's, or one of transformers' for all models."""
    return file == "builtins" or (file.startswith(("torch.", "transformers.")) and not file.startswith(_MODELS))


def _asks_for_sdpa(kind: type) -> bool:
    """Whether a method of a class, by its compiled code, may do something else for torch's attention by its name."""
    functions = [inspect.unwrap(value) for value in vars(kind).values() if callable(value)]
    codes = [function.__code__ for function in functions if isinstance(function, types.FunctionType)]
    used = ({*code.co_names, *_strings(code.co_consts)} for code in codes)
    return any({"_attn_implementation", SDPA} <= names for names in used)


def _strings(constants: Iterable[object]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):
            yield from _strings(constant)


# Configurations of models that are accelerated. Several models may have one, and a handle need not be kept.
_attending: weakref.WeakKeyDictionary[nn.Module, list[transformers.PreTrainedConfig]] = weakref.WeakKeyDictionary()
_sharing = ThreadLock()


def _attention_again(model: transformers.PreTrainedModel, configs: list[transformers.PreTrainedConfig]) -> None:
    """Give configurations torch's attention again, but for those that other accelerated models have too."""
    with _sharing:
        if _attending.get(model) is not configs:  # the model has been accelerated again
            return
        del _attending[model]
        shared = {id(config) for others in _attending.values() for config in others}
        for config in configs:
            if id(config) not in shared and config._attn_implementation is Name.OURS:
                config._attn_implementation_internal = SDPA


def _patterns(names: Iterable[str]) -> Iterator[str]:
    """Names with their numbers as ranges: ``model.layers.{0-23}.mlp``."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for name in names:
        match = re.search(r"\d+", name)
        key = name if match is None else f"{name[: match.start()]}{{}}{name[match.end() :]}"
        numbers[key].append(-1 if match is None else int(match.group()))
    for key, found in numbers.items():
        yield key.replace("{}", _range(found)) if "{}" in key else key


def _range(numbers: list[int]) -> str:
    first, last = min(numbers), max(numbers)
    if first == last:
        return str(first)
    whole = len(numbers) == last - first + 1
    return f"{{{first}-{last}}}" if whole else "{" + ",".join(map(str, sorted(numbers))) + "}"


__all__ = ["Accelerated", "accelerate"]
