"""``conformance.toml``: what it excuses, and that it cannot rot."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import pytest

from ds_plugin_sdk.conformance.expectations import Expectations
from ds_plugin_sdk.conformance.outcome import Failure, Item, Outcome
from ds_plugin_sdk.errors import ConformanceError

ITEMS = [Item(case, "ops.a", "ops", {}, "O1.1", "", "") for case in ("ops.a/x", "ops.a/y", "ops.b")]
PASSED = Outcome(ITEMS[0], "passed")
FAILED = Outcome(ITEMS[0], "failed", failure=Failure("it differs"))


def read(tmp_path: Path, text: str) -> Expectations:
    file = tmp_path / "conformance.toml"
    file.write_text(text, encoding="utf-8")
    return dataclasses.replace(Expectations.read(file), today=datetime.date(2026, 6, 1))


def entry(check: str, more: str = "") -> str:
    return f'[[expected_failure]]\ncheck = "{check}"\nreason = "ZAP-1"\n{more}\n'


@pytest.mark.parametrize("check", ["ops.a/x", "ops.a/*", "*/x"])
@pytest.mark.parametrize("verdict", ["failed", "crashed", "timed out"])
def test_a_failure_is_excused_with_its_reason(tmp_path: Path, check: str, verdict: str) -> None:
    expectations = read(tmp_path, entry(check))
    outcome = expectations.judge(dataclasses.replace(FAILED, verdict=verdict))  # type: ignore[arg-type]  # parametrized over the literals
    assert (outcome.verdict, outcome.reason, outcome.failure) == ("expected failure", "ZAP-1", FAILED.failure)
    assert not outcome.failed
    assert expectations.problems(ITEMS) == []


def test_an_unexpected_pass_counts_against_the_target(tmp_path: Path) -> None:
    outcome = read(tmp_path, entry("ops.a/*")).judge(PASSED)
    assert outcome.verdict == "unexpected pass"
    assert outcome.failed


def test_other_cases_and_skips_are_left_alone(tmp_path: Path) -> None:
    expectations = read(tmp_path, entry("ops.a/x"))
    other = Outcome(ITEMS[1], "failed", failure=Failure("it differs"))
    skipped = Outcome(ITEMS[0], "skipped", reason="declared")
    assert expectations.judge(other) is other
    assert expectations.judge(skipped) is skipped


@pytest.mark.parametrize("check", ["ops.a", "ops.a/z", "nothing/*", "ops.a/X"])
def test_an_unknown_id_is_a_problem(tmp_path: Path, check: str) -> None:
    (problem,) = read(tmp_path, entry(check)).problems(ITEMS)
    assert f"no case is called '{check}'" in problem
    assert str(tmp_path / "conformance.toml") in problem


@pytest.mark.parametrize("until", ['"2026-06-01"', "2026-06-01"])
def test_an_entry_ends_at_its_day(tmp_path: Path, until: str) -> None:
    expectations = read(tmp_path, entry("ops.a/x", f"until = {until}"))
    (problem,) = expectations.problems(ITEMS)
    assert "was expected to fail until 2026-06-01" in problem
    assert expectations.judge(FAILED) is FAILED
    the_day_before = dataclasses.replace(expectations, today=datetime.date(2026, 5, 31))
    assert the_day_before.problems(ITEMS) == []
    assert the_day_before.judge(FAILED).verdict == "expected failure"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[expected_failure]]\ncheck = 'ops.a/x'", "check, reason and"),
        ("[[expected_failure]]\nreason = 'r'", "check, reason and"),
        ("[[expected_failure]]\ncheck = 'ops.a/x'\nreason = ' '", "gives no reason"),
        ("[[expected_failure]]\ncheck = '*'\nreason = 'r'", "names a case or a group of cases"),
        ("[[expected_failure]]\ncheck = 3\nreason = 'r'", "names a case or a group of cases"),
        ("[[expected_failure]]\ncheck = 'ops.a/x'\nreason = 'r'\nuntill = '2027-01-01'", "check, reason and"),
        ("[[expected_failure]]\ncheck = 'ops.a/x'\nreason = 'r'\nuntil = 'soon'", "no day such as 2027-01-31"),
        ("[[expected_failures]]\ncheck = 'ops.a/x'\nreason = 'r'", "the only one is [[expected_failure]]"),
        ("[[expected_failure]", "cannot be read"),
    ],
)
def test_a_file_that_says_something_else_is_rejected(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        read(tmp_path, text)
    assert says in str(caught.value)


def test_a_file_that_is_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConformanceError, match="cannot be read"):
        Expectations.of("cpu", tmp_path / "nowhere.toml")


def test_the_file_of_the_project_goes_before_that_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, folder = tmp_path / "project", tmp_path / "folder"
    (project / "zap_accelerator").mkdir(parents=True)
    (project / "zap_accelerator" / "__init__.py").touch()
    folder.mkdir()
    monkeypatch.syspath_prepend(str(project))
    monkeypatch.chdir(folder)
    assert Expectations.of("zap_accelerator:ZAP").entries == ()
    (folder / "conformance.toml").write_text(entry("of the folder"), encoding="utf-8")
    assert Expectations.of("zap_accelerator:ZAP").path == folder / "conformance.toml"
    (project / "conformance.toml").write_text(entry("of the project"), encoding="utf-8")
    assert Expectations.of("zap_accelerator:ZAP").path == project / "conformance.toml"
    assert Expectations.of("nope:Nope").path == folder / "conformance.toml"
