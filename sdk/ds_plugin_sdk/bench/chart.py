"""Charts of the op families: one picture each, for their pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ds_plugin_sdk.bench.ops import Row
from ds_plugin_sdk.errors import SdkError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#4477aa", "#ee6677", "#ccbb44")
_DPI = 72


def require_matplotlib() -> None:
    """See that charts can be drawn, before minutes are spent on measuring.

    Raises:
        SdkError: matplotlib is missing.
    """
    try:
        import matplotlib  # noqa: F401  # whether it is there
    except ImportError as error:
        hint = "pip install 'ds-plugin-sdk[chart]'"
        raise SdkError("Charts cannot be drawn", why="matplotlib is not installed", hint=hint) from error


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
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=8)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{family}.png"
    figure.savefig(path, dpi=_DPI)
    return path


def _label(row: Row) -> str:
    return f"{row.what} ({row.setting})"


def _panel(axes: Axes, rows: Sequence[Row], labels: Sequence[str], peers: Sequence[str]) -> None:
    """Bars begin at 1, so that what is slower than a peer goes to the left."""
    from matplotlib.ticker import LogLocator

    height = 0.8 / len(peers)
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
