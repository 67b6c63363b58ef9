"""The pages in docs/decisions: numbered without gaps, dated, all in the index; whoever names one names one there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "decisions"
PAGES = sorted(file for file in FOLDER.glob("*.md") if file.name != "README.md")
LINK = r"\[\d{4}\]\(\d{4}-[a-z0-9-]+\.md\)"
CHANGED = rf"accepted, amended by {LINK}.*|superseded by {LINK}.*"
STATUS = re.compile(rf"Status: (?:accepted|{CHANGED})\. Date: \d{{4}}-\d\d-\d\d\.")

# "decision 0007", "docs/decisions/0007-...", and, in Markdown, "[0007](...)".
REFERENCE = re.compile(r"(?:decisions?[ /]|\[(?=\d{4}\]\())(\d{4})\b")


def test_the_numbers_have_no_gap() -> None:
    assert [page.name[:4] for page in PAGES] == [f"{number:04}" for number in range(1, len(PAGES) + 1)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_states_its_number_status_and_date(page: Path) -> None:
    title, blank, status, after, *_ = page.read_text(encoding="utf-8").splitlines()
    assert title.startswith(f"# {page.name[:4]} ")
    assert (blank, after) == ("", "")
    assert STATUS.fullmatch(status), status


def test_the_index_lists_every_page_as_it_calls_itself() -> None:
    index = [line for line in (FOLDER / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("| [")]
    expected = []
    for page in PAGES:
        title, _, status, *_ = page.read_text(encoding="utf-8").splitlines()
        date = status.rpartition("Date: ")[2].rstrip(".")
        expected.append(f"| [{page.name[:4]}]({page.name}) | {title[7:]} | {date} |")
    assert index == expected


def test_every_decision_that_is_named_exists() -> None:
    numbers = {page.name[:4] for page in PAGES}
    folders = ("sdk", "plugins", "kernels", "tests", "tools", "examples", "docs")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*")]
    named = [
        (file.relative_to(ROOT), number)
        for file in (*files, *ROOT.glob("*.md"))
        if file.suffix in {".py", ".md", ".h", ".cpp", ".cu", ".cuh"} and file != Path(__file__)
        for number in REFERENCE.findall(file.read_text(encoding="utf-8"))
    ]
    assert named, "no reference was found at all"
    assert not [reference for reference in named if reference[1] not in numbers]
