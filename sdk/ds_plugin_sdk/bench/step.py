"""A training step of a model of transformers: its own code, eager and compiled, and with what the SDK has for it.

For a LLaMA and a GPT-2 that is `accelerate` with a chunked loss, which has ops between the products, and multiplies in
float32 where the CPU is slow at 16 bits; for a BERT DeepSpeed's transformer layers, which call the plugin's op, in the
place of its own. All take turns on the same batch; the optimizer is torch's AdamW for all, and freed memory is kept for
all, as the plugin's accelerator has it, but for eager steps in a process without one. Shapes are those of the
smallest and the largest of llama2.c's models, which have a vocabulary of 32,000 words; 128,256 are those of Llama 3.
Dropout is 0.1 where a family has it. Memory is that of a step without the optimizer, and that of the last layer and the
loss alone, forward and backward.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from ds_plugin_sdk.bench import timing
from ds_plugin_sdk.bench.measuring_process import MeasuringProcess, serve
from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.integrations.transformers import accelerate
from ds_plugin_sdk.losses import largest_difference
from ds_plugin_sdk.nn import linear_cross_entropy
from ds_plugin_sdk.registry import get_accelerator

Shape = Literal["15m", "110m"]
Family = Literal["llama", "gpt2", "bert"]
VOCABULARIES: dict[str, tuple[int, ...]] = {"llama": (32_000, 128_256), "gpt2": (50_257,), "bert": (30_522,)}
EAGER, WITHOUT = "eager", "eager, no accelerator"
_LONG = 2048  # tokens
_SETTLING = 6  # turns until memory that torch has freed and got again is all there: eager is slower before
_AS_TORCH_COMES = {"THP_MEM_ALLOC_ENABLE": "0"}  # a process inherits what the CPU's accelerator has set
OURS = {"llama": "accelerate", "gpt2": "accelerate", "bert": "DeepSpeed's layers"}


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
        model: its family.
        dtype: of parameters and activations.
        vocabulary: words.
        what: whose code.
        seconds: of a step, median; wall time.
        times: eager's time over it, the median of the turns.
        lowest, highest: of the turns.
        cpu_times: eager's CPU time over its own, likewise. With one thread it says more on a busy machine.
        peak_mib: the most memory that torch held in a forward and a backward pass, beyond what it held before: what is
            kept in between, and gradients. Without an accelerator it is not measured.
        peak_share: of eager's.
        loss_mib: the most memory that torch held in the last layer and the loss, forward and backward, beyond what it
            held before. Nobody chunks BERT's.
        share: of eager's.
        long_loss_mib, long_share: the same with 2048 tokens; torch.compile is not measured there.
        spread: of the seconds.
    """

    model: str
    dtype: str
    vocabulary: int
    what: str
    seconds: float
    times: float
    lowest: float
    highest: float
    cpu_times: float
    peak_mib: float | None = None
    peak_share: float | None = None
    loss_mib: float | None = None
    share: float | None = None
    long_loss_mib: float | None = None
    long_share: float | None = None
    spread: dict[str, timing.Spread] = field(default_factory=dict)


@dataclass(frozen=True)
class Agreement:
    """Losses of a model trained by its own code and by ours, from the same weights on the same batches, no dropout.

    Attributes:
        model: its family.
        dtype: of parameters and activations.
        steps: of each.
        first, last: the losses by its own code.
        largest: relative difference at one step.
    """

    model: str
    dtype: str
    steps: int
    first: float
    last: float
    largest: float


class _Kind(NamedTuple):
    """How a step is taken: what is called, its parameters' optimizer, and where."""

    call: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def run(
    shape: Shape = "15m",
    *,
    family: Family = "llama",
    vocabularies: tuple[int, ...] = (),
    dtype: str = "float32",
    tokens: int = 512,
    turns: int = 5,
    compile: bool = True,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[Row]:
    """Measure on this machine's CPU, with torch's threads as they are.

    Args:
        shape: of `SHAPES`.
        family: of the model.
        vocabularies: words of each model; none: those of `VOCABULARIES`.
        dtype: of parameters and activations: float32 or bfloat16.
        tokens: of a batch, in two sequences.
        turns: steps of each kind that count.
        compile: measure torch.compile too (minutes).
        tell: called with a line for each turn.

    Raises:
        SdkError: no such shape or family.
    """
    for what, known, names in ((shape, SHAPES, "shape"), (family, VOCABULARIES, "family of models")):
        if what not in known:
            raise SdkError(f"There is no {names} {what!r}", hint=f"one of: {', '.join(known)}")
    get_accelerator()
    for vocabulary in vocabularies or VOCABULARIES[family]:
        yield from _rows(SHAPES[shape], family, vocabulary, getattr(torch, dtype), tokens, turns, compile, tell)


def agreement(
    steps: int = 200,
    *,
    family: Family = "llama",
    vocabulary: int | None = None,
    dtype: str = "float32",
    tokens: int | None = None,
) -> Agreement:
    """Train a small model twice: by its own code, and by ours; in 16 bits a larger one, whose products are ours.

    Args:
        steps: of each.
        family: of the model.
        vocabulary: words; those of `VOCABULARIES` by default.
        dtype: of parameters and activations: float32 or bfloat16.
        tokens: of a batch; 64 by default, in 16 bits 256.
    """
    get_accelerator()
    words, small = vocabulary or VOCABULARIES[family][0], dtype == "float32"
    sizes = _Sizes(64, 2, 4, 176) if small else _Sizes(256, 2, 4, 704)
    given = (sizes, family, words, getattr(torch, dtype), tokens or (64 if small else 256))
    losses = [_train(steps, *given, what) for what in (EAGER, OURS[family])]
    apart = largest_difference(losses[1], losses[0], relative=True)
    return Agreement(family, dtype, steps, losses[0][0], losses[0][-1], apart)


def _train(
    steps: int, sizes: _Sizes, family: Family, vocabulary: int, dtype: torch.dtype, tokens: int, what: str
) -> list[float]:
    model = _model(sizes, family, vocabulary, dtype, dropout=0.0)
    kind = _kinds(model, family, lr=1e-3, compile=False)[what]
    ids = _ids(vocabulary, tokens)
    with kind.context():
        return [_step(kind, ids.roll(number % 4, dims=1)) for number in range(steps)]


def _model(
    sizes: _Sizes, family: Family, vocabulary: int, dtype: torch.dtype, dropout: float
) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    hidden, layers, heads, intermediate = sizes
    model: transformers.PreTrainedModel
    if family == "llama":
        llama = transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            intermediate_size=intermediate,
            tie_word_embeddings=True,
            use_cache=False,
        )
        model = transformers.LlamaForCausalLM(llama)
    elif family == "gpt2":
        gpt2 = transformers.GPT2Config(
            vocab_size=vocabulary,
            n_embd=hidden,
            n_layer=layers,
            n_head=heads,
            n_inner=intermediate,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            resid_pdrop=dropout,
            use_cache=False,
        )
        model = transformers.GPT2LMHeadModel(gpt2)
    else:
        bert = transformers.BertConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=intermediate,
            hidden_act="gelu_pytorch_tanh",  # the form that DeepSpeed's layer has
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        model = transformers.BertForMaskedLM(bert)
    return model.to(dtype).train()


def _optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def _kinds(model: transformers.PreTrainedModel, family: Family, lr: float, compile: bool) -> dict[str, _Kind]:
    """Each way of taking a step, from the same weights."""
    own = _optimizer(model, lr)
    kinds = {EAGER: _Kind(model, own)}
    if compile:
        kinds["torch.compile"] = _Kind(timing.compiled(model), own)
    if family == "bert":
        layered = _with_deepspeeds_layers(model)
        kinds[OURS[family]] = _Kind(layered, _optimizer(layered, lr))
    else:
        kinds[OURS[family]] = _Kind(model, own, lambda: accelerate(model, loss="chunked"))
    return kinds


def _with_deepspeeds_layers(model: Any) -> Any:
    """A copy of a BERT whose encoder consists of DeepSpeed's layers, with its weights."""
    from deepspeed.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

    model = copy.deepcopy(model)
    config = model.config
    for index, layer in enumerate(model.bert.encoder.layer):
        attention = layer.attention
        projections = (attention.self.query, attention.self.key, attention.self.value)
        after_attention, after = attention.output, layer.output
        linears = [*projections, after_attention.dense, after_attention.LayerNorm]
        linears += [layer.intermediate.dense, after.dense, after.LayerNorm]
        settings = DeepSpeedTransformerConfig(
            batch_size=2,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            heads=config.num_attention_heads,
            attn_dropout_ratio=config.attention_probs_dropout_prob,
            hidden_dropout_ratio=config.hidden_dropout_prob,
            num_hidden_layers=config.num_hidden_layers,
            initializer_range=config.initializer_range,
            layer_norm_eps=config.layer_norm_eps,
            pre_layer_norm=False,
        )
        weights, biases = ([getattr(each, name) for each in linears] for name in ("weight", "bias"))
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its configuration
            theirs = DeepSpeedTransformerLayer(settings, weights, biases)
        model.bert.encoder.layer[index] = _Layer(theirs.to(after.dense.weight.dtype))
    return model.train()


class _Layer(nn.Module):
    """DeepSpeed's layer as transformers calls one of BERT's."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *rest: Any, **options: Any) -> Any:
        return self.layer(hidden_states, attention_mask)


def _ids(vocabulary: int, tokens: int) -> Tensor:
    return torch.randint(0, vocabulary, (2, tokens // 2), generator=torch.Generator().manual_seed(1))


def _passes(kind: _Kind, ids: Tensor) -> Tensor:
    loss: Tensor = kind.call(input_ids=ids, labels=ids)[0]
    torch.autograd.backward(loss)
    return loss


def _step(kind: _Kind, ids: Tensor) -> float:
    loss = _passes(kind, ids)
    kind.optimizer.step()
    kind.optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def _timed(kind: _Kind, ids: Tensor) -> tuple[float, float]:
    """Seconds of a step, and of the CPU."""
    with kind.context():
        wall, cpu = time.perf_counter(), time.process_time()
        _step(kind, ids)
        return time.perf_counter() - wall, time.process_time() - cpu


def _without_accelerator(
    sizes: _Sizes, family: Family, vocabulary: int, dtype: torch.dtype, tokens: int
) -> MeasuringProcess:
    given = {"sizes": sizes, "family": family, "vocabulary": vocabulary, "dtype": str(dtype).removeprefix("torch.")}
    arguments = json.dumps({**given, "tokens": tokens, "threads": torch.get_num_threads()})
    return MeasuringProcess(__name__, arguments, environment=_AS_TORCH_COMES)


def _serve(sizes: list[int], family: Family, vocabulary: int, dtype: str, tokens: int, threads: int) -> None:
    """What that process does."""
    torch.set_num_threads(threads)
    model = _model(_Sizes(*sizes), family, vocabulary, getattr(torch, dtype), dropout=0.1)
    kind, ids = _Kind(model, _optimizer(model, lr=1e-4)), _ids(vocabulary, tokens)
    assert "deepspeed" not in sys.modules, "DeepSpeed makes an accelerator"
    serve(lambda: _timed(kind, ids))


def _rows(
    sizes: _Sizes,
    family: Family,
    vocabulary: int,
    dtype: torch.dtype,
    tokens: int,
    turns: int,
    compile: bool,
    tell: Callable[[str], None],
) -> Iterator[Row]:
    model = _model(sizes, family, vocabulary, dtype, dropout=0.1)
    kinds = _kinds(model, family, lr=1e-4, compile=compile)
    ids = _ids(vocabulary, tokens)

    def measure(name: str) -> tuple[float, float]:
        wall, cpu = _timed(kinds[name], ids)
        tell(f"{family}, {vocabulary} words, {name}: {wall:.2f} s, {cpu:.2f} s of CPU")
        return wall, cpu

    measures: dict[str, Callable[[], Any]] = {name: functools.partial(measure, name) for name in kinds}
    with _without_accelerator(sizes, family, vocabulary, dtype, tokens) as process:
        measures[WITHOUT] = process.measure
        timing.in_turns(measures, _SETTLING)  # compiles, and makes what stays
        found = timing.in_turns(measures, turns)
    held = {name: _peak(kind, ids) for name, kind in kinds.items()}
    chunked = None if family == "bert" else OURS[family]
    peaks = _peaks(vocabulary, sizes.hidden, dtype, tokens, compile, chunked)
    if chunked is None:
        peaks[OURS[family]] = peaks[EAGER]
    long = _peaks(vocabulary, sizes.hidden, dtype, _LONG, False, chunked)
    for name, times in found.items():
        wall, cpu = ([a[clock] / b[clock] for a, b in zip(found[EAGER], times, strict=True)] for clock in (0, 1))
        yield Row(
            family,
            str(dtype).removeprefix("torch."),
            vocabulary,
            name,
            statistics.median(seconds for seconds, _ in times),
            statistics.median(wall),
            min(wall),
            max(wall),
            statistics.median(cpu),
            *_mib_and_share(held, name),
            *_mib_and_share(peaks, name),
            *_mib_and_share(long, name),
            {"seconds": timing.spread([seconds for seconds, _ in times])},
        )


def _mib_and_share(peaks: dict[str, int], name: str) -> tuple[float | None, float | None]:
    """Of eager's; None where there is no such measurement."""
    return (peaks[name] / 2**20, peaks[name] / peaks[EAGER]) if name in peaks else (None, None)


def _peak(kind: _Kind, ids: Tensor) -> int:
    """Bytes that a forward and a backward pass take."""
    with kind.context():
        peak = timing.peak_bytes(lambda: _passes(kind, ids))
    kind.optimizer.zero_grad(set_to_none=True)
    return peak


def _peaks(
    vocabulary: int, hidden: int, dtype: torch.dtype, tokens: int, compile: bool, chunked: str | None
) -> dict[str, int]:
    """Bytes that the last layer and the loss take, forward and backward, by whose they are."""
    input = torch.randn(tokens, hidden).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden).to(dtype).requires_grad_()
    target = torch.randint(0, vocabulary, (tokens,))

    def plain(input: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.cross_entropy(nn.functional.linear(input, weight).float(), target)

    losses: dict[str, Callable[..., Tensor]] = {
        EAGER: plain,
        **({"torch.compile": timing.compiled(plain)} if compile else {}),
        **({chunked: lambda input, weight: linear_cross_entropy(input, weight, target)} if chunked else {}),
    }

    def peak(loss: Callable[..., Tensor]) -> int:
        def step() -> object:
            return torch.autograd.grad(loss(input, weight), (input, weight))

        step()
        return timing.peak_bytes(step)

    return {name: peak(loss) for name, loss in losses.items()}


if __name__ == "__main__":
    _serve(**json.loads(sys.argv[1]))
