"""The way in: from docs/index.md every question of docs/faq.md is answered within three clicks, and no page is lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from test_links import PAGES, REPOSITORY, ROOT, links

FRONT = ROOT / "docs" / "index.md"
FAQ = ROOT / "docs" / "faq.md"
CLICKS = 3


def led_to(page: Path, link: str) -> Path | None:
    """The page that a link of a page leads to; None for anything else."""
    within = re.sub(rf"^{REPOSITORY}/(?:blob|tree)/main/", f"{ROOT}/", link).partition("#")[0]
    if not within or "://" in within:
        return None
    target = (page.parent / within).resolve()
    return next((found for found in (target, target / "README.md") if found in PAGES), None)


def clicks(without: Path | None = None) -> dict[Path, int]:
    """Page -> how many clicks it is from the front page, by links in the text alone, none of them on `without`."""
    found, latest = {FRONT: 0}, {FRONT}
    while latest:
        here = {page for page in latest if page != without}
        reached = {target for page in here for link in links(page) if (target := led_to(page, link))}
        distance = max(found.values()) + 1
        latest = reached - set(found)
        found |= dict.fromkeys(latest, distance)
    return found


def questions() -> list[tuple[str, str, str]]:
    """Reader, question and answer."""
    text = FAQ.read_text(encoding="utf-8")
    found = []
    for section in text.split("\n## ")[1:]:
        reader, _, body = section.partition("\n")
        found += [(reader, *part.partition("\n")[::2]) for part in body.split("\n### ")[1:]]
    return found


def test_four_people_have_ten_questions_each() -> None:
    readers = [reader for reader, _, _ in questions()]
    assert {reader: readers.count(reader) for reader in readers} == {
        "You train models": 10,
        "Torch knows your device": 10,
        "You have a driver in C": 10,
        "You run a cluster": 10,
    }


@pytest.mark.parametrize("question", [question for _, question, _ in questions()])
def test_an_answer_is_within_three_clicks_of_the_front_page(question: str) -> None:
    """Without the FAQ, which leads everywhere."""
    (answer,) = [answer for _, asked, answer in questions() if asked == question]
    pages = [target for link in re.findall(r"\]\(([^)\s]+)\)", answer) if (target := led_to(FAQ, link))]
    assert pages, "the answer leads to no page"
    distance = clicks(without=FAQ)
    assert min(distance.get(page, CLICKS + 1) for page in pages) <= CLICKS


def test_every_page_of_the_documentation_is_within_three_clicks() -> None:
    distance = clicks()
    folders = ("docs", "examples", "kernels")
    pages = [page for page in PAGES if page.relative_to(ROOT).parts[0] in folders]
    assert [str(page.relative_to(ROOT)) for page in pages if distance.get(page, CLICKS + 1) > CLICKS] == []
