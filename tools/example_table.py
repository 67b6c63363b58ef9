"""Each example's command at its full size, on the plugin and on DeepSpeed's own CPU accelerator: `make examples`.

Logs, pictures and a row for each command go to ``out/examples``; the table of examples/README.md has all rows there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from ds_plugin_sdk.jit import target

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))  # which is a folder of scripts

import side_by_side  # noqa: E402  # found by the line above

OUT = Path("out/examples")
PAGE = ROOT / "examples" / "README.md"
HEADING = "## Results of the last run"
ERROR = re.compile(r"^(?:\[rank\d+\]: *)?(?:\w+\.)*(\w*(?:Error|Exception): .*)", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """A command as its README has it; the last thing in the log that `says` finds is its result."""

    name: str
    command: str
    says: str


RANKS = "deepspeed --num_accelerators 2 examples/"
OLD = "env PYTHONPATH=build/transformers-4.43.4 "
GENERATED = r"--- .*: (.* tokens/s; transformers alone .*)"
EXAMPLES = (
    Example("tiny_gpt", RANKS + "tiny_gpt/train.py --out {out}", r"Held-out text: .* bits per byte"),
    Example("cifar10", RANKS + "cifar10/train.py --out {out}", r"accuracy +[\d.]+%"),
    Example("cifar10-moe", RANKS + "cifar10/train.py --moe --ep-world-size 2 --out {out}", r"accuracy +[\d.]+%"),
    Example("gpt2_trainer", "examples/gpt2_trainer/run.sh {out}", r"the largest difference of a loss is .*"),
    Example("opt_sft", "examples/opt_sft/run.sh {out}", r"throughput: .*"),
    Example("generate-sdk", "python examples/generate/generate.py --by sdk --out {out}", GENERATED),
    Example("generate-autotp", RANKS + "generate/generate.py --by autotp --out {out}", GENERATED),
    Example("generate-injection", OLD + "python examples/generate/generate.py --by injection --out {out}", GENERATED),
    Example("generate-injection-2", OLD + RANKS + "generate/generate.py --by injection --out {out}", GENERATED),
)

HEAD = f"""{HEADING}

Each command at its full size, as `make examples` runs it and writes this table: twice, the second time on DeepSpeed's
own accelerator. {os.cpu_count()} cores ({target.here().level}), maybe shared with other work; in brackets the seconds
of CPU time of all processes. The first run on DeepSpeed's own accelerator also compiled its ops.

| command | seconds (CPU) | result | on DeepSpeed's own accelerator | losses apart by at most, in 10 steps; in all |
|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART", help="examples with this in their names")
    chosen = parser.parse_args().only
    if not any(part in example.name for example in EXAMPLES for part in chosen):
        parser.error(f"no example has {', '.join(chosen)} in its name")
    rows = []
    for example in EXAMPLES:
        kept = OUT / example.name / "row.json"
        if any(part in example.name for part in chosen):
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(row(example)), encoding="utf-8")
        if kept.exists():
            rows.append([*json.loads(kept.read_text(encoding="utf-8")), apart(kept.parent)])
    text = PAGE.read_text(encoding="utf-8").partition(HEADING)[0].rstrip() + "\n\n"
    PAGE.write_text(text + HEAD + "".join(f"| {' | '.join(cells)} |\n" for cells in rows), encoding="utf-8")


def row(example: Example) -> list[str]:
    """Run a command on both accelerators; gives the cells of its row but for the last."""
    plugin, own = (measure(example, name) for name in side_by_side.RUNS)
    command = example.command.replace(" --out {out}", "").replace(" {out}", "").removeprefix("env ")
    return [f"`{command}`", plugin[0], plugin[1], f"{own[1]}; {own[0]} s"]


def apart(folder: Path) -> str:
    """How far the losses of both runs are apart, which are then drawn: in the first ten steps, and in all."""
    found = {name: side_by_side.curves(side_by_side.folder_of(folder, name)) for name in side_by_side.RUNS}
    plugin, own = found.values()
    names = [name for name in plugin if name.endswith("loss") and name in own]
    if not names:
        return "-"
    side_by_side.draw(found, folder / "side_by_side.png")
    first, whole = (
        max(side_by_side.apart(plugin[name][:end], own[name][:end]) for name in names) for end in (10, None)
    )
    return f"{first:.1g}; {whole:.1g}"


def measure(example: Example, name: str) -> tuple[str, str]:
    """One run: its seconds, in words, and what it says or why it failed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    folder = side_by_side.folder_of(OUT / example.name, name)
    status, seconds = side_by_side.run(shlex.split(example.command), folder, name)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    log = (folder / "log.txt").read_text(encoding="utf-8")
    if status == 0:
        matches = list(re.finditer(example.says, log))
        words = [match[1] if match.re.groups else match[0] for match in matches[-1:]] or ["its result was not said"]
        result = " ".join(words[0].split())
    else:
        result = next(iter(ERROR.findall(log)), f"exit status {status}")
    print(f"{example.name} on {name}: exit status {status}, {seconds:.0f} s ({used:.0f}), {result}", flush=True)
    return f"{seconds:.0f} ({used:.0f})", result.replace("|", "\\|")


if __name__ == "__main__":
    main()
