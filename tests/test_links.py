"""Links in the Markdown of this repository: those within it lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/ds-plugin-sdk/ds-plugin-sdk"
LINK = re.compile(r"\]\(([^)\s]+)\)")

# What a wheel's metadata carries: a package index shows it without the files beside it.
READMES = [ROOT / "README.md", *sorted((ROOT / "plugins").rglob("README.md"))]
PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *READMES,
        *(file for folder in ("docs", "examples", "kernels", ".github") for file in (ROOT / folder).rglob("*.md")),
    }
)


def links(file: Path) -> list[str]:
    """The targets of a page's links, without those in code."""
    text = re.sub(r"(?ms)^```.*?^```$|`[^`\n]*`", "", file.read_text(encoding="utf-8"))
    return LINK.findall(text)


def headings(file: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"(?m)^#+ (.+)$", file.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def leads_somewhere(page: Path, link: str) -> bool:
    within = re.sub(rf"^{REPOSITORY}/(?:blob|tree)/main/", f"{ROOT}/", link)
    if "://" in within or within.startswith("mailto:"):
        return True  # another site's page, or one that only GitHub has
    path, _, anchor = within.partition("#")
    target = page if not path else page.parent / path
    return target.exists() and (not anchor or anchor in headings(target))


def test_this_test_finds_a_broken_link(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `title`\n[a](#a-title) [b](gone.md) `[c](code.md)`\n", encoding="utf-8")
    assert links(page) == ["#a-title", "gone.md"]
    assert [leads_somewhere(page, link) for link in links(page)] == [True, False]
    assert leads_somewhere(page, f"{REPOSITORY}/blob/main/README.md")
    assert not leads_somewhere(page, f"{REPOSITORY}/blob/main/gone.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_what_exists(page: Path) -> None:
    assert not [link for link in links(page) if not leads_somewhere(page, link)]


@pytest.mark.parametrize("page", READMES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_readme_that_a_package_index_shows_has_no_relative_link(page: Path) -> None:
    assert not [link for link in links(page) if "://" not in link and not link.startswith("#")]
