"""What the pages tell a reader to type, and the files that they show whole: what tests run is what is written there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Where the driver of docs/c-driver.md is said to be installed.
DRIVER = "/opt/zap"


def lines(page: Path, heading: str) -> list[str]:
    """The lines of the first indented block below a heading, as they are typed.

    Where a line's comment says what it is from this tree, that is it.
    """
    text = page.read_text(encoding="utf-8").partition(f"\n{heading}\n")[2]
    found = re.search(r"(?m)^(?: {4}.*\n)+", text)
    assert found is not None, f"{page.name} has no block below '{heading}'"
    split = [line.strip().partition("  #") for line in found[0].splitlines()]
    from_tree = "from this tree: "
    return [
        comment.partition(from_tree)[2] if from_tree in comment else command.rstrip() for command, _, comment in split
    ]


def line(page: Path, start: str) -> str:
    """The one line of a page's indented blocks that begins so, without its comment."""
    blocks = re.findall(rf"(?m)^ {{4}}({re.escape(start)}.*)$", page.read_text(encoding="utf-8"))
    (found,) = {block.partition("  #")[0].rstrip() for block in blocks}
    return found


def files(page: Path) -> dict[str, str]:
    """The files that a page shows whole, by the paths in their first lines."""
    blocks = re.findall(r"(?ms)^```\w+\n((?:#|//) (ds_plugin_zap/\S+)\n.*?)^```$", page.read_text(encoding="utf-8"))
    found = {path: text for text, path in blocks}
    assert found, f"{page.name} shows no files of ds_plugin_zap"
    return found


def blocks(page: Path) -> list[tuple[str, str]]:
    """Every block of a page in its order, each with its language; indented ones, which are typed, have none."""
    found = re.finditer(r"(?ms)^```(\w+)\n(.*?)^```$|(?<=\n\n)((?:^ {4}[^\n]*\n)+)", page.read_text(encoding="utf-8"))
    return [(block[1] or "", block[2] or block[3]) for block in found]


def reads(shown: str, printed: str) -> bool:
    """Whether a program prints what a page shows: `...` stands for anything, and columns may be wider or narrower."""
    expected, text = ("".join(f"{' '.join(line.split())}\n" for line in part.splitlines()) for part in (shown, printed))
    parts = re.split(r"(?m)(^\.\.\.\n|\.\.\.)", expected)
    pattern = "".join({"...\n": r"(?s:.*\n)?", "...": r"(?s:.*)"}.get(part, re.escape(part)) for part in parts)
    return re.fullmatch(pattern, text) is not None


def put(page: Path, project: Path, driver: Path) -> None:
    """Write a page's files into a project. The driver is in a folder of the test's, not in /opt."""
    for path, text in files(page).items():
        (project / path).write_text(text.replace(DRIVER, str(driver)), encoding="utf-8")
