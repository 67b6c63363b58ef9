"""What `make test-clusters` makes of what launchers say; the launchers themselves it starts outside the tests."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from clusters import __main__ as program
from clusters.cases import CASES, Case, Defect
from ds_plugin_sdk.provenance import Record


@pytest.mark.parametrize(
    ("rank", "line"),
    [
        (2, "prterun noticed that process rank 2 with PID 1072 on node node2 exited on signal 9 (Killed)."),
        (2, "=   RANK 2 PID 314 RUNNING AT node2"),
        (2, "srun: error: node2: task 2: Killed"),
        (0, "E1123 api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 971) of binary: python"),
        (0, "[ERROR] [launch.py:259:sigkill_handler] ['rank.py', '--local_rank=0'] exits with return code = -9"),
    ],
)
def test_a_launcher_that_names_the_rank_is_understood(rank: int, line: str) -> None:
    assert program.name_of(rank, f"[rank1]: RuntimeError: Connection reset by peer\n{line}\n")


def test_the_name_of_another_rank_is_none_nor_is_the_command() -> None:
    said = (
        "cmd = mpirun -env RANK 2 rank.py --kill 2\n"
        "srun: error: node2: task 3: Exited with exit code 1\n"
        "[ERROR] ['rank.py', '--local_rank=1'] exits with return code = -9\n"
    )
    assert program.name_of(2, said) == ""


CASE = Case("zap", ("zap",), ("zap", "-V"), cores="own")


def said(**changes: Any) -> list[dict[str, Any]]:
    """Two ranks as they should be, but for what is said of the second."""
    one = {"rank": 0, "ranks": 2, "local_rank": 0, "argument": None, "node": "node1", "threads": 1, "cores": [0]}
    one |= {"accelerator": program.PLUGIN, "environment": {"DS_PLUGIN_NOTE": "a b"}, "losses": [2.0, 1.0]}
    return [one, {**one, "rank": 1, "local_rank": 1, "cores": [1], **changes}]


@pytest.fixture
def wrong(tmp_path: Path) -> Any:
    """``wrong(ranks, ...)``: the checks that a job which ran to its end fails."""
    load = Record("cpu_adam", "cpu", "1.0", "compiled", 1.0, "", 0)
    (tmp_path / "loads").write_text(json.dumps(dataclasses.asdict(load)) + "\n")

    def judge(ranks: list[dict[str, Any]], left: tuple[str, ...] = ()) -> list[str]:
        environment = {"DS_PLUGIN_NOTE": "a b", "DS_PLUGIN_PROVENANCE": str(tmp_path / "loads")}
        for rank in ranks:
            rank["environment"]["DS_PLUGIN_PROVENANCE"] = str(tmp_path / "loads")
        return sorted(dict(program.judge(CASE, environment, program.Job(0, 1.0, "", list(left)), ranks)))

    return judge


def test_a_job_as_it_should_be(wrong: Any) -> None:
    assert wrong(said()) == []


@pytest.mark.parametrize(
    ("check", "changes"),
    [
        ("ranks", {"node": "node2", "cores": [0]}),
        ("argument", {"argument": 1}),
        ("cores", {"cores": [0]}),
        ("threads", {"threads": 2}),
        ("plugin", {"accelerator": "deepspeed.accelerator.cpu_accelerator"}),
        ("settings", {"environment": {"DS_PLUGIN_NOTE": "a"}}),
        ("losses", {"losses": [2.0, 1.5]}),
    ],
)
def test_what_is_wrong_of_one_rank_is_found(check: str, changes: dict[str, Any], wrong: Any) -> None:
    assert check in wrong(said(**changes))


def test_what_is_left_is_found(wrong: Any) -> None:
    assert wrong(said(), left=("node1:/dev/shm/zap",)) == ["left"]
    lost = dict(program.judge_loss(program.Job(0, 9.0, "", ["python rank.py"]), ""))
    assert lost.keys() == {"status", "named", "left after a loss"}
    assert dict(program.judge_loss(program.Job(None, 100.0, "", []), "rank 1")).keys() == {"ended"}


def test_a_known_defect_must_be_there() -> None:
    defect = Defect("an option is ignored", "pytest/__init__.py", "import")
    case = dataclasses.replace(CASE, defects={"cores": defect})
    there = program.Outcome(case, "1", [], {"cores": "are 0"}, "rank 1", 1.0)
    assert there.result()[0]
    assert "an option is ignored (pytest/__init__.py:" in there.result()[1]
    assert not dataclasses.replace(there, wrong={}).result()[0]
    with pytest.raises(LookupError, match="has no 'no such line' any more"):
        str(dataclasses.replace(defect, line="no such line"))


def test_a_page_has_a_row_for_each_launcher_and_keeps_those_that_were_not_started() -> None:
    whole = program.page([program.Outcome(case, "1.5", said(), {}, "", 1.0) for case in CASES])
    assert whole.count("\n| ") == len(CASES) + 2
    again = program.page([program.Outcome(CASES[3], "2.5", said(), {}, "", 1.0)], whole)
    assert again == whole.replace(f"| {program.title(CASES[3])} | 1.5", f"| {program.title(CASES[3])} | 2.5")
