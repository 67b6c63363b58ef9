"""Level ``features``: the table, and what the program that runs it says of failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_plugin_sdk.conformance import features, worker
from ds_plugin_sdk.conformance.check import Case, Check, Clause, ExcusedError, NonconformanceError
from ds_plugin_sdk.conformance.outcome import Item, Outcome, Report
from ds_plugin_sdk.conformance.process import START_TIMEOUT
from ds_plugin_sdk.conformance.programs import feature_tasks
from ds_plugin_sdk.conformance.programs import features as program
from ds_plugin_sdk.conformance.reports import support
from ds_plugin_sdk.conformance.target import Target


def test_rows_have_names_of_their_own_and_tasks_that_are_there() -> None:
    names = [(row.group, row.name) for row in features.FEATURES]
    assert len(set(names)) == len(names) > 50
    assert {run.task for row in features.FEATURES for run in row.runs} <= set(feature_tasks.TASKS)


@pytest.mark.parametrize(
    ("code", "limit"),
    [
        ("x = torch.zeros(1, device='cuda')", True),
        ("torch.cuda.synchronize()", True),
        ("if accelerator.device_name() != 'cuda':\n    raise ValueError('no')", True),
        ("raise ValueError('no')", False),
        ("assert backend in ['inductor', 'eager'], 'no'", True),
        ("assert shape == other", False),
    ],
)
def test_what_asks_for_cuda_by_its_name_is_deepspeeds_limit(code: str, limit: bool, tmp_path: Path) -> None:
    file = tmp_path / "engine.py"
    file.write_text(code, encoding="utf-8")
    statement = program._statement(file, len(code.splitlines()))
    assert bool(program._CUDA.search(statement)) is limit


class InductorError(RuntimeError):
    """As torch names it."""


@pytest.mark.deepspeed
def test_inductor_where_the_accelerator_names_another_backend_is_deepspeeds_limit() -> None:
    import deepspeed

    name = "runtime/zero/muon/original_muon.py"
    code = compile("raise error", str(Path(deepspeed.__file__).parent / name), "exec")
    for error, backend, limit in (
        (InductorError(), "aot_eager", f"deepspeed/{name}:1"),
        (InductorError(), "inductor", ""),
        (RuntimeError(), "aot_eager", ""),
    ):
        with pytest.raises(type(error)) as raised:
            exec(code, {"error": error})
        assert program._limit(raised.value, backend).rpartition(":")[0] == limit


def test_the_rank_that_failed_is_told_rather_than_the_one_that_waited() -> None:
    waited = {"ended": "it took longer than 9 s", "output": ""}
    failed = {"failure": "ValueError: 3", "trace": "here", "limit": ""}
    with pytest.raises(NonconformanceError, match="rank 1 of 2: ValueError: 3"):
        features._expect_done([waited, failed])
    with pytest.raises(NonconformanceError, match="rank 0 of 1 ended it took longer than 9 s"):
        features._expect_done([waited])


def test_a_limit_is_a_verdict_of_its_own() -> None:
    with pytest.raises(ExcusedError, match=r"x\.py:3") as excuse:
        features._expect_done([{"failure": "?", "trace": "", "limit": "x.py:3: device='cuda'"}])
    assert excuse.value.verdict == "DeepSpeed's limit"


@pytest.mark.parametrize("found", [[1.0, 2.1], [1.0], [1.0, float("nan")]])
def test_other_numbers_than_the_hosts_fail(found: list[float]) -> None:
    with pytest.raises(NonconformanceError, match="the host has"):
        features._expect_same({"losses": found}, {"losses": [1.0, 2.0]}, 1e-3)
    features._expect_same({"losses": [1.0, 2.001]}, {"losses": [1.0, 2.0]}, 1e-3)


def test_a_case_that_may_take_longer_gives_its_ranks_as_much_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an emulated device, or a busy machine: ``--timeout``."""
    asked: list[tuple[float, float]] = []

    class Program:
        def ask(self, request: dict[str, Any], timeout: float) -> list[Any]:
            asked.append((request["seconds"], timeout - request["seconds"]))
            return []

    server = features._Server("cpu")
    monkeypatch.setattr(server, "_worker", Program())
    ran = Check(
        "features.x",
        Clause("F1.1", "", ""),
        lambda target: server.run(features.Run("train"), {}, 120.0),
        lambda target: [{}],
        lambda target: None,
        isolated=False,
        timeout=600.0,
    )
    for timeout in (600.0, 1800.0, 60.0):
        assert worker._run(Case(ran), Target.find("cpu"), timeout)["verdict"] == "passed"
    monkeypatch.undo()
    assert asked == [(120.0, START_TIMEOUT), (360.0, START_TIMEOUT), (120.0, START_TIMEOUT)]


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_crash_a_failure_and_a_limit_are_the_features_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server lives on, and runs the next feature."""
    target = Target.find("cpu")
    for wrong in (
        features.Run("train", {"config": {"no_such": 1, "optimizer": {"type": "None"}}}, 1),
        features.Run("no_such_task", {}, 1),
    ):
        with pytest.raises(NonconformanceError, match="rank 0 of 1"):
            features._expect_done(features._server(target.name).run(wrong, wrong.options))
    features._run("zero", target, "stage_1")
    for name in (target.name, features._HOST):
        features._server(name).close()


def test_the_matrix_says_what_each_feature_runs_on() -> None:
    def outcome(name: str, verdict: str, **more: object) -> Outcome:
        item = Item(f"features.zero/{name}", "features.zero", "features", {"feature": name}, "F1.1", "", "")
        return Outcome(item, verdict, **more)  # type: ignore[arg-type]  # callers pass the literals

    report = Report(
        "zap",
        {"ops": [{"name": "fused_adam", "origin": "cache"}]},
        [
            outcome(
                "stage_1", "passed", facts={"ops": {"fused_adam": "cache", "lamb": "reference", "zap": "accelerator"}}
            ),
            outcome("zenflow_3", "DeepSpeed's limit", reason="deepspeed/x.py:1: 'cuda'"),
            outcome("stage_2", "failed"),
        ],
    )
    said = support.markdown([report])
    assert "| fused_adam | native |" in said
    assert "| zero/stage_1 | native and reference |" in said
    assert "| zero/zenflow_3 | DeepSpeed's limit |" in said
    assert "| zero/zenflow_3 | deepspeed/x.py:1: 'cuda' |" in said
    assert "<td>zero/stage_2</td><td>failed</td>" in support.html([report])
