"""All benchmarks that a report has, each in a process of its own that ends in time.

python -m ds_plugin_sdk.bench.suite NAME SETTINGS FILE     what such a process is
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ds_plugin_sdk.bench import program
from ds_plugin_sdk.settings import child_environment


@dataclass(frozen=True)
class Settings:
    """What a whole run is given.

    Attributes:
        example: the folder of the demo, for `sdk bench training`; None leaves its row empty.
        wheels: a folder with wheels, whose sizes are rows.
        disk: a folder on the disk that files are written to.
        mpis: folders of MPIs, as `sdk bench all-reduce --mpi` has them.
        threads: the most that torch takes; all is measured with one thread too.
    """

    example: str | None
    wheels: str | None
    disk: str
    mpis: tuple[str, ...]
    threads: int

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of threads to measure with."""
        return tuple(sorted({1, self.threads}))


@dataclass(frozen=True)
class Benchmark:
    """One of them.

    Attributes:
        title: of its section on the page.
        command: that measures the same alone.
        about: what is measured, for those who read its table.
        run: gives the rows.
        limit: seconds after which it is stopped: a few times what it takes on two idle cores.
        one_thread: torch has one thread, where the benchmark does not set the number itself.
        page: of the documentation, with formulas and limits.
    """

    title: str
    command: str
    about: str
    run: Callable[[Settings], Iterable[Any]]
    limit: int
    one_thread: bool = False
    page: str = ""


@dataclass(frozen=True)
class Result:
    """What became of a benchmark.

    Attributes:
        rows: as its module gives them; those before it failed, if it did.
        notes: which peers are not compared, and why.
        failed: why there are no more rows.
        seconds: that it took.
        others: the part of all cores that other programs took meanwhile.
        begun: when, by the clock of the machine, ISO 8601; empty in reports of before.
    """

    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    failed: str | None = None
    seconds: float = 0.0
    others: float = 0.0
    begun: str = ""


def _of(module: str, **options: Any) -> Callable[[Settings], Iterable[Any]]:
    def run(settings: Settings) -> Iterable[Any]:
        yield from _module(module).run(**options)

    return run


def _module(name: str) -> Any:
    return importlib.import_module(f"ds_plugin_sdk.bench.{name}")


def _training(settings: Settings) -> Iterable[Any]:
    if settings.example is None:
        raise RuntimeError("the demo is not here; --example names its folder, examples/tiny_gpt of the repository")
    with tempfile.TemporaryDirectory() as folder:
        times, _ = _module("training").run(Path(settings.example), Path(folder), steps=20, repeats=2)
    return list(times)


def _step(settings: Settings) -> Iterable[Any]:
    for family, words in (("llama", 32_000), ("llama", 128_256), ("gpt2", 50_257)):
        yield from _module("step").run(family=family, vocabularies=(words,), turns=7)
    yield from _module("step").run(family="bert", turns=7)


def _step_bfloat16(settings: Settings) -> Iterable[Any]:
    for family, words in (("llama", 32_000), ("llama", 128_256), ("gpt2", 50_257)):
        yield from _module("step").run(family=family, vocabularies=(words,), dtype="bfloat16", turns=7)


def _agreement(settings: Settings) -> Iterable[Any]:
    for family in ("llama", "gpt2", "bert"):
        yield _module("step").agreement(200, family=family)
    yield _module("step").agreement(200, family="llama", dtype="bfloat16")


def _files(settings: Settings) -> Iterable[Any]:
    yield from _module("async_io").run(Path(settings.disk), seconds=1.0)


def _ranks(settings: Settings) -> Iterable[Any]:
    yield from _module("all_reduce").by_ranks(mpis=[Path(mpi) for mpi in settings.mpis])


def _scale(settings: Settings) -> Iterable[Any]:
    yield from _module("scale").run(Path(settings.wheels) if settings.wheels else None, cold=2)


_DTYPES = ("float32", "bfloat16")


def _family(
    title: str,
    name: str,
    about: str,
    page: str,
    limit: int = 300,
    seconds: float = 0.1,
    dtypes: tuple[str, ...] = _DTYPES,
) -> Benchmark:
    def run(settings: Settings) -> Iterable[Any]:
        for count, dtype in itertools.product(settings.counts, dtypes):
            yield from _module("ops").run(name, threads=[count], dtypes=[dtype], seconds=seconds)

    command = f"sdk bench ops --family {name} --threads 1 --threads 2 --seconds {seconds:g}"
    if dtypes != _DTYPES:
        command += "".join(f" --dtype {dtype}" for dtype in dtypes)
    return Benchmark(title, command, about, run, limit, page=page)


def _decode(shape: str, compiled: bool, one_thread: bool, limit: int) -> Benchmark:
    command = f"sdk bench decode --shape {shape}" + ("" if compiled else " --no-compiled")
    about = (
        "Tokens per second of a model of some 360 M parameters, random weights, batch 1: a prompt of 128 tokens, and 8"
        " steps after it, ten times in turns. The read fraction is of the rate at which memory is read just before and"
        " after: on a machine that others use too that changes by half within seconds. llama.cpp has a file of the same"
        " weights in bfloat16, and what it quantizes them to: 8 bits,"
        " and 4 bits but for the layer that makes logits, which has 6, with a scale for each 32 weights."
    )
    model = {"gpt2": "GPT-2 medium", "llama": "a LLaMA", "phi3": "a Phi 3", "gemma3": "a Gemma 3"}[shape]
    return Benchmark(
        f"Decoding, {model}, {'one thread' if one_thread else 'two threads'}",
        f"OMP_NUM_THREADS=1 {command}" if one_thread else command,
        about,
        _of("decode", shape=shape, compiled=compiled),
        limit,
        one_thread,
        "transformers.md",
    )


BENCHMARKS: dict[str, Benchmark] = {
    "memory": Benchmark(
        "Memory",
        "sdk bench memory --threads 1 --threads 2",
        "What a share of a rate is a share of.",
        lambda settings: _module("memory").run(settings.counts),
        240,
    ),
    "adam": _family(
        "Adam",
        "adam",
        "All tensors of a row have one dtype. A copy reads its target before it writes it, a step in place does not:"
        " hence more than 1.",
        "ops/adam.md",
        600,
    ),
    "lamb": _family("LAMB", "lamb", "Against torch's foreach functions, and against our own Adam.", "ops/lamb.md", 240),
    "transformer": _family(
        "Transformer layer for training",
        "transformer",
        "`small` is batch 2, 64 tokens, hidden size 256, 4 heads; `large` batch 8, 128 tokens, hidden size 1024, 16"
        " heads; dropout 0.1 where there is any. In float32: in bfloat16 torch takes many minutes on a"
        " CPU without instructions for it.",
        "ops/transformer.md",
        600,
        dtypes=("float32",),
    ),
    "inference": _family(
        "Norms, softmax, activations, rotary embedding, residuals",
        "inference",
        "One token each of a batch of 4 (`decode`), and a prompt of 512 tokens; hidden size 2048, softmax over 512.",
        "ops/inference.md",
    ),
    "sparse_attention": _family(
        "Sparse attention", "sparse_attention", "4096 tokens, 4 heads of 64, batch 1.", "ops/sparse_attention.md", 1200
    ),
    "evoformer": _family(
        "Attention of the Evoformer",
        "evoformer",
        "Against torch, by hand and by SDPA with both biases added up.",
        "ops/evoformer_attn.md",
        120,
    ),
    "quantizer": _family(
        "Quantizer", "quantizer", "Symmetric groups of 8192, against the reference in torch.", "ops/quantizer.md", 120
    ),
    "fp_quantizer": _family(
        "Quantization to small floating-point numbers",
        "fp_quantizer",
        "Against the reference in torch.",
        "ops/fp_quantizer.md",
        240,
    ),
    "direct": _family(
        "Every op by a direct call",
        "direct",
        "On the last of the shapes that conformance checks, against the reference in plain torch, and torch's own.",
        "ops/README.md",
        400,
        0.03,
    ),
    "calls": _family(
        "A call",
        "calls",
        "The ops that are called most, on 16 elements, where the call itself takes the time, against torch's own.",
        "decisions/0054-one-tensor.md",
        120,
        0.1,
    ),
    "decode_llama": _decode("llama", True, False, 600),
    "decode_llama_1": _decode("llama", False, True, 600),
    "decode_gpt2": _decode("gpt2", True, False, 600),
    "decode_phi3": _decode("phi3", False, False, 600),
    "decode_gemma3": _decode("gemma3", False, False, 600),
    "contexts": Benchmark(
        "Batches and contexts",
        "sdk bench contexts",
        "The same LLaMA: prompts of 1 to 32 sequences of 128 tokens, and of one of up to 8192, and 8 steps after each.",
        _of("contexts"),
        900,
        page="transformers.md",
    ),
    "step": Benchmark(
        "A training step of a LLaMA, a GPT-2 and a BERT",
        "sdk bench step --model llama --turns 7",
        "All of the shape of llama2.c's smallest, 512 tokens, with torch's AdamW. LLaMA and GPT-2 by accelerate() with"
        " a chunked loss, BERT with DeepSpeed's layers. Freed memory is kept, as DeepSpeed on the CPU plugin has it, "
        "but not in the process without an accelerator.",
        _step,
        2400,
        page="ops/cross_entropy.md",
    ),
    "step_bfloat16": Benchmark(
        "A training step in bfloat16",
        "sdk bench step --model llama --dtype bfloat16 --turns 7",
        "The same in bfloat16, parameters and the optimizer's states too. Where a CPU multiplies bfloat16 more slowly"
        " than float32, ours multiplies in float32.",
        _step_bfloat16,
        1800,
        page="transformers.md",
    ),
    "agreement": Benchmark(
        "Losses of 200 steps",
        "sdk bench step --model llama --turns 1 --no-compiled",
        "Small models trained by their own code and by ours, from the same weights on the same batches; the largest"
        " relative difference of two losses at one step. In bfloat16 both round.",
        _agreement,
        300,
        page="ops/cross_entropy.md",
    ),
    "training": Benchmark(
        "DeepSpeed's training on two ranks",
        "sdk bench training examples/tiny_gpt --steps 20 --repeats 2",
        "The demo on DeepSpeed's own CPU accelerator and on this plugin; its losses are compared by the command.",
        _training,
        900,
        page="decisions/0007-comparing-two-accelerators.md",
    ),
    "all_reduce": Benchmark(
        "Sums over the ranks of a machine",
        "sdk bench all-reduce",
        "Two ranks; one call of five after a barrier, or of 200 over and over; `times` is our speed in multiples.",
        _of("all_reduce"),
        180,
        page="ops/inference.md",
    ),
    "all_reduce_own": Benchmark(
        "The same by DeepSpeed's own op",
        "sdk bench all-reduce --own",
        "DeepSpeed's op is under the name of ours here.",
        _of("all_reduce", own=True),
        300,
        page="ops/inference.md",
    ),
    "all_reduce_ranks": Benchmark(
        "Sums over more ranks",
        "sdk bench all-reduce --ranks 8",
        "Ranks of one thread each, on this machine's cores; float32, beside torch's all_reduce over gloo and the"
        " MPIs that `--mpi` names. An MPI's `times` are to ours over and over, gloo's to ours after a barrier.",
        _ranks,
        900,
        page="ops/inference.md",
    ),
    "async_io": Benchmark(
        "Files",
        "sdk bench async-io --seconds 1",
        "A file of 128 MiB past the page cache; ratios are to libaio, DeepSpeed's own op, or else to plain calls.",
        _files,
        360,
        page="ops/async_io.md",
    ),
    "accelerator": Benchmark(
        "What DeepSpeed asks of an accelerator",
        "sdk bench accelerator",
        "Microseconds a call before the plugin is installed and after. Slower is more than 1.05 times, and"
        " more than 0.05 microseconds longer, in three quarters of the turns: of the first processes, and of two more"
        " pairs of them. It compiles DeepSpeed's ops. `empty_cache()` gives memory back to the system here; DeepSpeed's"
        " own does nothing. DeepSpeed calls it between phases, not in a step.",
        _of("accelerator"),
        600,
    ),
    "jit": Benchmark(
        "Compiling an op",
        "sdk bench jit",
        "The Adam kernels, from after the import of torch until the op is loaded.",
        _of("jit", repeats=2),
        480,
        page="operations.md",
    ),
    "accuracy": Benchmark(
        "Errors of the optimizers",
        "sdk bench accuracy",
        "Worst errors against float64, in units in the last place; rounding a correct result makes 0.5.",
        _of("accuracy"),
        240,
        page="ops/adam.md",
    ),
    "imports": Benchmark(
        "Imports",
        "sdk bench import",
        "Whole processes; without plugins the SDK is switched off.",
        _of("imports", repeats=5),
        360,
    ),
    "scale": Benchmark(
        "The SDK at scale",
        "sdk bench scale",
        "The choice of a plugin, Adam's kernels out of one cache, and the size of wheels. On the slow file system each"
        " file or folder that Python touches in the cache takes 5 ms more. Wheels are those of `make performance`,"
        " without binaries.",
        _scale,
        480,
        page="operations.md",
    ),
}


def measure(name: str, settings: Settings, seconds_left: float = float("inf")) -> Result:
    """One benchmark, in a new process; that it fails or takes too long is a result too."""
    if seconds_left <= 0:
        return Result([], failed="not begun: the time for all was over")
    benchmark = BENCHMARKS[name]
    threads = 1 if benchmark.one_thread else settings.threads
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        command = [sys.executable, "-m", __name__, name, json.dumps(asdict(settings)), str(file)]
        begun = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        with _others() as others:
            start = time.perf_counter()
            # Its temporary files go with the folder, however it ends.
            environment = child_environment(OMP_NUM_THREADS=str(threads), TMPDIR=folder)
            failed = _run(command, min(benchmark.limit, seconds_left), environment)
            seconds = time.perf_counter() - start
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]  # what was killed may leave half a line
    rows, notes = [each for each in found if isinstance(each, dict)], [each for each in found if isinstance(each, str)]
    return Result(rows, list(dict.fromkeys(notes)), failed, seconds, others[0], begun)


def _run(command: list[str], limit: float, environment: dict[str, str]) -> str | None:
    """Why a process and those that it started have failed, if they have; none of them is left."""
    try:
        done = program.run(command, environment, limit=limit, apart=True)
    except subprocess.TimeoutExpired:
        return f"stopped after {limit:.0f} s"
    if done.returncode < 0:
        return f"ended by a signal: {signal.strsignal(-done.returncode)}"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return (lines or [f"ended with status {done.returncode}"])[-1].strip() if done.returncode else None


@contextlib.contextmanager
def _others() -> Iterator[list[float]]:
    """The part of all cores that programs of others take meanwhile; 0 where the system does not say."""
    found = [0.0]
    start, busy, own = time.perf_counter(), _busy(), _own()
    yield found
    cores = (time.perf_counter() - start) * (os.cpu_count() or 1)
    found[0] = max(0.0, (_busy() - busy - (_own() - own)) / cores)


def _busy() -> float:
    """Seconds that all cores together were in use: user, nice, system, interrupts, and what other machines took."""
    with contextlib.suppress(OSError):
        fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
        return sum(int(fields[i]) for i in (0, 1, 2, 5, 6, 7)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _own() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


# Warnings that the report repeats: a peer is not installed; an op of ours has no native kernel here.
_SAID = ("is not compared", "reference implementation")


def main(name: str, settings: Settings, file: Path) -> None:
    """What the process of a benchmark does: a line for each row as it comes, and for each warning of `_SAID`."""
    with file.open("w", encoding="utf-8") as out, warnings.catch_warnings():

        def write(found: object) -> None:
            print(json.dumps(found), file=out, flush=True)

        def note(message: Warning | str, *where: Any, **more: Any) -> None:
            if any(said in str(message) for said in _SAID):
                write(str(message).partition("\n")[0])

        warnings.simplefilter("always")
        warnings.showwarning = note
        for row in BENCHMARKS[name].run(settings):
            write(asdict(row))


if __name__ == "__main__":
    main(sys.argv[1], Settings(**json.loads(sys.argv[2])), Path(sys.argv[3]))
