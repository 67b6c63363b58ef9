"""Every language model of the installed transformers, tiny and with random weights, plain against accelerated.

``make transformers-families`` writes docs/transformers-families.md. A family is

- whole: decoder layers run on our ops; parts: attention, linear layers or norms do; left alone: nothing does;
- different: logits or tokens are not the plain model's. That must not be.

``--compile`` compares what torch.compile makes of them instead, in float32, and writes no page.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its dependencies warn of each other's releases
    import transformers

from ds_plugin_sdk.bench.timing import LateError
from transformers_families.compare import Verdict, examine, examine_compiled, quantized, short
from transformers_families.models import families

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transformers-families.md"
SECONDS = 120  # of this process, not of the clock


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise LateError(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def table(every: list[Verdict]) -> str:
    """The page: counts of each release of transformers, and of the installed one what was found."""
    verdicts = [verdict for verdict in every if verdict.release == transformers.__version__]
    cache = quantized()
    made = [verdict for verdict in verdicts if verdict.verdict != "not made"]
    lines = [
        "# transformers' families, plain against accelerated",
        "",
        f"Written by `make transformers-families`, with transformers {transformers.__version__}, torch "
        f"{torch.__version__}: every language model that can be made tiny with random weights, without a network. What "
        "is compared, and within which bounds: `tools/transformers_families/compare.py`. Quantized caches: "
        + (f"those of the backend {cache['backend']}." if cache else "not compared, no backend is installed."),
        "",
        "| " + " | ".join(["transformers", "families", "made", "whole", "parts", "left alone", "different"]) + " |",
        "|---|---|---|---|---|---|---|",
        *_counts(every),
        "",
        "*Whole*: decoder layers run on our ops. *Parts*: attention, linear layers or norms do. *Left alone*: nothing "
        "does. The difference is the largest of all comparisons, in parts of the largest logit. int8: mean error over "
        "mean size of logits; tiny random layers have no slack.",
        "",
        "| family | kind | verdict | largest difference | int8 | what was left, and why; what the plain model cannot |",
        "|---|---|---|---|---|---|",
    ]
    for verdict in sorted(made, key=lambda found: (found.kind, found.family)):
        int8 = next((note[6:] for note in verdict.notes if note.startswith("int8: ")), "")
        notes = [*verdict.left, *(note for note in verdict.notes if not note.startswith("int8: "))]
        text = "; ".join(note.replace("|", "/").replace("\n", " ") for note in notes)
        lines.append(
            f"| {verdict.family} | {verdict.kind} | {verdict.verdict} | {verdict.largest:.1e} | {int8} | {text} |"
        )
    lines += ["", "## Not made", "", "| family | kind | why |", "|---|---|---|"]
    for verdict in sorted(verdicts, key=lambda found: (found.kind, found.family)):
        if verdict.verdict == "not made":
            lines.append(f"| {verdict.family} | {verdict.kind} | {verdict.notes[0].replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def _counts(every: list[Verdict]) -> Iterator[str]:
    for release in sorted({verdict.release for verdict in every}, key=_numbers, reverse=True):
        counts = Counter(verdict.verdict for verdict in every if verdict.release == release)
        found = [counts[name] for name in ("whole", "parts", "left alone", "DIFFERENT")]
        yield "| " + " | ".join(map(str, [release, counts.total(), sum(found), *found])) + " |"


def _numbers(release: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", release)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="families; all, and the page, if none")
    parser.add_argument("--compile", action="store_true", help="what torch.compile makes of them; no page")
    parser.add_argument(
        "--results", type=Path, help="a file of results, one a line, to go on with; of several releases"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other
    transformers.logging.set_verbosity_error()
    if unknown := set(options.names) - {family.name for family in families()}:
        parser.error(f"there are no families {', '.join(sorted(unknown))}")
    done = {}
    if options.results is not None and options.results.exists():
        for line in options.results.read_text().splitlines():
            verdict = Verdict(**json.loads(line))
            done[verdict.release, verdict.family, verdict.kind] = verdict
    for family in families():
        key = transformers.__version__, family.name, family.kind
        if (options.names and family.name not in options.names) or key in done:
            continue
        try:
            with _time_limit():
                verdict = examine_compiled(family) if options.compile else examine(family)
        except LateError as error:
            verdict = Verdict(family.name, family.kind, "DIFFERENT", notes=[short(error)])
        except Exception as error:  # ours
            verdict = Verdict(family.name, family.kind, "DIFFERENT", notes=[short(error)])
        done[key] = verdict
        line = f"{verdict.kind:16}{verdict.family:24}{verdict.verdict:12}{verdict.largest:9.1e}"
        print(line, verdict.notes, flush=True)
        if options.results is not None:
            with options.results.open("a") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")
    if not options.names and not options.compile:
        PAGE.write_text(table(list(done.values())), encoding="utf-8")
    sys.exit(any(verdict.verdict == "DIFFERENT" for verdict in done.values()))


if __name__ == "__main__":
    main()
