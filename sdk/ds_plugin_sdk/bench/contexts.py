"""Tokens per second of larger batches and longer contexts: transformers' own code and the SDK's ops.

The models are those of `ds_plugin_sdk.bench.decode`. Prompts take turns, and steps after them.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_plugin_sdk.bench.decode import Shape, as_argument, model_of
from ds_plugin_sdk.bench.timing import Spread, spread
from ds_plugin_sdk.integrations.transformers import accelerate

BATCHES, CONTEXTS = (1, 2, 4, 8, 16, 32), (128, 512, 2048, 8192)
# Turns, and steps in each: the first of these does not count.
TURNS, STEPS = 4, 3
# Turns of a prompt, of which the first does not count: it waits for kernels of new shapes and for pages of the
# cache. Longer ones, of which that is no part, are read once.
PROMPTS, LONGEST_REPEATED = 3, 4096
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
        prompt_tokens_per_second: of all sequences together, by the prompt's median.
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
    model = model_of(shape, positions=max(contexts) + TURNS * STEPS + 1)
    places = dict.fromkeys([(batch, min(contexts)) for batch in batches] + [(1, context) for context in contexts])
    with ExitStack() as kept:
        models = {name: copy.deepcopy(model) for name in _KINDS}
        for name, context in _KINDS.items():
            kept.enter_context(context(models[name]))
            _Generation(models[name], 1, min(contexts)).step()  # brings weights to where they are read from
        for batch, length in places:
            yield from _rows(models, batch, length, tell)


def _rows(models: dict[str, Any], batch: int, length: int, tell: Callable[[str], None]) -> Iterator[Row]:
    prompts: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(PROMPTS if batch * length <= LONGEST_REPEATED else 0):
        for name, model in models.items():
            prompts[name].append(_Generation(model, batch, length).prompt)
    generations = {name: _Generation(model, batch, length) for name, model in models.items()}
    steps: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(TURNS):
        for name, generation in generations.items():
            steps[name] += [generation.step() for _ in range(STEPS)][1:]
    plain = statistics.median(steps[PLAIN])
    for name, seconds in steps.items():
        step = statistics.median(seconds)
        tell(f"batch {batch}, {length} tokens, {name}: {step:.3f} s")
        prompt = statistics.median(prompts[name][1:] or [generations[name].prompt])
        decode = {"decode_tokens_per_second": spread([batch / each for each in seconds])}
        yield Row(batch, length, name, batch * length / prompt, batch / step, plain / step, decode)


class _Generation:
    """A prompt of random tokens, and greedy steps after it.

    Attributes:
        prompt: seconds that it took.
    """

    def __init__(self, model: Any, batch: int, length: int) -> None:
        import transformers

        self._model = model
        self._options = as_argument(model, transformers.DynamicCache(config=model.config))
        seed = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(0, model.config.vocab_size, (batch, length), generator=seed)
        self.prompt = self.step()

    @torch.no_grad()
    def step(self) -> float:
        """Seconds of the next one."""
        start = time.perf_counter()
        logits = self._model(self._tokens, **self._options, logits_to_keep=1).logits
        seconds = time.perf_counter() - start
        self._tokens = logits.argmax(-1)
        return seconds
