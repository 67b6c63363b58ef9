"""Perplexity of a language model on a text: transformers' own, and on our ops, with quantized weights or cache."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.integrations.transformers import accelerate

Dtype = Literal["float32", "bfloat16", "float16"]
PLAIN = "transformers"
CACHE = "ours, int8 cache"
# Name -> options of `accelerate`.
_OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, int8": {"weights": "int8"},
    "ours, int4": {"weights": "int4"},
    CACHE: {"cache": "int8"},
}


@dataclass(frozen=True)
class Row:
    """One implementation on the whole text.

    Attributes:
        implementation: whose, and what the weights or the cache are read as.
        tokens: that were predicted.
        loss: mean of the negative logarithm of their probabilities, in nats.
        perplexity: its exponential.
        times_plain: perplexity, in multiples of transformers' own.
    """

    implementation: str
    tokens: int
    loss: float
    perplexity: float
    times_plain: float


def run(model: Path, text: Path, dtype: Dtype = "bfloat16", length: int = 256, most: int = 64) -> list[Row]:
    """Compare on windows of the text that do not overlap; of each, all tokens but the first are predicted.

    An int8 cache is compared where decoder layers run whole. Its tokens attend to the 8 bits of all before them, as in
    generation.

    Args:
        model: a folder that transformers can load a causal language model and its tokenizer from.
        text: a file in UTF-8.
        dtype: of the model.
        length: tokens of a window, and no more than the model has positions.
        most: windows, from the text's beginning.

    Raises:
        SdkError: the folder has no such model, or the text has not one window.
    """
    loaded, tokenizer = _load(model, getattr(torch, dtype))
    positions = getattr(loaded.config, "max_position_embeddings", None) or length
    windows = _windows(tokenizer, text, min(length, positions))[:most]
    losses = {PLAIN: _loss(loaded, windows, nullcontext())}
    for name, options in _OURS.items():
        if name != CACHE or _has_whole_layers(loaded):
            # A model's configuration may ask for no cache.
            asked = {"use_cache": True} if name == CACHE else {}
            losses[name] = _loss(loaded, windows, accelerate(loaded, **options), **asked)
    tokens = windows[:, 1:].numel()
    return [Row(name, tokens, loss, math.exp(loss), math.exp(loss - losses[PLAIN])) for name, loss in losses.items()]


def _has_whole_layers(model: Any) -> bool:
    with accelerate(model) as handle:
        return bool(handle.layers)


def _load(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        return model.eval(), transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise SdkError(
            f"no language model can be loaded from {folder}",
            why=str(error).splitlines()[0],
            hint="name a folder that `save_pretrained` of the model and of its tokenizer has written",
        ) from error


def _windows(tokenizer: Any, text: Path, length: int) -> Tensor:
    """``[windows, length]``, int64."""
    try:
        written = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SdkError(f"{text} cannot be read", why=str(error), hint="name a file of text in UTF-8") from error
    ids = torch.tensor(tokenizer(written, add_special_tokens=False, verbose=False).input_ids, dtype=torch.int64)
    if len(ids) < length:
        raise SdkError(
            f"{text} is too short",
            why=f"it has {len(ids)} tokens, a window {length}",
            hint="give more text, or --length",
        )
    return ids[: len(ids) // length * length].view(-1, length)


@torch.no_grad()
def _loss(model: Any, windows: Tensor, implementation: AbstractContextManager[Any], **asked: bool) -> float:
    """Mean over all predicted tokens; softmax and sum in float32 and float64."""
    total = 0.0
    with implementation:
        for window in windows:
            logits = model(window[None], **asked).logits[0, :-1].float()
            total += functional.cross_entropy(logits, window[1:], reduction="none").double().sum().item()
    return total / windows[:, 1:].numel()
