"""How docs/conf.py makes the site: where links lead, and that each page has its place. It needs no Sphinx."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from test_links import PAGES, REPOSITORY, ROOT

PLUGIN_PAGES = [ROOT / "plugins" / name / "README.md" for name in ("cpu", "cuda")]
SITE = {page for page in PAGES if page.relative_to(ROOT).parts[0] in ("docs", "examples", "kernels")}
SITE |= {*PLUGIN_PAGES, *ROOT.glob("*.md")}


@pytest.fixture(scope="module")
def conf() -> Any:
    spec = importlib.util.spec_from_file_location("site_conf", ROOT / "docs" / "conf.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("docs/cuda.md", "operations.md#threads", "/docs/operations.md#threads"),
        ("docs/cuda.md", "ops/adam.md", "/docs/ops/adam.md"),
        ("docs/cuda.md", "../examples/slurm/README.md", "/examples/slurm/README.md"),
        ("docs/cuda.md", "../examples/c_driver", f"{REPOSITORY}/tree/main/examples/c_driver"),
        ("docs/cuda.md", "../Makefile", f"{REPOSITORY}/blob/main/Makefile"),
        ("README.md", f"{REPOSITORY}/blob/main/docs/porting.md", "/docs/porting.md"),
        ("README.md", f"{REPOSITORY}/tree/main/docs/decisions", "/docs/decisions/README.md"),
        ("README.md", f"{REPOSITORY}/blob/main/LICENSE", f"{REPOSITORY}/blob/main/LICENSE"),
        ("docs/cuda.md", "#building", "#building"),
        ("docs/cuda.md", "img/decode.png", "img/decode.png"),
        ("docs/cuda.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("docs/cuda.md", "gone.md", "gone.md"),  # Sphinx says so
    ],
)
def test_where_a_link_leads(conf: Any, page: str, link: str, expected: str) -> None:
    assert conf.site_link(ROOT / page, link, SITE) == expected


def test_links_in_code_stay_as_they_are(conf: Any) -> None:
    class App:
        class env:
            found_docs = ("docs/cuda",)

            @staticmethod
            def doc2path(name: str, base: bool) -> str:
                return f"{name}.md"

    source = ["[a](../Makefile) `[b](../Makefile)`\n\n```\n[c](../Makefile)\n```\n"]
    conf.read_source(App, "docs/operations", source)
    assert source[0].count(REPOSITORY) == 1 and source[0].startswith(f"[a]({REPOSITORY}")


def test_every_page_has_one_place_in_the_navigation(conf: Any) -> None:
    """Two would give it two neighbours; none, and nobody finds it."""
    places = [conf.root_doc]
    for page in SITE:
        docname = str(page.relative_to(ROOT).with_suffix(""))
        block = conf.navigation(docname)
        entries = [line for line in block.splitlines() if line and line[0] not in "`:"]
        paths = [entry.partition("<")[2].rstrip(">") or entry for entry in entries]
        places += [path[1:] if path.startswith("/") else str(Path(docname).parent / path) for path in paths]
    assert sorted(places) == sorted(str(page.relative_to(ROOT).with_suffix("")) for page in SITE)
