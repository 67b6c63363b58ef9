"""Tokens per second of larger batches and longer contexts: transformers' own code and the SDK's ops.

The models are those of `ds_plugin_sdk.bench.decode`. Each prompt is read once, and a few steps after it are timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_plugin_sdk.bench.decode import Shape, as_argument, model_of
from ds_plugin_sdk.bench.timing import Spread, spread
from ds_plugin_sdk.integrations.transformers import accelerate

BATCHES, CONTEXTS = (1, 2, 4, 8, 16, 32), (128, 512, 2048, 8192)
STEPS = 8
PLAIN = "transformers, bfloat16"

_Context = Callable[[Any], AbstractContextManager[Any]]

_KINDS: dict[str, _Context] = {
    PLAIN: lambda model: nullcontext(),
    "ours, bfloat16": accelerate,
    "ours, bfloat16, cache in int8": lambda model: accelerate(model, cache="int8"),
    "ours, int8": lambda model: accelerate(model, "int8"),
    "ours, int4": lambda model: accelerate(model, "int4"),
    "ours, int4, cache in int8": lambda model: accelerate(model, "int4", cache="int8"),
}


@dataclass(frozen=True)
class Row:
    """One implementation at one batch size and length.

    Attributes:
        batch: sequences.
        context: tokens of each before the first step.
        implementation: whose, and what weights and keys are read as.
        prompt_tokens_per_second: of all sequences together, over the prompt.
        decode_tokens_per_second: of all sequences together, by the median step.
        times: decode speed in multiples of transformers' own.
        spread: of the decode speed.
    """

    batch: int
    context: int
    implementation: str
    prompt_tokens_per_second: float
    decode_tokens_per_second: float
    times: float
    spread: dict[str, Spread] = field(default_factory=dict)


def run(
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    tell: Callable[[str], None] = lambda line: None,
    shape: Shape = "llama",
) -> Iterator[Row]:
    """Measure on this machine's CPU, with torch's threads as they are.

    Args:
        batches: sequences, each with as many tokens before it as the shortest context.
        contexts: lengths, of one sequence.
        tell: called with a line for each measurement.
        shape: the model's.
    """
    model = model_of(shape, positions=max(contexts) + STEPS + 1)
    places = dict.fromkeys([(batch, min(contexts)) for batch in batches] + [(1, context) for context in contexts])
    found: dict[tuple[int, int], dict[str, tuple[float, list[float]]]] = {place: {} for place in places}
    for name, context in _KINDS.items():
        with context(model):
            _seconds(model, 1, min(contexts))  # brings weights to where they are read from
            for place in places:
                found[place][name] = _seconds(model, *place)
                tell(f"batch {place[0]}, {place[1]} tokens, {name}: {statistics.median(found[place][name][1]):.3f} s")
    for (batch, length), kinds in found.items():
        plain = statistics.median(kinds[PLAIN][1])
        for name, (prompt, steps) in kinds.items():
            step = statistics.median(steps)
            rates = [batch / each for each in steps]
            decode = {"decode_tokens_per_second": spread(rates)}
            yield Row(batch, length, name, batch * length / prompt, batch / step, plain / step, decode)


@torch.no_grad()
def _seconds(model: Any, batch: int, length: int) -> tuple[float, list[float]]:
    """Of a prompt, and of each step after it."""
    import transformers

    options = as_argument(model, transformers.DynamicCache(config=model.config))
    tokens = torch.randint(0, model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    taken = []
    for _ in range(1 + STEPS):
        start = time.perf_counter()
        logits = model(tokens, **options, logits_to_keep=1).logits
        taken.append(time.perf_counter() - start)
        tokens = logits.argmax(-1)
    return taken[0], taken[1:]
