"""``sdk bench``: every speed the SDK claims, measured here, side by side with its peers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import typer

from ds_plugin_sdk.cli.console import output, table

bench = typer.Typer(name="bench", help="Measure, side by side with the peers, medians.", no_args_is_help=True)

_JSON = typer.Option(False, "--json", help="Print JSON.")


def _show(title: str, rows: Sequence[Any], as_json: bool) -> None:
    if as_json:
        output.print_json(json.dumps([asdict(row) for row in rows]))
        return
    columns = [field.name.replace("_", " ") for field in fields(rows[0])]
    table(title, columns, [[_number(value) for value in vars(row).values()] for row in rows])


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)


@bench.command("jit")
def jit(
    deepspeed: bool = typer.Option(True, help="Also time DeepSpeed's own build of its op (about a minute)."),
    as_json: bool = _JSON,
) -> None:
    """Cold build of the Adam kernels, warm load, and eight processes at once."""
    from ds_plugin_sdk.bench import jit as benchmark

    _show("JIT", benchmark.run(deepspeed=deepspeed), as_json)


@bench.command("import")
def import_cost(as_json: bool = _JSON) -> None:
    """What the SDK adds to `import torch` and `import deepspeed`."""
    from ds_plugin_sdk.bench import imports as benchmark

    _show("Import", benchmark.run(), as_json)


@bench.command("adam")
def adam(as_json: bool = _JSON) -> None:
    """Adam against torch's fused and foreach Adam and DeepSpeed's CPUAdam."""
    from ds_plugin_sdk.bench import adam as benchmark

    _show("Adam", benchmark.run(), as_json)


@bench.command("lamb")
def lamb(
    compiled: bool = typer.Option(True, help="Also time torch.compile, which compiles for minutes."),
    as_json: bool = _JSON,
) -> None:
    """LAMB against torch's foreach functions, torch.compile of them, and our Adam."""
    from ds_plugin_sdk.bench import lamb as benchmark

    _show("LAMB", benchmark.run(compiled=compiled), as_json)


@bench.command("sparse_attention")
def sparse_attention(as_json: bool = _JSON) -> None:
    """Sparse attention at 4096 tokens against dense: time and memory."""
    from ds_plugin_sdk.bench import sparse_attention as benchmark

    _show("Sparse attention", benchmark.run(), as_json)


@bench.command("quantizer")
def quantizer(as_json: bool = _JSON) -> None:
    """Quantizing and dequantizing against the same in torch, and against the memory's speed."""
    from ds_plugin_sdk.bench import quantizer as benchmark

    _show("Quantizer", benchmark.run(), as_json)


@bench.command("decode")
def decode(
    shape: str = typer.Option("llama", help="gpt2 or llama: GPT-2 medium's shape, or a LLaMA of that size."),
    compiled: bool = typer.Option(True, help="Compare with torch.compile too (a minute)."),
    as_json: bool = _JSON,
) -> None:
    """Tokens per second of transformers, torch.compile, CTranslate2 and transformers on our ops."""
    from ds_plugin_sdk.bench import decode as benchmark

    _show("Decode", benchmark.run("gpt2" if shape == "gpt2" else "llama", compiled=compiled), as_json)


@bench.command("transformer")
def transformer(
    compiled: bool = typer.Option(True, help="Compare with torch.compile too (some seconds for each row)."),
    as_json: bool = _JSON,
) -> None:
    """The transformer training layer and its ops against torch, eager and compiled, and against the memory's speed."""
    from ds_plugin_sdk.bench import transformer as benchmark

    _show("Transformer", benchmark.run(compiled=compiled), as_json)


@bench.command("accuracy")
def accuracy(as_json: bool = _JSON) -> None:
    """Worst error of each optimizer kernel against float64 formulas."""
    from ds_plugin_sdk.bench import accuracy as benchmark

    _show("Error against float64", benchmark.run(), as_json)


@bench.command("inference")
def inference(
    compiled: bool = typer.Option(True, help="Compare with torch.compile too (some seconds for each row)."),
    as_json: bool = _JSON,
) -> None:
    """The inference ops against torch, eager and compiled, on shapes of decoding and of prompts."""
    from ds_plugin_sdk.bench import inference as benchmark

    _show("Inference ops", benchmark.run(compiled=compiled), as_json)
