"""``sdk bench``: every speed the SDK claims, measured here, side by side with its peers."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from ds_plugin_sdk.cli.console import errors, output, print_json, results_alone, table
from ds_plugin_sdk.cli.needs_torch import needs_torch
from ds_plugin_sdk.errors import SdkError

bench = typer.Typer(
    name="bench",
    help="Measure the SDK beside its peers (torch, DeepSpeed, transformers ...); figures are medians.",
    no_args_is_help=True,
)

_JSON = typer.Option(False, "--json", help="Print JSON.")

Benchmark = Callable[..., None]


def _command(name: str) -> Callable[[Benchmark], Benchmark]:
    """Declare a command of `bench`, whose standard output has nothing of what the peers print."""

    def declare(function: Benchmark) -> Benchmark:
        @bench.command(name)
        @needs_torch
        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> None:
            with results_alone():
                function(*arguments, **options)

        return function

    return declare


def _show(title: str, rows: Sequence[Any], as_json: bool) -> None:
    found = [asdict(row) for row in rows]
    if as_json:
        print_json(found)
    else:
        _table(title, found)


def _one_of(value: str, *known: str) -> Any:
    """An option's value, if it is one of those that are known."""
    if value not in known:
        raise typer.BadParameter(f"'{value}' is not known; expected {' or '.join(known)}")
    return value


def _need(package: str, requirement: str) -> None:
    """Stop before anything is measured where a peer is not installed.

    Raises:
        SdkError: it is not.
    """
    from ds_plugin_sdk.accelerator import installed

    if not installed(package):
        raise SdkError(
            "this benchmark cannot run", why=f"{package} is not installed", hint=f"pip install {requirement}"
        )


def _table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Columns are those of any row, in order, but for those that have no value anywhere."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if value is not None and name != "spread")
    cells = [[_number(row.get(name)) for name in names] for row in rows]
    table(title, [name.replace("_", " ") for name in names], cells)


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)


@_command("jit")
def jit(
    deepspeed: bool = typer.Option(True, help="Also time DeepSpeed's own build of its op (about a minute)."),
    as_json: bool = _JSON,
) -> None:
    """Cold build of the Adam kernels, warm load, and eight processes at once."""
    if deepspeed:
        _need("deepspeed", "'ds-plugin-sdk[deepspeed]'")
    from ds_plugin_sdk.bench import jit as benchmark

    _show("JIT", benchmark.run(deepspeed=deepspeed), as_json)


@_command("import")
def import_cost(as_json: bool = _JSON) -> None:
    """What the SDK adds to `import torch` and `import deepspeed`."""
    _need("deepspeed", "'ds-plugin-sdk[deepspeed]'")
    from ds_plugin_sdk.bench import imports as benchmark

    _show("Import", benchmark.run(), as_json)


@_command("accelerator")
def accelerator(
    only: str = typer.Option("", help="Only calls whose names contain this text."), as_json: bool = _JSON
) -> None:
    """What DeepSpeed calls in a step, before a plugin is installed and after. Exit status 1: some call is slower."""
    _need("deepspeed", "'ds-plugin-sdk[deepspeed]'")
    from ds_plugin_sdk.bench import accelerator as benchmark

    rows = list(benchmark.run(only=only))
    _show("What DeepSpeed calls, microseconds", rows, as_json)
    if any(row.slower for row in rows):
        raise typer.Exit(1)


@_command("ops")
def ops(
    family: list[str] = typer.Option([], help="Only this family; may be repeated. All of them otherwise."),
    threads: list[int] = typer.Option([1], min=1, help="torch's threads; may be repeated."),
    dtype: list[str] = typer.Option(["float32", "bfloat16"], help="Only this dtype; may be repeated."),
    compile: bool = typer.Option(False, help="Measure torch.compile and DeepSpeed's own ops too (minutes)."),
    seconds: float = typer.Option(1.0, help="Time to spend on each case."),
    chart: Path | None = typer.Option(None, help="Draw FAMILY.png into this folder; needs matplotlib."),
    as_json: bool = _JSON,
) -> None:
    """The op families on this CPU, against torch, eager and compiled, DeepSpeed, and the memory's speed."""
    if compile:
        _need("deepspeed", "'ds-plugin-sdk[deepspeed]'")
    from ds_plugin_sdk.bench import ops as benchmark
    from ds_plugin_sdk.bench.chart import draw, require_matplotlib

    if chart is not None:
        require_matplotlib()
    found = {}
    for name in family or benchmark.FAMILIES:
        rows = benchmark.run(name, threads=threads, dtypes=dtype, compile=compile, seconds=seconds)
        found[name] = [asdict(row) for row in rows]
        if not as_json:
            _table(name, [_columns(row) for row in found[name]])
        if chart is not None:
            draw(name, rows, chart)
    if as_json:
        print_json(found)


def _columns(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `ops` with a column for each peer."""
    times = {f"times {peer}": value for peer, value in row["times"].items()}
    return {**{name: value for name, value in row.items() if name != "times"}, **times}


_SHAPES = ("gpt2", "llama", "phi3", "gemma3")
_SHAPE = typer.Option(
    "llama", help="gpt2, llama, phi3 or gemma3: GPT-2 medium's shape, or a LLaMA, Phi 3 or Gemma 3 of about that size."
)


@_command("decode")
def decode(
    shape: str = _SHAPE,
    compiled: bool = typer.Option(True, help="Compare with torch.compile too (a minute)."),
    rounds: int = typer.Option(10, min=1, help="Rounds in which all take turns."),
    as_json: bool = _JSON,
) -> None:
    """Tokens per second of transformers, torch.compile, CTranslate2, llama.cpp and transformers on our ops."""
    _need("transformers", "transformers")
    from ds_plugin_sdk.bench import decode as benchmark

    _show("Decode", benchmark.run(_one_of(shape, *_SHAPES), compiled, rounds=rounds), as_json)


@_command("contexts")
def contexts(
    batch: list[int] = typer.Option([1, 2, 4, 8, 16, 32], min=1, help="Sequences at once; may be repeated."),
    context: list[int] = typer.Option([128, 512, 2048, 8192], min=2, help="Tokens of a sequence; may be repeated."),
    shape: str = _SHAPE,
    as_json: bool = _JSON,
) -> None:
    """Tokens per second of larger batches, and after longer contexts: transformers and transformers on our ops."""
    _need("transformers", "transformers")
    from ds_plugin_sdk.bench import contexts as benchmark

    rows = benchmark.run(batch, context, tell=errors.print, shape=_one_of(shape, *_SHAPES))
    _show("Batches and contexts", list(rows), as_json)


@_command("perplexity")
def perplexity(
    model: Path = typer.Argument(
        help="Folder of a causal language model and its tokenizer, as transformers saves them."
    ),
    text: Path = typer.Argument(help="A file of text in UTF-8."),
    dtype: str = typer.Option("bfloat16", help="float32, bfloat16 or float16: the model's."),
    length: int = typer.Option(256, min=2, help="Tokens of a window; no more than the model has positions."),
    most: int = typer.Option(64, min=1, help="Windows, from the text's beginning."),
    as_json: bool = _JSON,
) -> None:
    """Perplexity of a model on a text: transformers' own, and on our ops: weights in int8, int4, cache in int8."""
    _need("transformers", "transformers")
    from ds_plugin_sdk.bench import perplexity as benchmark

    rows = benchmark.run(model, text, _one_of(dtype, "float32", "bfloat16", "float16"), length, most)
    _show(f"Perplexity, {dtype}", rows, as_json)


@_command("training")
def training(
    example: Path = typer.Argument(
        exists=True, file_okay=False, help="The folder of the demo: examples/tiny_gpt of the repository."
    ),
    steps: int = typer.Option(60, min=1, help="Steps of each run; the tolerance is for up to 60."),
    repeats: int = typer.Option(3, min=1, help="Runs of each kind."),
    out: Path | None = typer.Option(None, help="Keep here what the runs write."),
    as_json: bool = _JSON,
) -> None:
    """DeepSpeed training on its in-tree CPU accelerator and on ds-plugin-cpu. Exit status 1: the losses differ."""
    _need("deepspeed", "'ds-plugin-sdk[deepspeed]'")
    from ds_plugin_sdk.bench import training as benchmark
    from ds_plugin_sdk.conformance.environment import processor

    with tempfile.TemporaryDirectory() as folder:
        times, differences = benchmark.run(
            example, out or Path(folder), steps=steps, repeats=repeats, tell=errors.print
        )
    agree = all(each.agrees for each in differences)
    if as_json:
        found = {"steps": [asdict(row) for row in times], "losses": [asdict(row) for row in differences]}
        print_json({**found, "tolerance": benchmark.TOLERANCE})
    else:
        cores = len(os.sched_getaffinity(0))
        _show(f"Seconds a step, {benchmark.RANKS} ranks, {cores} cores of {processor()}", times, False)
        what = f"Losses of {steps} steps: largest difference, tolerance {benchmark.TOLERANCE:g} relative"
        _show(f"{what}: {'they agree' if agree else 'they DIFFER'}", differences, False)
    raise typer.Exit(int(not agree))


@_command("step")
def step(
    model: str = typer.Option("llama", help="llama, gpt2 or bert."),
    shape: str = typer.Option("15m", help="15m or 110m: the model's shape, by a LLaMA's parameters with 32,000 words."),
    vocabulary: list[int] = typer.Option([], min=1, help="Words, instead of the model's own; may be repeated."),
    dtype: str = typer.Option("float32", help="float32 or bfloat16."),
    tokens: int = typer.Option(512, min=4, help="Tokens of a batch."),
    turns: int = typer.Option(5, min=1, help="Steps of each kind."),
    compiled: bool = typer.Option(True, help="Compare with torch.compile too (minutes)."),
    agreement: int = typer.Option(200, min=0, help="Steps of a small model whose losses are compared; 0 for none."),
    as_json: bool = _JSON,
) -> None:
    """A training step of a model of transformers by ours, beside its own code, eager and compiled.

    Ours is `accelerate` with a chunked loss for llama and gpt2, and DeepSpeed's transformer layer for bert.
    """
    _need("transformers", "transformers")
    from ds_plugin_sdk.bench import step as benchmark

    family = _one_of(model, "llama", "gpt2", "bert")
    if family == "bert":
        _need("deepspeed", "'ds-plugin-sdk[deepspeed]'")
    rows = list(
        benchmark.run(
            _one_of(shape, "15m", "110m"),
            family=family,
            vocabularies=tuple(vocabulary),
            dtype=_one_of(dtype, "float32", "bfloat16"),
            tokens=tokens,
            turns=turns,
            compile=compiled,
            tell=errors.print,
        )
    )
    losses = [benchmark.agreement(agreement, family=family, dtype=dtype)] if agreement else []
    if as_json:
        found = {"steps": [asdict(row) for row in rows], "losses": [asdict(row) for row in losses]}
        print_json(found)
        return
    _show(f"Training step, {shape}, {dtype}, {tokens} tokens", rows, False)
    if losses:
        _show("Losses by its own code and by ours", losses, False)


@_command("losses")
def losses(
    project: Path = typer.Argument(
        exists=True, file_okay=False, help="The folder of a plugin that `sdk new-plugin` made, installed here."
    ),
    as_json: bool = _JSON,
) -> None:
    """A generated plugin's training against the CPU's: every ZeRO stage, dtype and launcher. Exit status 1: differ."""
    _need("deepspeed", "'ds-plugin-sdk[deepspeed]'")
    from ds_plugin_sdk.bench import losses as benchmark

    rows = list(benchmark.run(project))
    _show("Losses, largest difference", rows, as_json)
    raise typer.Exit(int(not all(row.agrees for row in rows)))


@_command("all-reduce")
def all_reduce(
    ranks: int = typer.Option(2, min=1, help="Processes on this machine, one thread each."),
    own: bool = typer.Option(False, help="Measure DeepSpeed's own op in place of the CPU plugin's."),
    mpi: list[Path] = typer.Option(
        [], help="Compare with this MPI too: a folder from 'pip install --prefix FOLDER mpich mpi4py'; may be repeated."
    ),
    as_json: bool = _JSON,
) -> None:
    """DeepSpeed's inference_all_reduce on the CPU beside all_reduce over gloo, and MPIs' Allreduce."""
    _need("deepspeed", "'ds-plugin-sdk[deepspeed]'")
    from ds_plugin_sdk.bench import all_reduce as benchmark

    _show("All-reduce", benchmark.run(ranks, own, mpi), as_json)


@_command("async-io")
def async_io(
    folder: Path = typer.Option(
        Path(), exists=True, file_okay=False, help="Where the file is made: on the disk to measure."
    ),
    mib: int = typer.Option(128, min=1, help="Size of the file."),
    deepspeed: bool = typer.Option(True, help="Also DeepSpeed's own op, where libaio is installed; compiled first."),
    seconds: float = typer.Option(5.0, help="Time to spend on each size of blocks and number of threads."),
    chart: Path | None = typer.Option(None, help="Draw async_io.png into this folder; needs matplotlib."),
    as_json: bool = _JSON,
) -> None:
    """Files: io_uring, threads and Python, DeepSpeed's own op (libaio) and plain calls, past the page cache."""
    from ds_plugin_sdk.bench import async_io as benchmark
    from ds_plugin_sdk.bench.chart import draw_files, require_matplotlib

    if chart is not None:
        require_matplotlib()
    rows = list(benchmark.run(folder, mib << 20, deepspeed=deepspeed, seconds=seconds, tell=errors.print))
    _show("Files", rows, as_json)
    if chart is not None:
        draw_files(rows, chart)


@_command("accuracy")
def accuracy(as_json: bool = _JSON) -> None:
    """Worst error of each optimizer kernel against float64 formulas."""
    from ds_plugin_sdk.bench import accuracy as benchmark

    _show("Error against float64", benchmark.run(), as_json)


@_command("memory")
def memory(
    threads: list[int] = typer.Option([1], min=1, help="torch's threads; may be repeated."), as_json: bool = _JSON
) -> None:
    """How fast this machine copies and reads large memory."""
    from ds_plugin_sdk.bench import memory as benchmark

    _show("Memory", list(benchmark.run(threads)), as_json)


@_command("scale")
def scale(
    wheels: Path | None = typer.Option(None, help="A folder with wheels, whose sizes are rows too."),
    as_json: bool = _JSON,
) -> None:
    """What the SDK itself costs with 1 to 100 plugins, and with 1 to 64 processes on one cache."""
    from ds_plugin_sdk.bench import scale as benchmark

    _show("The SDK at scale", list(benchmark.run(wheels)), as_json)


@_command("all")
def everything(
    report: Path = typer.Option(help="FOLDER/NAME.json; the page NAME.md and the charts in img/NAME go beside it."),
    only: list[str] = typer.Option([], help="Only this benchmark, by its key in the report; may be repeated."),
    resume: bool = typer.Option(False, help="Keep what the report has, but for what failed and what --only names."),
    minutes: float = typer.Option(60.0, min=0, help="For all: what would begin later is not begun."),
    example: Path | None = typer.Option(None, help="The demo: examples/tiny_gpt of the repository."),
    wheels: Path | None = typer.Option(None, help="A folder with wheels, whose sizes are figures too."),
    disk: Path = typer.Option(Path(), help="A folder on the disk to measure."),
    mpi: list[Path] = typer.Option([], help="An MPI, as for `sdk bench all-reduce`; may be repeated."),
) -> None:
    """All of these, one after the other, each within a time limit: a report, a page and charts."""
    from ds_plugin_sdk.bench import report as benchmark
    from ds_plugin_sdk.bench.suite import Settings

    if report.suffix != ".json":
        raise typer.BadParameter(f"{report} is no .json; give a file, as {report / 'performance.json'}")
    settings = Settings(
        example=None if example is None else str(example.resolve()),
        wheels=None if wheels is None else str(wheels.resolve()),
        disk=str(disk.resolve()),
        mpis=tuple(str(each.resolve()) for each in mpi),
        threads=min(2, len(os.sched_getaffinity(0))),
    )
    tell = functools.partial(errors.print, markup=False, highlight=False, soft_wrap=True)
    found = benchmark.run(report, settings, names=only, resume=resume, minutes=minutes, tell=tell)
    failed = [name for name, result in found.results.items() if result.failed]
    output.print(f"{benchmark.page_of(report)}: {len(found.results)} benchmarks, {len(failed)} not whole")


@_command("compare")
def compare(
    before: Path = typer.Argument(help="The report of `sdk bench all`."),
    after: Path = typer.Argument(help="Another one."),
    least: float = typer.Option(0.05, min=0, help="Differences below this part are never told."),
    any_machine: bool = typer.Option(False, help="Compare reports of two machines too."),
    as_json: bool = _JSON,
) -> None:
    """What is faster or slower in the second of two reports. Exit status 1: something is slower."""
    from ds_plugin_sdk.bench import compare as benchmark
    from ds_plugin_sdk.bench.report import load

    rows = benchmark.run(load(before), load(after), least=least, any_machine=any_machine)
    told = [row for row in rows if row.verdict != benchmark.SAME]
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        if told:
            _show("Speed after, in multiples of before", told, False)
        output.print(f"{len(rows)} figures: {len(rows) - len(told)} within noise")
    raise typer.Exit(int(any(row.verdict == benchmark.SLOWER for row in rows)))
