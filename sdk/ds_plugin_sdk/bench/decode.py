"""Tokens per second of a language model: transformers plain, compiled and on the SDK's ops, CTranslate2, llama.cpp."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import operator
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from ds_plugin_sdk.bench import gguf_model
from ds_plugin_sdk.bench.measuring_process import MeasuringProcess, serve
from ds_plugin_sdk.bench.memory import ReadRate
from ds_plugin_sdk.bench.timing import LateError, Spread, at_most, spread
from ds_plugin_sdk.integrations.transformers.weights import Weights

PROMPT, STEPS, ROUNDS = 128, 8, 10
PLAIN = ("transformers, bfloat16", "transformers, float32")
# Seconds that a first call may take, and compiling before it. The product of bfloat16 with weights laid as GPT-2's
# takes minutes on a CPU without instructions for it.
PATIENCE, COMPILING = 60.0, 120.0

# Bytes of a weight, and of one of the layer that makes logits: where others have 4 bits it has 8, or llama.cpp's Q6_K.
_ITEMSIZES = {
    "float32": (4, 4),
    "bfloat16": (2, 2),
    "int8": (1, 1),
    "int4": (0.5, 1),
    "Q8_0": (1, 1),
    "Q4_0": (0.5, 0.75),
}

Shape = Literal["gpt2", "llama", "phi3", "gemma3"]


@dataclass(frozen=True)
class Row:
    """One implementation of one model, random weights, batch 1.

    Attributes:
        model: its shape and number of parameters.
        implementation: whose, and what the weights are read as.
        threads: torch's.
        prompt_tokens_per_second: over a prompt of 128 tokens.
        decode_tokens_per_second: median step after it.
        times_plain: decode speed, in multiples of transformers' own in bfloat16 or in float32, whichever is faster.
        read_fraction: bytes of weights that a step must read, over its time and the rate at which this machine reads
            large memory just before and after.
        not_compared: why there is no figure.
        spread: of both speeds.
    """

    model: str
    implementation: str
    threads: int
    prompt_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    times_plain: float | None = None
    read_fraction: float | None = None
    not_compared: str | None = None
    spread: dict[str, Spread] = field(default_factory=dict)


@dataclass(frozen=True)
class Speed:
    """Seconds of each prompt and of each step, and at which rate memory was read around each step."""

    prompts: list[float]
    steps: list[float]
    rates: list[float] = field(default_factory=list)


# A prompt and steps after it. What is measured is kept ready between calls.
Measure = Callable[[], Speed]


def run(
    shape: Shape = "llama",
    compiled: bool = True,
    ctranslate2: bool = True,
    rounds: int = ROUNDS,
    llama_cpp: bool = True,
) -> list[Row]:
    """Measure all implementations in turn, in many short rounds: the rate at which a machine that others use too reads
    memory may change by half within seconds. All models are in memory at once, some 10 GB.

    Args:
        shape: GPT-2 medium's, or a LLaMA, Phi 3 or Gemma 3 of about the same size.
        compiled: compare with torch.compile too; it takes a minute.
        ctranslate2: compare with CTranslate2 in int8 too, if it is installed.
        rounds: that count.
        llama_cpp: compare with llama.cpp too, if ``llama-cpp-python`` and ``gguf`` are installed.
    """
    model = model_of(shape)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(sys.stderr),  # a converter prints
        contextlib.ExitStack() as kept,
    ):
        measures = _implementations(model, shape, compiled, ctranslate2, llama_cpp, Path(folder), kept)
        speeds, absent = _in_rounds(measures, rounds, ReadRate())
    title = f"{shape}, {sum(parameter.numel() for parameter in model.parameters()) / 1e6:.0f} M"
    rates = {name: [1 / each for each in speed.steps] for name, speed in speeds.items()}
    plain = max((statistics.median(rates[name]) for name in PLAIN if name in rates), default=None)

    def row(name: str) -> Row:
        if name in absent:
            return Row(title, name, torch.get_num_threads(), not_compared=absent[name])
        speed, steps = speeds[name], rates[name]
        prompts = [PROMPT / each for each in speed.prompts]
        shares = [_bytes_read(model, name) * step / rate for step, rate in zip(steps, speed.rates, strict=True)]
        prompt, decode = statistics.median(prompts), statistics.median(steps)
        return Row(
            title,
            name,
            torch.get_num_threads(),
            prompt,
            decode,
            plain and decode / plain,
            statistics.median(shares),
            spread={"prompt_tokens_per_second": spread(prompts), "decode_tokens_per_second": spread(steps)},
        )

    return [row(name) for name in measures]


def _implementations(
    model: Any,
    shape: Shape,
    compiled: bool,
    ctranslate2: bool,
    llama_cpp: bool,
    folder: Path,
    kept: contextlib.ExitStack,
) -> dict[str, Measure]:
    """What measures each, by name; made ready by the first call.

    Args:
        folder: for models in formats of others.
        kept: what is ready until then.
    """
    measures: dict[str, Measure] = {PLAIN[0]: lambda: _measure(model)}
    whole = copy.deepcopy(model).float()
    measures[PLAIN[1]] = lambda: _measure(whole)
    if compiled:
        measures["torch.compile, bfloat16"] = _compiled(copy.deepcopy(model))
    if ctranslate2:
        measures["CTranslate2, int8"] = _ctranslate2(model, shape, folder)
    if llama_cpp:
        measures |= _llama_cpp(model, folder, kept)
    measures["ours, bfloat16"] = _ours(model, None, kept)
    measures["ours, int8"] = _ours(model, "int8", kept)
    measures["ours, int4"] = _ours(model, "int4", kept)
    return measures


def _in_rounds(
    measures: dict[str, Measure], rounds: int, read_rate: Callable[[], float]
) -> tuple[dict[str, Speed], dict[str, str]]:
    """What each took in all rounds but a first; and why, of the peers that do not run here, take too long or crash."""
    run, absent = dict(measures), dict[str, str]()
    found: dict[str, list[Speed]] = {name: [] for name in run}

    @contextlib.contextmanager
    def noted(name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, LateError) as error:
            if name.startswith("ours"):
                raise
            absent[name] = f"{type(error).__name__}: {error}"
            del run[name], found[name]

    for name, measure in measures.items():
        # Ours may compile its kernels first; where that is stopped an op is its reference implementation.
        patience = 0 if name.startswith("ours") else PATIENCE + COMPILING * name.startswith("torch.compile")
        with noted(name), at_most(patience, "the first call"):
            measure()
    for _ in range(rounds):
        for name, measure in list(run.items()):
            with noted(name):
                found[name].append(_with_rate(measure, read_rate))
    speeds = {
        name: Speed(*(list(itertools.chain(*values)) for values in zip(*map(_values, each), strict=True)))
        for name, each in found.items()
    }
    return speeds, absent


_values = operator.attrgetter("prompts", "steps", "rates")


def _with_rate(measure: Measure, read_rate: Callable[[], float]) -> Speed:
    before = read_rate()
    speed = measure()
    rate = (before + read_rate()) / 2
    return replace(speed, rates=[rate] * len(speed.steps))


def model_of(shape: Shape, positions: int = 2048) -> Any:
    """A model of a shape with random weights in bfloat16, whose longest context is `positions`."""
    import transformers

    torch.manual_seed(0)
    with torch.device("cpu"):
        return transformers.AutoModelForCausalLM.from_config(_config(shape, positions)).to(torch.bfloat16).eval()


def _config(shape: Shape, positions: int) -> Any:
    import transformers

    if shape == "gpt2":
        return transformers.GPT2Config(n_embd=1024, n_layer=24, n_head=16, n_positions=positions)
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 32000,
        "max_position_embeddings": positions,
    }
    if shape == "phi3":
        return transformers.Phi3Config(**sizes, pad_token_id=0)
    if shape == "gemma3":  # heads and window of its smallest model
        heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512}
        return transformers.Gemma3TextConfig(**{**sizes, **heads})
    return transformers.LlamaConfig(**sizes)


def _bytes_read(model: Any, implementation: str) -> float:
    """The weights, without scales, that each step reads whole: of linear layers, by either of transformers' names."""
    itemsize, head = _ITEMSIZES[implementation.split(", ")[1]]
    layers = [module for module in model.modules() if type(module).__name__ in ("Linear", "Conv1D")]
    return float(sum(layer.weight.numel() * (head if layer is model.lm_head else itemsize) for layer in layers))


def as_argument(model: Any, cache: Any) -> dict[str, Any]:
    """A cache by the name that a model's forward has for it: transformers 5.24 changed it."""
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    return {name: cache}


def _dynamic(model: Any) -> Any:
    import transformers

    return transformers.DynamicCache(config=model.config)


@torch.no_grad()
def _measure(model: Any, cache: Any = None) -> Speed:
    options = as_argument(model, _dynamic(model) if cache is None else cache)
    return _timed(lambda tokens: model(tokens, **options, logits_to_keep=1).logits, _prompt())


def _prompt() -> Tensor:
    return torch.randint(0, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(0))


def _timed(logits_after: Callable[[Tensor], Tensor], tokens: Tensor) -> Speed:
    """A prompt ``[1, tokens]`` and greedy steps after it; logits are ``[1, 1, vocab_size]``."""
    start = time.perf_counter()
    logits = logits_after(tokens)
    prompt = time.perf_counter() - start
    steps = []
    for _ in range(STEPS):
        start = time.perf_counter()
        logits = logits_after(logits.argmax(-1))
        steps.append(time.perf_counter() - start)
    return Speed([prompt], steps)


def _ours(model: Any, weights: Weights, kept: contextlib.ExitStack) -> Measure:
    from ds_plugin_sdk.integrations.transformers import accelerate

    @functools.cache
    def ready() -> Any:
        accelerated = copy.deepcopy(model)
        kept.enter_context(accelerate(accelerated, weights))
        return accelerated

    return lambda: _measure(ready())


def _compiled(model: Any) -> Measure:
    import transformers

    # A cache of fixed size, which transformers says compilation needs.
    cache = transformers.StaticCache(config=model.config, max_cache_len=PROMPT + STEPS + 1)
    model.forward = torch.compile(model.forward)

    def measure() -> Speed:
        cache.reset()
        return _measure(model, cache)

    return measure


def _ctranslate2(model: Any, shape: Shape, folder: Path) -> Measure:
    """CTranslate2 generates: a prompt alone, and a prompt with steps after it."""
    path = functools.cache(lambda: str(_convert(model, shape, folder)))
    prompt = [[f"t{i}" for i in range(PROMPT)]]

    def measure() -> Speed:
        import ctranslate2

        # Created again each time: while it lives, its threads take time from torch's.
        generator = ctranslate2.Generator(
            path(), device="cpu", compute_type="int8", intra_threads=torch.get_num_threads()
        )

        def seconds(tokens: int) -> float:
            start = time.perf_counter()
            generator.generate_batch(
                prompt,
                max_length=tokens,
                min_length=tokens,
                include_prompt_in_result=False,
                cache_static_prompt=False,
            )
            return time.perf_counter() - start

        seconds(STEPS)
        first, whole = seconds(1), seconds(1 + STEPS)
        return Speed([first], [(whole - first) / STEPS])

    return measure


def _convert(model: Any, shape: Shape, folder: Path) -> Path:
    """CTranslate2's own loaders of these models, on this model; there is no tokenizer, so tokens get plain names."""
    from ctranslate2.converters import transformers as loaders

    names = [f"t{i}" for i in range(model.config.vocab_size)]
    kinds = {"gpt2": "GPT2Loader", "llama": "LlamaLoader", "phi3": "Phi3Loader", "gemma3": "Gemma3Loader"}
    loader = getattr(loaders, kinds[shape])()
    copied = copy.deepcopy(model).float()  # a copy: the loader takes the layers of some models away
    if shape == "phi3":  # what the loader looks for was there before transformers 5
        copied.config.rope_scaling = None
        for layer in copied.model.layers:
            layer.self_attn.rotary_emb = SimpleNamespace(long_factor=None, short_factor=None)
    spec = loader.get_model_spec(copied)
    spec.register_vocabulary(names)
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "t0"
    spec.validate()
    spec.optimize(quantization="int8")
    target = folder / "model"
    target.mkdir()
    spec.save(str(target))
    return target


def _llama_cpp(model: Any, folder: Path, kept: contextlib.ExitStack) -> dict[str, Measure]:
    """llama.cpp on files of these weights: as they are, and as it quantizes them itself."""

    @functools.cache
    def whole() -> Path:
        import llama_cpp  # noqa: F401  # tried before the large file is written

        file = folder / "model.gguf"
        gguf_model.write(model, file)
        return file

    def measure_of(file: Callable[[], Path]) -> Measure:
        ready = functools.cache(lambda: kept.enter_context(_process(file())))
        return lambda: Speed(**ready().measure())

    def quantized(type: gguf_model.Type) -> Path:
        return gguf_model.quantize(whole(), type)

    return {
        "llama.cpp, bfloat16": measure_of(whole),
        "llama.cpp, Q8_0": measure_of(lambda: quantized("Q8_0")),
        "llama.cpp, Q4_0": measure_of(lambda: quantized("Q4_0")),
    }


def _process(file: Path) -> MeasuringProcess:
    """llama.cpp's: if it crashes, others are measured."""
    return MeasuringProcess(__name__, str(file), str(torch.get_num_threads()))


def _serve(file: Path) -> None:
    """What llama.cpp's process does."""
    with gguf_model.loaded(file, PROMPT + STEPS) as generation:

        def logits_after(tokens: Tensor) -> Tensor:
            return generation.logits(tokens[0].tolist()).view(1, 1, -1)

        def measure() -> dict[str, float]:
            generation.restart()
            return asdict(_timed(logits_after, _prompt()))

        serve(measure)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    _serve(Path(sys.argv[1]))
