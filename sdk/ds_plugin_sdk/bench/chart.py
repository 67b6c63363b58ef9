"""Charts of the op families and of files: one picture each, for their pages."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_plugin_sdk.bench import async_io, scale
from ds_plugin_sdk.bench.ops import Row
from ds_plugin_sdk.errors import SdkError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#4477aa", "#ee6677", "#ccbb44", "#228833", "#aa3377")
_DPI = 72


def require_matplotlib() -> None:
    """See that charts can be drawn, before minutes are spent on measuring.

    Raises:
        SdkError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        hint = "pip install 'ds-plugin-sdk[chart]'"
        raise SdkError("Charts cannot be drawn", why="matplotlib is not installed", hint=hint)


def draw_section(name: str, rows: Sequence[dict[str, Any]], folder: Path) -> Path | None:
    """Draw ``NAME.png`` for a benchmark of a report, if there is a chart of its kind.

    Args:
        name: of `ds_plugin_sdk.bench.suite.BENCHMARKS`.
        rows: as the report has them.
        folder: where to; made if it is missing.

    Returns:
        The picture's path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(rows[0].get("times"), dict):
        return draw(name, [Row(**row) for row in rows], folder)
    if name == "async_io":
        return draw_files([async_io.Row(**row) for row in rows], folder)
    picture = _PICTURES.get(name.partition("_")[0] if name.startswith("decode") else name)
    return None if picture is None else picture(rows, folder / f"{name}.png")


def _draw_decode(rows: Sequence[dict[str, Any]], path: Path) -> Path | None:
    """Bars of both speeds, a panel each; those that are not compared have none."""
    from matplotlib.figure import Figure

    measured = [row for row in rows if row["not_compared"] is None]
    if not measured:
        return None
    names = [row["implementation"] for row in measured]
    figure = Figure(figsize=(8, 1.2 + 0.35 * len(names)), layout="constrained")
    for axes, what in zip(figure.subplots(1, 2, sharey=True), ("prompt", "decode"), strict=True):
        axes.barh(names, [row[f"{what}_tokens_per_second"] for row in measured], color=_COLOURS[0])
        axes.set_title(f"{what}, tokens/s", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(axis="x", alpha=0.3)
    axes.invert_yaxis()
    figure.suptitle(rows[0]["model"], fontsize=10)
    figure.savefig(path, dpi=_DPI)
    return path


def _draw_ranks(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Microseconds over the number of ranks, a panel for each number of elements."""
    from matplotlib.figure import Figure

    sizes = sorted({row["elements"] for row in rows})
    figure = Figure(figsize=(1.5 + 2.8 * len(sizes), 3.6), layout="constrained")
    for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        for call in dict.fromkeys(row["call"] for row in rows):
            own = [row for row in rows if (row["call"], row["elements"]) == (call, size)]
            axes.plot([row["ranks"] for row in own], [row["microseconds"] for row in own], "o-", label=call)
        counts = {row["ranks"] for row in rows}
        _logarithmic(axes, counts, xlabel="ranks", title=f"{size} elements", ylabel="microseconds")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=_DPI)
    return path


def _draw_contexts(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Tokens per second over the number of sequences, and over their length."""
    from matplotlib.figure import Figure

    shortest = min(row["context"] for row in rows)
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    panels = (
        ("batch", "sequences of a batch", [row for row in rows if row["context"] == shortest]),
        ("context", "tokens of one sequence", [row for row in rows if row["batch"] == 1]),
    )
    for axes, (key, what, found) in zip(figure.subplots(1, 2), panels, strict=True):
        for name in dict.fromkeys(row["implementation"] for row in found):
            own = [row for row in found if row["implementation"] == name]
            axes.plot([row[key] for row in own], [row["decode_tokens_per_second"] for row in own], "o-", label=name)
        _logarithmic(axes, {row[key] for row in found}, xlabel=what, ylabel="decoded tokens/s")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=_DPI)
    return path


def _draw_scale(figures: Sequence[dict[str, Any]], path: Path) -> Path:
    """Seconds over the number of plugins, and of processes on one cache."""
    from matplotlib.figure import Figure

    rows = [scale.Row(**row) for row in figures]
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    timed = [row for row in rows if row.seconds is not None]
    for number, key in enumerate(dict.fromkeys((row.what, row.file_system) for row in timed)):
        found = [row for row in timed if (row.what, row.file_system) == key]
        axes = left if key[0] == scale.CHOICE else right
        label, colour = ", ".join(each for each in key if each), _COLOURS[number % len(_COLOURS)]
        axes.plot([r.count for r in found], [r.seconds for r in found], "o-", color=colour, label=label)
    for axes, what in ((left, "plugins"), (right, "processes at once")):
        counts = {row.count for row in timed if (row.what == scale.CHOICE) == (axes is left)}
        _logarithmic(axes, counts, xlabel=what, ylabel="seconds")
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=_DPI)
    return path


def _logarithmic(axes: Axes, counts: Iterable[int], **names: str) -> None:
    """Both axes, with a tick at each count."""
    from matplotlib.ticker import LogLocator

    axes.set(xscale="log", yscale="log", **names)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    ordered = sorted(counts)
    axes.set_xticks(ordered, [str(count) for count in ordered])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


_PICTURES: dict[str, Callable[[Sequence[dict[str, Any]], Path], Path | None]] = {
    "all_reduce_ranks": _draw_ranks,
    "contexts": _draw_contexts,
    "decode": _draw_decode,
    "scale": _draw_scale,
}


def draw(family: str, rows: Sequence[Row], folder: Path) -> Path:
    """Draw ``FAMILY.png``: speeds in multiples of the peers, a line at 1, dots for multiples of the copy's rate.

    There is a panel for each dtype and number of threads.

    Args:
        family: the title.
        rows: as `ds_plugin_sdk.bench.ops.run` gives them.
        folder: where to; made if it is missing.

    Returns:
        The picture's path.

    Raises:
        SdkError: matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row.dtype, row.threads) for row in rows))
    labels = list(dict.fromkeys(_label(row) for row in rows))
    peers = list(dict.fromkeys(peer for row in rows for peer in row.times))
    figure = Figure(figsize=(3.2 + 2.6 * len(panels), 1.2 + 0.3 * len(labels)), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        _panel(axes, [row for row in rows if (row.dtype, row.threads) == panel], labels, peers)
        axes.set_title(f"{panel[0]}, {panel[1]} thread{'s' * (panel[1] > 1)}", fontsize=9)
    figure.suptitle(f"{family}: speed in multiples of others'", fontsize=10)
    return _saved(figure, axes, folder / f"{family}.png")


def draw_files(rows: Sequence[async_io.Row], folder: Path) -> Path:
    """Draw ``async_io.png``: GB/s over the size of blocks, a panel for each direction and number of threads.

    Args:
        rows: as `ds_plugin_sdk.bench.async_io.run` gives them.
        folder: where to; made if it is missing.

    Returns:
        The picture's path.

    Raises:
        SdkError: matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    counts = list(dict.fromkeys(row.threads for row in rows))
    figure = Figure(figsize=(1 + 2.6 * len(counts), 5), layout="constrained")
    grid = figure.subplots(2, len(counts), sharey=True, squeeze=False)
    for line, verb in zip(grid, ("write", "read"), strict=True):
        for axes, count in zip(line, counts, strict=True):
            _files(axes, [row for row in rows if row.threads == count], verb)
            axes.set_title(f"{verb}, {count} thread{'s' * (count > 1)}", fontsize=9)
        line[0].set_ylabel("GB/s", fontsize=8)
    return _saved(figure, grid[0][0], folder / "async_io.png")


def _saved(figure: Figure, axes: Axes, path: Path) -> Path:
    """The picture, with the legend of one of its panels."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
    return path


def _files(axes: Axes, rows: Sequence[async_io.Row], verb: str) -> None:
    """Bars of each way to do it, at each size of blocks."""
    hows = list(dict.fromkeys(row.how for row in rows))
    blocks = list(dict.fromkeys(row.block_kib for row in rows))
    width = 0.8 / len(hows)
    for number, (how, colour) in enumerate(zip(hows, _COLOURS, strict=False)):
        shift = (number + 0.5) * width - 0.4
        found = [row for row in rows if row.how == how]
        speeds = [row.write_gb_s if verb == "write" else row.read_gb_s for row in found]
        axes.bar([blocks.index(row.block_kib) + shift for row in found], speeds, width, color=colour, label=how)
    labels = [f"{block >> 10} MiB" if block >= 1024 else f"{block} KiB" for block in blocks]
    axes.set_xticks(range(len(blocks)), labels, fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(axis="y", alpha=0.3)


def _label(row: Row) -> str:
    return f"{row.what} ({row.setting})"


def _panel(axes: Axes, rows: Sequence[Row], labels: Sequence[str], peers: Sequence[str]) -> None:
    """Bars begin at 1, so that what is slower than a peer goes to the left."""
    from matplotlib.ticker import LogLocator

    height = 0.8 / max(1, len(peers))
    places = {label: place for place, label in enumerate(labels)}
    for number, (peer, colour) in enumerate(zip(peers, _COLOURS, strict=False)):
        shift = (number + 0.5) * height - 0.4
        found = [(places[_label(row)] + shift, row.times[peer] - 1) for row in rows if peer in row.times]
        axes.barh([y for y, _ in found], [x for _, x in found], height, left=1, color=colour, label=peer)
    dots = [(places[_label(row)], row.times_copy) for row in rows if row.times_copy is not None]
    if dots:
        axes.plot([x for _, x in dots], [y for y, _ in dots], "k.", markersize=4, label="rate of copying memory")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_yticks(list(places.values()), labels, fontsize=8)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", alpha=0.3)
