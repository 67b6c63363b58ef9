"""Draws the SDK's parts and the imports between them, from the code: ``make architecture``.

A part is a package or module directly below `ds_plugin_sdk`. Each stands one row above the highest part that it
imports; an arrow that follows from others is left out. `tests/test_architecture.py` compares the picture with the code.
"""

from __future__ import annotations

import argparse
import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SDK = ROOT / "sdk" / "ds_plugin_sdk"
PICTURE = ROOT / "docs" / "img" / "architecture.svg"

Graph = Mapping[str, set[str]]

_OF_THE_PACKAGE = {"__init__", "__main__"}

BOX_WIDTH, BOX_HEIGHT, ROW_HEIGHT, GAP = 150, 34, 84, 18
STYLE = """
  svg { background: #ffffff; font: 13px sans-serif; }
  rect { fill: #eef3fa; stroke: #33557f; }
  text { fill: #14253b; text-anchor: middle; }
  path { fill: none; stroke: #7d8ea3; marker-end: url(#arrow); }
"""


def parts() -> list[str]:
    """The parts of the SDK, by name."""
    found = {path.stem for path in SDK.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    return sorted(found - _OF_THE_PACKAGE)


def modules() -> dict[str, Path]:
    """Dotted name of each module of the SDK -> its file."""
    found = {}
    for file in sorted(SDK.rglob("*.py")):
        names = ("ds_plugin_sdk", *file.relative_to(SDK).with_suffix("").parts)
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = file
    return found


def imported(file: Path, known: Iterable[str]) -> set[str]:
    """The modules among `known` that a file imports, wherever the import stands, but for those only types need."""
    names = set()
    for node in _executed(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                names.add(dotted if dotted in known else node.module)
    return names & set(known)


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield child
            yield from _executed(child)


@functools.cache
def module_graph() -> dict[str, set[str]]:
    """Which module imports which."""
    known = modules()
    return {name: imported(file, known) - {name} for name, file in known.items()}


def part_graph() -> dict[str, set[str]]:
    """Which part imports which."""
    graph: dict[str, set[str]] = {name: set() for name in parts()}
    for name, targets in module_graph().items():
        if (part := part_of(name)) is not None:
            graph[part] |= {there for each in targets if (there := part_of(each)) is not None} - {part}
    return graph


def part_of(module: str) -> str | None:
    """``ds_plugin_sdk.jit.cache`` -> ``jit``; None for the package itself, which only names what the parts have."""
    part = module.partition(".")[2].partition(".")[0]
    return part if part and part not in _OF_THE_PACKAGE else None


def circles(graph: Graph) -> list[list[str]]:
    """Groups of nodes that reach each other: each is a circle of imports."""
    reach = {node: _reachable(graph, node) for node in graph}
    groups = {tuple(sorted(n for n in graph if n in reach[node] and node in reach[n])) for node in graph}
    return sorted(list(group) for group in groups if group)


def _reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [*graph[start]]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(graph[node])
    return seen


def rows(graph: Graph) -> dict[str, int]:
    """The row of each part: one above the highest that it imports."""
    found: dict[str, int] = {}

    def row(node: str) -> int:
        if node not in found:
            found[node] = 1 + max(map(row, graph[node]), default=-1)
        return found[node]

    return {node: row(node) for node in sorted(graph)}


def direct(graph: Graph) -> dict[str, set[str]]:
    """The graph without the arrows that follow from others."""
    return {
        node: {each for each in targets if not any(each in _reachable(graph, other) for other in targets - {each})}
        for node, targets in graph.items()
    }


def draw(graph: Graph) -> str:
    """The picture, as SVG text."""
    levels = rows(graph)
    arrows = direct(graph)
    height = max(levels.values()) + 1
    by_row = [[node for node in sorted(graph) if levels[node] == row] for row in range(height)]
    width = max(map(len, by_row)) * (BOX_WIDTH + GAP) + GAP
    place: dict[str, tuple[float, float]] = {}
    for row, nodes in enumerate(by_row):
        below = {node: [place[each][0] for each in arrows[node]] or [width / 2] for node in nodes}
        ordered = sorted(nodes, key=lambda node: (sum(below[node]) / len(below[node]), node))
        step = width / len(ordered)
        for column, node in enumerate(ordered):
            place[node] = (step * (column + 0.5), (height - 1 - row) * ROW_HEIGHT + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height * ROW_HEIGHT}" role="img">',
        "<title>The parts of ds_plugin_sdk: an arrow leads from a part to one that it imports</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="arrow" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M1 1 L7 4 L1 7" style="marker-end: none"/></marker></defs>',
    ]
    for node in sorted(arrows):
        x, y = place[node]
        for target in sorted(arrows[node]):
            to_x, to_y = place[target]
            bend = (y + BOX_HEIGHT + to_y) / 2
            lines.append(
                f'<path d="M{x:.0f} {y + BOX_HEIGHT:.0f} C{x:.0f} {bend:.0f} {to_x:.0f} {bend:.0f} '
                f'{to_x:.0f} {to_y:.0f}"/>'
            )
    for node in sorted(place):
        x, y = place[node]
        left = x - BOX_WIDTH / 2
        lines.append(f'<rect x="{left:.0f}" y="{y:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="4"/>')
        lines.append(f'<text x="{x:.0f}" y="{y + 22:.0f}">{node}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=PICTURE)
    output = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(draw(part_graph()), encoding="utf-8")
    print(f"{output}: {len(parts())} parts, {len(circles(module_graph()))} circles among {len(modules())} modules")


if __name__ == "__main__":
    main()
