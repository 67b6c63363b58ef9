"""``sdk conformance``: exit statuses, what it prints, what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.slow


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ds_plugin_sdk.cli", "conformance", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what one run printed and wrote: passes, failures of each kind, skips, an expected failure."""
    folder = tmp_path_factory.mktemp("run")
    expectations = (
        '[[expected_failure]]\ncheck = "runtime.misfit.raises"\nreason = "MIS-7 <soon>"\n'
        '[[expected_failure]]\ncheck = "runtime.misfit.counts"\nreason = "MIS-8"\n'
        '[[expected_failure]]\ncheck = "runtime.misfit.gone"\nreason = "MIS-9"\n'
    )
    (folder / "conformance.toml").write_text(expectations, encoding="utf-8")
    wanted = ["passes", "differs", "raises", "crashes/one", "hangs", "skipped", "counts"]
    chosen = [option for case in wanted for option in ("-k", f"runtime.misfit.{case}")]
    files = ["--json", "run.json", "--junit", "run.xml", "--html", "out/run.html"]
    done = run("misfit:Misfit", *chosen, *files, "--expectations", "conformance.toml", cwd=folder)
    (folder / "status").write_text(str(done.returncode), encoding="utf-8")
    (folder / "out.txt").write_text(done.stdout, encoding="utf-8")
    (folder / "err.txt").write_text(done.stderr, encoding="utf-8")
    return folder


def text(folder: Path, name: str) -> str:
    return (folder / name).read_text(encoding="utf-8")


def test_what_does_not_hold_is_exit_status_1(written: Path) -> None:
    assert text(written, "status") == "1", text(written, "err.txt")


def test_the_terminal_shows_matrix_failures_skips_and_total(written: Path) -> None:
    said = text(written, "out.txt")
    rows = [line.split() for line in said.splitlines()]
    ends = "passed failed crashed timed out unexpected pass expected failure skipped"
    assert ["level", "subject", *ends.split(), "seconds"] in rows
    assert ["all", *"1111111"] in [row[:-1] for row in rows]
    assert "failed: runtime.misfit.differs\n  R99.2    The misfit's differs is in order.\n" in said
    assert "  found    devices: 1\n  why      expected 2\n  to do    count them again\n" in said
    assert "  again    sdk conformance misfit:Misfit -k runtime.misfit.differs\n" in said
    assert "Skipped, the accelerator declares that it is a misfit: runtime.misfit.skipped\n" in said
    assert ["runtime.misfit.raises", "R99.3", "MIS-7", "<soon>"] in rows
    assert "expectations: conformance.toml: no case is called 'runtime.misfit.gone'" in said
    assert said.rstrip().endswith("does not conform")
    assert "failed: runtime.misfit.differs" in text(written, "err.txt")  # at once, not only at the end


def test_json_has_everything(written: Path) -> None:
    data = json.loads(text(written, "run.json"))
    assert data["status"] == 1
    assert data["counts"] == dict.fromkeys(
        ["passed", "failed", "crashed", "timed out", "unexpected pass", "expected failure", "skipped"], 1
    )
    assert data["environment"]["versions"]["torch"] != "not installed"
    assert data["environment"]["device"] == "cpu"
    assert "float32" in data["environment"]["dtypes"]
    assert data["environment"]["declared"]["is_synchronized_device"] == "True"
    assert data["outcomes"][1]["failure"]["what"] == "devices: 1"
    assert data["outcomes"][1]["item"]["reason"] == "Its users believe so."


def test_junit_is_what_ci_systems_read(written: Path) -> None:
    runtime, expectations = ElementTree.fromstring(text(written, "run.xml"))
    counts = {name: runtime.get(name) for name in ("name", "tests", "failures", "errors", "skipped")}
    assert counts == {
        "name": "misfit:Misfit.runtime",
        "tests": "7",
        "failures": "2",
        "errors": "2",
        "skipped": "2",
    }
    cases = {case.get("name"): case for case in runtime}
    failure = cases["runtime.misfit.differs"].find("failure")
    assert failure is not None and failure.get("message") == "devices: 1"
    assert "sdk conformance misfit:Misfit -k" in (failure.text or "")
    assert cases["runtime.misfit.crashes/one"].find("error") is not None
    assert len(cases["runtime.misfit.passes"]) == 0
    assert expectations.get("failures") == "1"


def test_the_page_stands_alone_and_escapes_what_it_is_told(written: Path) -> None:
    page = text(written, "out/run.html")
    assert "MIS-7 &lt;soon&gt;" in page and "<soon>" not in page
    assert "devices: 1" in page and "is_synchronized_device" in page and "bfloat16" in page
    assert not any(outside in page for outside in ("http:", "https:", "<script", "src=", "@import"))


def test_what_holds_is_exit_status_0(tmp_path: Path) -> None:
    done = run("misfit:Misfit", "-k", "runtime.misfit.passes", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all that was checked holds" in done.stdout


@pytest.mark.parametrize("pattern", ["no such case", "runtime.misfit.skipped"])
def test_nothing_checked_is_exit_status_3(tmp_path: Path, pattern: str) -> None:
    done = run("misfit:Misfit", "-k", pattern, cwd=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "nothing was checked, which is no success" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "there is no such plugin"),
        (["no.such:Thing"], "the target cannot be used (plugin 'no.such:Thing'): the target cannot be imported"),
        (["json:Thing"], "has no attribute 'Thing'"),
        ([], "name a plugin"),
        (["cpu", "--expectations", "nowhere.toml"], "the expectations cannot be read"),
        (["cpu", "--level", "kernel"], "there is no level 'kernel'"),
        (["--diff", "nowhere.json", "nowhere.json"], "is no report"),
    ],
)
def test_wrong_use_is_exit_status_2(tmp_path: Path, arguments: list[str], says: str) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_the_list_has_each_case_with_its_clause(tmp_path: Path) -> None:
    done = run("misfit:Misfit", "--list", "-k", "misfit", cwd=tmp_path)
    assert done.returncode == 0
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["runtime.misfit.crashes/two/float32", "R99.6"] in [row[:2] for row in rows]
    assert "skipped: the accelerator declares that it is a misfit" in done.stdout


def test_the_difference_of_two_runs(written: Path) -> None:
    data = json.loads(text(written, "run.json"))
    ends = {"runtime.misfit.differs": "passed", "runtime.misfit.passes": "failed"}
    for outcome in data["outcomes"]:
        outcome["verdict"] = ends.get(outcome["item"]["id"], outcome["verdict"])
    (written / "other.json").write_text(json.dumps(data), encoding="utf-8")
    done = run("--diff", "run.json", "other.json", cwd=written)
    rows = [line.split() for line in done.stdout.splitlines() if "runtime.misfit" in line]
    assert rows == [["runtime.misfit.passes", "passed", "failed"], ["runtime.misfit.differs", "failed", "passed"]]
    assert "1 of them fail now and did not before" in done.stdout
    assert done.returncode == 1
    same = run("--diff", "run.json", "run.json", cwd=written)
    assert same.returncode == 0
    assert "0 cases ended otherwise" in same.stdout


def test_a_file_that_cannot_be_written_is_told_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("", encoding="utf-8")
    done = run("misfit:Misfit", "-k", "runtime.misfit.passes", "--html", "taken/page.html", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "taken/page.html cannot be written" in done.stderr
    assert "passes" not in done.stdout


def test_a_report_is_written_though_nothing_can_be_printed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ds_plugin_sdk.cli", "conformance", "misfit:Misfit"]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        subprocess.run(
            [*command, "-k", "runtime.misfit.passes", "--json", "run.json"],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=280,
        )
    assert [each["verdict"] for each in json.loads(text(tmp_path, "run.json"))["outcomes"]] == ["passed"]


def test_a_report_goes_where_a_link_leads(tmp_path: Path) -> None:
    (tmp_path / "latest.json").symlink_to("run.json")
    run("misfit:Misfit", "-k", "runtime.misfit.passes", "--json", "latest.json", "--html", "/dev/null", cwd=tmp_path)
    assert (tmp_path / "latest.json").is_symlink() and not Path("/dev/null").is_file()
    assert [each["verdict"] for each in json.loads(text(tmp_path, "run.json"))["outcomes"]] == ["passed"]


def test_a_run_of_another_target_is_none_to_go_on_with(tmp_path: Path) -> None:
    run("misfit:Misfit", "-k", "runtime.misfit.passes", "--json", "run.json", cwd=tmp_path)
    before = text(tmp_path, "run.json")
    done = run("cpu", "-k", "runtime.random.restore", "--json", "run.json", "--resume", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "run.json is the report of misfit:Misfit" in done.stderr
    assert text(tmp_path, "run.json") == before


def test_a_run_goes_on_with_what_failed_and_what_is_missing_in_the_order_of_the_list(tmp_path: Path) -> None:
    def resumed(*cases: str) -> list[dict[str, Any]]:
        chosen = [option for case in cases for option in ("-k", f"runtime.misfit.{case}")]
        run("misfit:Misfit", *chosen, "--json", "run.json", "--resume", cwd=tmp_path)
        return list(json.loads(text(tmp_path, "run.json"))["outcomes"])

    passes, raises = resumed("passes", "raises")
    passes["seconds"], raises["failure"]["what"] = 1e6, "what failed before"
    report = json.loads(text(tmp_path, "run.json"))
    (tmp_path / "run.json").write_text(json.dumps({**report, "outcomes": [passes, raises]}), encoding="utf-8")

    outcomes = resumed("passes", "raises", "differs")
    assert [each["item"]["id"].rpartition(".")[2] for each in outcomes] == ["passes", "differs", "raises"]
    assert outcomes[0]["seconds"] == 1e6
    assert outcomes[2]["failure"]["what"] != "what failed before"
