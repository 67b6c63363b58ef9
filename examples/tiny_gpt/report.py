"""What a run shows: progress while it trains, and its curve, sample and figures afterwards."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from pathlib import Path
from typing import Any

import plotext
from matplotlib.figure import Figure
from tqdm import tqdm


class Console:
    """Progress of the run: a bar on a terminal, a line every 20 steps elsewhere, nothing if `quiet`."""

    def __init__(self, steps: int, *, quiet: bool) -> None:
        self.steps, self.quiet, self.bar = steps, quiet, None
        self.loss = 0.0

    def start(self, bits: float, unigram: float) -> None:
        """Say where training starts, in held-out bits per byte."""
        self.say(f"held-out text: {bits:.2f} bits per byte before training, {unigram:.2f} by byte frequencies alone")
        if not self.quiet and sys.stderr.isatty():
            self.bar = tqdm(total=self.steps, desc="training", unit="step", dynamic_ncols=True)

    def step(self, step: int, loss: float, seconds: float) -> None:
        """Show one step: its loss in nats (smoothed) and its time."""
        self.loss = loss if step == 1 else 0.8 * self.loss + 0.2 * loss
        bits = self.loss / math.log(2)
        if self.bar is not None:
            self.bar.set_postfix_str(f"{bits:.2f} bits per byte", refresh=False)
            self.bar.update()
        elif step % 20 == 0 or step in (1, self.steps):
            self.say(f"step {step:4}/{self.steps}   {bits:5.2f} bits per byte   {seconds:.2f} s/step")

    def evaluated(self, step: int, bits: float) -> None:
        """Show a held-out evaluation."""
        self.say(f"step {step:4}/{self.steps}   {bits:5.2f} bits per byte on held-out text")

    def close(self) -> None:
        """Finish the bar."""
        if self.bar is not None:
            self.bar.close()

    def say(self, line: str) -> None:
        """Print one line, above the bar if there is one."""
        if not self.quiet:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()


def write(run: dict[str, Any], folder: Path) -> None:
    """Write ``metrics.json`` and ``loss.png`` to `folder`, and print the curve, the sample and the figures."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    (folder / "sample.txt").write_text(run["sample"], encoding="utf-8")
    draw_png(run, folder / "loss.png")
    print("\n" + draw_terminal(run))
    print("\nThe model continues a few lines of code:\n")
    print(textwrap.indent(run["sample"], "    | ", lambda line: True))
    print("\n" + summary(run, folder))


def summary(run: dict[str, Any], folder: Path) -> str:
    """The figures in plain words."""
    bits, unigram = run["evaluations"][-1][1], run["unigram_bits"]
    return (
        f"Held-out text: {bits:.2f} bits per byte, "
        f"{bits / unigram:.0%} of what byte frequencies alone give ({unigram:.2f}).\n"
        f"{len(run['losses'])} steps on {run['ranks']} ranks, {run['median_step_seconds']:.3f} s a step (median); "
        f"results in {folder}/: loss.png, metrics.json, sample.txt"
    )


def curves(run: dict[str, Any]) -> tuple[list[float], list[int], list[float]]:
    """Training bits per byte of each step, and the steps and bits per byte of the evaluations."""
    steps, held_out = zip(*run["evaluations"], strict=True)
    return [loss / math.log(2) for loss in run["losses"]], list(steps), list(held_out)


def draw_png(run: dict[str, Any], file: Path) -> None:
    """The loss curve as a picture."""
    train, steps, held_out = curves(run)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(train) + 1), train, color="#7aa6d6", linewidth=1, label="training")
    axes.plot(steps, held_out, "o-", color="#c2452d", label="held-out")
    axes.axhline(run["unigram_bits"], color="gray", linestyle="--", linewidth=1, label="byte frequencies alone")
    axes.set(xlabel="step", ylabel="bits per byte", title="A small GPT learns Python", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)


def draw_terminal(run: dict[str, Any]) -> str:
    """The loss curve as text, without colours where the output is not a terminal."""
    train, steps, held_out = curves(run)
    plotext.clear_figure()
    for paint in (plotext.canvas_color, plotext.axes_color, plotext.ticks_color):
        paint("default")  # the terminal's own
    plotext.plot_size(88, 18)
    plotext.plot(list(range(1, len(train) + 1)), train, marker="braille", color="blue")
    plotext.scatter(steps, held_out, marker="o", color="red")
    plotext.hline(run["unigram_bits"])
    plotext.title(f"bits per byte: training, held-out (o), byte frequencies alone ({run['unigram_bits']:.2f})")
    text = plotext.build()
    return text if sys.stdout.isatty() else plotext.uncolorize(text)
