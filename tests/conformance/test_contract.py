"""The contract page and the checks are one and the same."""

from __future__ import annotations

import re
from pathlib import Path

from ds_plugin_sdk.conformance import contract_page, suite
from ds_plugin_sdk.conformance.outcome import LEVELS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "contract.md"


def test_the_page_is_what_the_checks_say() -> None:
    wanted = contract_page.render()
    assert PAGE.read_text(encoding="utf-8") == wanted, "run: sdk conformance --contract > docs/contract.md"


def test_every_clause_has_a_check_and_every_check_a_clause() -> None:
    page = PAGE.read_text(encoding="utf-8")
    clauses = re.findall(r"^<a id=\"(.+?)\"></a>\*\*(.+?)\*\* ", page, flags=re.MULTILINE)
    assert all(anchor == number for anchor, number in clauses)
    numbers = [number for number, _ in clauses]
    assert sorted(numbers) == sorted({*numbers}), "a number is used twice"
    assert set(numbers) == {check.clause.number for check in suite.checks()}
    assert set(re.findall(r"Checked by `(.+?)`", page)) == {check.name for check in suite.checks()}


def test_a_number_says_its_level_and_chapter() -> None:
    letters = {level: level[0].upper() for level in LEVELS} | {"deepspeed": "U"}  # its unit tests: D is distributed
    assert len(set(letters.values())) == len(LEVELS)
    for check in suite.checks():
        assert re.fullmatch(rf"{letters[check.level]}\d+\.\d+", check.clause.number), check.name


def test_a_clause_is_a_sentence_with_a_reason() -> None:
    for check in suite.checks():
        assert check.clause.text.endswith((".", ".)")), check.name
        assert check.clause.reason.endswith((".", ".)")), check.name
