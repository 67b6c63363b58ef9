"""How `make docs` builds the site: the repository's Markdown as it is, each page at its path in the repository.

GitHub shows the same files. So the order of pages is here and not in them, and links are rewritten while pages are
read: to a page of the site where there is one, to the repository for everything else.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]

project = PROJECT["name"]
author = copyright = PROJECT["authors"][0]["name"]
release = version = PROJECT["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "examples/**.md", "kernels/README.md", "plugins/*/README.md", "*.md"]
exclude_patterns = [".*", "build", "out", "dist", "plugins/xyz_template", "**/node_modules"]
templates_path = ["_templates"]
nitpicky = False  # signatures name torch's types, whose inventory is not on this machine

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(ROOT / "docs" / "_static" / "scorer.js")
html_additional_pages = {"index": "redirect.html"}  # the front page is at docs/, as in the repository
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"source_repository": f"{REPOSITORY}/", "source_branch": "main", "source_directory": ""}

myst_heading_anchors = 4  # GitHub's anchors
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True

default_role = "literal"  # single backticks in docstrings
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True

NAVIGATION = {
    "Start": ["tutorials/train", "tutorials/device-agnostic", "In short </README>", "/examples/README"],
    "Bring a device": [
        "writing-a-plugin",
        "torch-backend",
        "c-driver",
        "simulator",
        "privateuse1",
        "tutorials/port-an-extension",
        "porting",
        "cuda",
        "/kernels/README",
    ],
    "Run it": ["operations", "launchers", "troubleshooting", "transformers", "ops/README"],
    "Check it": ["conformance", "contract", "support", "performance", "deepspeed-tests", "conformance-in-tree"],
    "Reference": ["reference/README"],
    "About": [
        "faq",
        "alternatives",
        "glossary",
        "architecture",
        "decisions/README",
        "roadmap",
        "/CHANGELOG",
        "/CONTRIBUTING",
    ],
}

# Pages below another one in the navigation, where that is not a folder's README with its folder.
BELOW = {
    "docs/performance": ["performance-zen5", "performance-amx", "performance-intel", "performance-avx2"],
    "docs/transformers": ["transformers-families"],
    "README": ["/plugins/cpu/README", "/plugins/cuda/README"],
    "CONTRIBUTING": ["/RELEASING", "/SECURITY"],
}

CODE = re.compile(r"(?ms)(^```.*?^```$|`[^`\n]*`)")
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")


def navigation(docname: str) -> str:
    """What is added to a page: the pages below it, unseen in the text."""
    if docname == root_doc:
        return "".join(_toctree(pages, caption) for caption, pages in NAVIGATION.items())
    if docname in BELOW:
        return _toctree(BELOW[docname])
    page = ROOT / f"{docname}.md"
    if page.name == "README.md" and page.parent not in (ROOT, ROOT / "kernels"):
        inside = sorted(page.parent.rglob("*.md"))
        return _toctree([str(file.relative_to(page.parent).with_suffix("")) for file in inside if file != page])
    return ""


def _toctree(pages: list[str], caption: str = "") -> str:
    head = f":caption: {caption}\n" if caption else ""
    return "\n\n```{toctree}\n:hidden:\n" + head + "\n" + "\n".join(pages) + "\n```\n" if pages else ""


def site_link(page: Path, link: str, pages: set[Path]) -> str:
    """Where a link of a page leads in the site; as it is, if it does not lead into the repository."""
    within = re.sub(rf"^{REPOSITORY}/(?:blob|tree)/main/", "/", link)
    path, mark, anchor = within.partition("#")
    if "://" in within or not path or path.endswith((".svg", ".png")):
        return link
    target = Path(os.path.normpath(ROOT / path[1:] if path.startswith("/") else page.parent / path))
    for candidate in (target, target / "README.md"):
        if candidate in pages:
            return f"/{candidate.relative_to(ROOT)}{mark}{anchor}"
    if not target.exists() or ROOT not in target.parents:
        return link  # Sphinx says so
    return f"{REPOSITORY}/{'tree' if target.is_dir() else 'blob'}/main/{target.relative_to(ROOT)}{mark}{anchor}"


def read_source(app: Any, docname: str, source: list[str]) -> None:
    """Rewrite a page's links, but for those in code, and add its part of the navigation."""
    page = ROOT / f"{docname}.md"
    pages = {ROOT / app.env.doc2path(name, base=False) for name in app.env.found_docs}
    parts = CODE.split(source[0])
    parts[::2] = [LINK.sub(lambda found: site_link(page, found[0], pages), part) for part in parts[::2]]
    source[0] = "".join(parts) + navigation(docname)


def mark_code(app: Any, kind: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Our docstrings indent code without the `::` that reStructuredText wants before it."""
    marked: list[str] = []
    for index, line in enumerate(lines):
        before = [text for text in lines[:index] if text.strip()][-1:]
        begins = line.startswith("    ") and not lines[index - 1].strip() and before and not before[0].startswith(" ")
        if begins and not before[0].endswith(":"):
            marked += ["::", ""]
        marked.append(line)
    lines[:] = marked


def setup(app: Any) -> None:
    app.connect("source-read", read_source)
    app.connect("autodoc-process-docstring", mark_code, priority=400)  # before Napoleon
