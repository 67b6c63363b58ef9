"""Tokens per second of a language model: transformers plain and compiled, CTranslate2, and on the SDK's ops."""

from __future__ import annotations

import contextlib
import copy
import functools
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ds_plugin_sdk.bench.timing import in_turns
from ds_plugin_sdk.integrations.transformers.weights import Weights

PROMPT, STEPS, ROUNDS = 128, 16, 5
PEER = "transformers, bfloat16"

Shape = Literal["gpt2", "llama"]


@dataclass(frozen=True)
class Row:
    """One implementation of one model, random weights, batch 1.

    Attributes:
        model: its shape and number of parameters.
        implementation: whose, and what the weights are read as.
        prompt_tokens_per_second: over a prompt of 128 tokens.
        decode_tokens_per_second: median step after it.
        times_plain: decode speed, in multiples of transformers' own in bfloat16.
        read_fraction: bytes of weights that a step must read, over its time and the rate at which this machine reads
            large memory.
    """

    model: str
    implementation: str
    prompt_tokens_per_second: float
    decode_tokens_per_second: float
    times_plain: float
    read_fraction: float


@dataclass(frozen=True)
class Speed:
    """Seconds of a prompt and of each step."""

    prompt: float
    steps: list[float]


Measure = Callable[[], Speed]


def run(shape: Shape = "llama", compiled: bool = True, ctranslate2: bool = True) -> list[Row]:
    """Measure all implementations in turn, in several rounds, so that noise falls on all alike.

    Args:
        shape: GPT-2 medium's, or a LLaMA of about the same size.
        compiled: compare with torch.compile too; it takes a minute.
        ctranslate2: compare with CTranslate2 in int8 too, if it is installed.
    """
    model = _model(shape)
    rate = _read_rate()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):  # a converter prints
        speeds = _in_rounds(_implementations(model, shape, compiled, Path(folder) if ctranslate2 else None))
    title = f"{shape}, {sum(parameter.numel() for parameter in model.parameters()) / 1e6:.0f} M"
    plain = statistics.median(speeds[PEER].steps)
    rows = []
    for name, speed in speeds.items():
        step = statistics.median(speed.steps)
        fraction = _bytes_read(model, name) / step / rate
        rows.append(Row(title, name, PROMPT / speed.prompt, 1 / step, plain / step, fraction))
    return rows


def _implementations(model: Any, shape: Shape, compiled: bool, folder: Path | None) -> dict[str, Measure]:
    """What measures each, by name; warm from the second call on. `folder`: for CTranslate2's model, if any."""
    measures: dict[str, Measure] = {PEER: lambda: _twice(model)}
    if compiled:
        forward = torch.compile(model.forward)
        measures["torch.compile, bfloat16"] = lambda: _compiled(model, forward)
    if folder is not None:
        measures["CTranslate2, int8"] = _ctranslate2(model, shape, folder)
    measures["ours, bfloat16"] = lambda: _ours(model, None)
    measures["ours, int8"] = lambda: _ours(model, "int8")
    measures["ours, int4"] = lambda: _ours(model, "int4")
    return measures


def _in_rounds(measures: dict[str, Measure]) -> dict[str, Speed]:
    """The median prompt of each, and the steps of all rounds but a first; what does not run here is left out."""
    run: dict[str, Measure] = {}
    for name, measure in measures.items():
        try:
            measure()
            run[name] = measure
        except Exception as error:
            warnings.warn(f"{name} is not compared: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=3)
    return {
        name: Speed(statistics.median(speed.prompt for speed in found), [step for s in found for step in s.steps])
        for name, found in in_turns(run, ROUNDS).items()
    }


def _model(shape: Shape) -> Any:
    import transformers

    torch.manual_seed(0)
    config = (
        transformers.GPT2Config(n_embd=1024, n_layer=24, n_head=16)
        if shape == "gpt2"
        else transformers.LlamaConfig(
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=16,
            vocab_size=32000,
            max_position_embeddings=2048,
        )
    )
    with torch.device("cpu"):
        return transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()


def _bytes_read(model: Any, implementation: str) -> float:
    """The weights that each step reads whole: of linear layers, by either of transformers' names."""
    itemsize = 0.5 if "int4" in implementation else 1 if "int8" in implementation else 2
    layers = [module for module in model.modules() if type(module).__name__ in ("Linear", "Conv1D")]
    # The layer that makes logits has 8 bits where others have 4.
    read = sum(layer.weight.numel() * (max(itemsize, 1) if layer is model.lm_head else itemsize) for layer in layers)
    return float(read)


def _dynamic(model: Any) -> Any:
    import transformers

    return transformers.DynamicCache(config=model.config)


@torch.no_grad()
def _measure(model: Any, cache: Any) -> Speed:
    tokens = torch.randint(0, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    logits = model(tokens, past_key_values=cache, logits_to_keep=1).logits
    prompt = time.perf_counter() - start
    steps = []
    for _ in range(STEPS):
        start = time.perf_counter()
        logits = model(logits[:, -1:].argmax(-1), past_key_values=cache, logits_to_keep=1).logits
        steps.append(time.perf_counter() - start)
    return Speed(prompt, steps)


def _twice(model: Any) -> Speed:
    """The second time: the first brings weights that were moved or unused for long to where they are read from."""
    _measure(model, _dynamic(model))
    return _measure(model, _dynamic(model))


def _ours(model: Any, weights: Weights) -> Speed:
    from ds_plugin_sdk.integrations.transformers import accelerate

    with accelerate(model, weights):
        return _twice(model)


def _compiled(model: Any, forward: Callable[..., Any]) -> Speed:
    import transformers

    # A cache of fixed size, which transformers says compilation needs.
    cache = transformers.StaticCache(config=model.config, max_cache_len=PROMPT + STEPS + 1)
    model.forward = forward
    try:
        _measure(model, cache)
        cache.reset()
        return _measure(model, cache)
    finally:
        del model.forward


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
        return Speed(first, [(whole - first) / STEPS])

    return measure


def _convert(model: Any, shape: Shape, folder: Path) -> Path:
    """CTranslate2's own loaders of these models, on this model; there is no tokenizer, so tokens get plain names."""
    from ctranslate2.converters import transformers as loaders

    names = [f"t{i}" for i in range(model.config.vocab_size)]
    loader = (loaders.GPT2Loader if shape == "gpt2" else loaders.LlamaLoader)()
    spec = loader.get_model_spec(copy.deepcopy(model).float())  # a copy: it takes the layers of some models away
    spec.register_vocabulary(names)
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "t0"
    spec.validate()
    spec.optimize(quantization="int8")
    target = folder / "model"
    target.mkdir()
    spec.save(str(target))
    return target


def _read_rate() -> float:
    """Bytes per second of reading large memory with all of torch's threads, in the largest pages there are."""
    from ds_plugin_sdk.integrations.transformers.weights import Arena

    memory = Arena(512 << 20, torch.device("cpu")).empty((64 << 20,), torch.int64).fill_(1)
    best = float("inf")
    for _ in range(7):
        start = time.perf_counter()
        memory.sum()
        best = min(best, time.perf_counter() - start)
    return memory.nbytes / best
