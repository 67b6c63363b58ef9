"""A training step of a LLaMA of transformers: its own code, eager and compiled, and with a chunked loss.

One model serves all, whose calls take turns; the optimizer is torch's AdamW for all. Shapes are those of the smallest
and the largest of llama2.c's models, which have a vocabulary of 32,000 words; 128,256 are those of Llama 3. Memory is
that of the last layer and the loss alone, forward and backward.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from ds_plugin_sdk.bench import timing
from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.integrations.transformers import accelerate
from ds_plugin_sdk.nn import linear_cross_entropy
from ds_plugin_sdk.registry import get_accelerator

Shape = Literal["15m", "110m"]
VOCABULARIES = (32_000, 128_256)
OURS = "chunked loss"


class _Sizes(NamedTuple):
    hidden: int
    layers: int
    heads: int
    intermediate: int


SHAPES: dict[str, _Sizes] = {"15m": _Sizes(288, 6, 6, 768), "110m": _Sizes(768, 12, 12, 2048)}


@dataclass(frozen=True)
class Row:
    """One kind of step.

    Attributes:
        vocabulary: words.
        what: whose code.
        seconds: of a step, median; wall time.
        times: eager's time over it, the median of the turns.
        lowest, highest: of the turns.
        cpu_times: eager's CPU time over its own, likewise. With one thread it says more on a busy machine.
        loss_mib: the most memory that torch held in the last layer and the loss, forward and backward, beyond what it
            held before.
        share: of eager's.
        spread: of the seconds.
    """

    vocabulary: int
    what: str
    seconds: float
    times: float
    lowest: float
    highest: float
    cpu_times: float
    loss_mib: float
    share: float
    spread: dict[str, timing.Spread] = field(default_factory=dict)


@dataclass(frozen=True)
class Agreement:
    """Losses of a model trained with logits and without, from the same weights on the same batches.

    Attributes:
        steps: of each.
        first, last: the losses with logits.
        largest: relative difference at one step.
    """

    steps: int
    first: float
    last: float
    largest: float


def run(
    shape: Shape = "15m",
    *,
    vocabularies: tuple[int, ...] = VOCABULARIES,
    dtype: str = "float32",
    tokens: int = 512,
    turns: int = 5,
    compile: bool = True,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[Row]:
    """Measure on this machine's CPU, with torch's threads as they are.

    Args:
        shape: of `SHAPES`.
        vocabularies: words of each model.
        dtype: of parameters and activations: float32 or bfloat16.
        tokens: of a batch, in two sequences.
        turns: steps of each kind that count.
        compile: measure torch.compile too (minutes).
        tell: called with a line for each turn.

    Raises:
        SdkError: no such shape.
    """
    if shape not in SHAPES:
        raise SdkError(f"There is no shape {shape!r}", hint=f"one of: {', '.join(SHAPES)}")
    get_accelerator()
    for vocabulary in vocabularies:
        yield from _rows(SHAPES[shape], vocabulary, getattr(torch, dtype), tokens, turns, compile, tell)


def agreement(steps: int = 200, *, vocabulary: int = 32_000, dtype: str = "float32", tokens: int = 64) -> Agreement:
    """Train a small LLaMA twice: by its own code, and with a chunked loss."""
    losses = [_train(steps, vocabulary, getattr(torch, dtype), tokens, chunked) for chunked in (False, True)]
    apart = max(abs(a - b) / a for a, b in zip(*losses, strict=True))
    return Agreement(steps, losses[0][0], losses[0][-1], apart)


def _train(steps: int, vocabulary: int, dtype: torch.dtype, tokens: int, chunked: bool) -> list[float]:
    model = _model(_Sizes(64, 2, 4, 176), vocabulary, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = _ids(vocabulary, tokens)
    losses = []
    with accelerate(model, loss="chunked") if chunked else nullcontext():
        for number in range(steps):
            batch = ids.roll(number % 4, dims=1)
            losses.append(_step(model, optimizer, batch))
    return losses


def _model(sizes: _Sizes, vocabulary: int, dtype: torch.dtype) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        intermediate_size=sizes.intermediate,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).to(dtype).train()


def _ids(vocabulary: int, tokens: int) -> Tensor:
    return torch.randint(0, vocabulary, (2, tokens // 2), generator=torch.Generator().manual_seed(1))


def _step(model: Callable[..., Any], optimizer: torch.optim.Optimizer, ids: Tensor) -> float:
    loss: Tensor = model(input_ids=ids, labels=ids)[0]
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def _rows(
    sizes: _Sizes,
    vocabulary: int,
    dtype: torch.dtype,
    tokens: int,
    turns: int,
    compile: bool,
    tell: Callable[[str], None],
) -> Iterator[Row]:
    model = _model(sizes, vocabulary, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = _ids(vocabulary, tokens)
    calls: dict[str, tuple[Callable[..., Any], Callable[[], AbstractContextManager[Any]]]] = {
        "eager": (model, nullcontext),
        **({"torch.compile": (timing.compiled(model), nullcontext)} if compile else {}),
        OURS: (model, lambda: accelerate(model, loss="chunked")),
    }

    def measure(name: str) -> tuple[float, float]:
        call, context = calls[name]
        with context():
            wall, cpu = time.perf_counter(), time.process_time()
            _step(call, optimizer, ids)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        tell(f"{vocabulary} words, {name}: {wall:.2f} s, {cpu:.2f} s of CPU")
        return wall, cpu

    measures = {name: lambda name=name: measure(name) for name in calls}
    timing.in_turns(measures, 1)  # compiles, and makes what stays
    found = timing.in_turns(measures, turns)
    peaks = _peaks(vocabulary, sizes.hidden, dtype, tokens, compile)
    for name, times in found.items():
        wall, cpu = ([a[clock] / b[clock] for a, b in zip(found["eager"], times, strict=True)] for clock in (0, 1))
        yield Row(
            vocabulary,
            name,
            statistics.median(seconds for seconds, _ in times),
            statistics.median(wall),
            min(wall),
            max(wall),
            statistics.median(cpu),
            peaks[name] / 2**20,
            peaks[name] / peaks["eager"],
            {"seconds": timing.spread([seconds for seconds, _ in times])},
        )


def _peaks(vocabulary: int, hidden: int, dtype: torch.dtype, tokens: int, compile: bool) -> dict[str, int]:
    """Bytes that the last layer and the loss take, forward and backward, by whose they are."""
    input = torch.randn(tokens, hidden).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden).to(dtype).requires_grad_()
    target = torch.randint(0, vocabulary, (tokens,))

    def plain(input: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.cross_entropy(nn.functional.linear(input, weight).float(), target)

    losses: dict[str, Callable[..., Tensor]] = {
        "eager": plain,
        **({"torch.compile": timing.compiled(plain)} if compile else {}),
        OURS: lambda input, weight: linear_cross_entropy(input, weight, target),
    }

    def peak(loss: Callable[..., Tensor]) -> int:
        def step() -> object:
            return torch.autograd.grad(loss(input, weight), (input, weight))

        step()
        return timing.peak_bytes(step)

    return {name: peak(loss) for name, loss in losses.items()}
