"""The tutorials, block by block: files are written, commands typed, and what they print is what the page shows.

A run does the tutorial of the day; with DS_TEST_TUTORIALS=1 it does all of them.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

import pages
from launchers import free_port

pytestmark = [pytest.mark.deepspeed, pytest.mark.compiler, pytest.mark.slow]

TUTORIALS = sorted((pages.ROOT / "docs" / "tutorials").glob("*.md"))
if os.environ.get("DS_TEST_TUTORIALS") != "1":
    TUTORIALS = [TUTORIALS[date.today().toordinal() % len(TUTORIALS)]]

# What a command's exit status is said to be, where that is not 0.
STATUS = {"sdk check before.py": 1}


def follow(page: Path, folder: Path, environment: dict[str, str]) -> None:
    """Do what a page says, in its order."""
    printed = ""
    for language, text in pages.blocks(page):
        if language in ("python", "cpp"):
            name = re.match(r"(?:#|//) (\w+\.(?:py|cpp))\n", text)
            assert name is not None, f"{page.name}: a block of {language} names no file:\n{text}"
            (folder / name[1]).write_text(text, encoding="utf-8")
        elif language == "text":
            assert pages.reads(text, printed), f"{page.name} shows\n{text}\nand the program prints\n{printed}"
        else:
            assert not language, f"{page.name}: nobody runs blocks of {language}"
            printed = "".join(type_line(line.strip(), folder, environment) for line in text.splitlines())


def type_line(line: str, folder: Path, environment: dict[str, str]) -> str:
    """What a line prints. What it says to install must be installed; the first day's test runs such lines."""
    command = line.partition("  #")[0].rstrip()
    if command.startswith("pip install "):
        for name in command.split()[2:]:
            assert importlib.metadata.version(name)
        return ""
    launcher = f"python -m deepspeed.launcher.runner --master_port {free_port()} "  # beside other tests' runs
    done = subprocess.run(
        ["bash", "-c", re.sub(r"\bdeepspeed (?=--)", launcher, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == STATUS.get(command, 0), f"$ {command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_does_what_it_says(page: Path, tmp_path: Path, kernel_cache: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    follow(page, tmp_path, {**os.environ, "PATH": path, "DS_PLUGIN_CACHE_DIR": str(kernel_cache)})


def test_a_page_that_shows_something_else_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Type\n\n    echo one two; echo 3\n\nand see\n\n```text\none  ...\n3\n```\n", encoding="utf-8")
    follow(page, tmp_path, dict(os.environ))
    page.write_text(page.read_text(encoding="utf-8").replace("3\n```", "4\n```"), encoding="utf-8")
    with pytest.raises(AssertionError, match="shows"):
        follow(page, tmp_path, dict(os.environ))
