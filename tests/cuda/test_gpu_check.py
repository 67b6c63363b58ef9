"""What `make gpu-check` reports, and whether the kernels are still those that were measured."""

from __future__ import annotations

import importlib.metadata
import json
import time
from pathlib import Path

import gpu_check
import pytest

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def report_of(sources: dict[str, str], date: str = "2026-01-02T00:00:00+00:00") -> dict[str, object]:
    step = {"status": 0, "seconds": 1.5, "tail": ["all 3 families: 1.5 s"]}
    row = {
        "case": "Adam GPT-2 XL float32",
        "implementation": "FusedAdam",
        "milliseconds": 12.0,
        "gigabytes_per_second": 3600.0,
        "times_copy": 0.9,
        "speed_of_ours": 1.0,
    }
    measured = {"copy_gigabytes_per_second": 4000.0, "rows": [row], "errors": {"LAMB": "out of memory"}}
    environment = {"gpu": "NVIDIA H200", "nvcc": "13.0"}
    return {
        "date": date,
        "environment": environment,
        "sources": sources,
        "steps": {"build": step},
        "benchmarks": measured,
    }


def test_the_kernels_are_those_of_the_newest_report() -> None:
    """Skipped with the reason where they are not: figures are then those of other kernels."""
    newest = gpu_check.newest_report(RESULTS)
    if newest is None:
        pytest.skip("no report in benchmarks/results yet: run make gpu-check on a machine with a GPU")
    changed = gpu_check.changed_since(json.loads(newest.read_text()), gpu_check.source_digests())
    if changed:
        pytest.skip(f"{newest.name} measured other kernels, run make gpu-check; changed since: {', '.join(changed)}")


def test_every_kernel_source_is_digested() -> None:
    digests = gpu_check.source_digests()
    assert {"kernels/cuda/adam.cu", "kernels/cuda/adam_binding.cpp", "kernels/include/ds_kernels/adam.h"} <= set(
        digests
    )
    assert all(len(digest) == 16 for digest in digests.values())


def test_changes_since_a_report_are_named() -> None:
    now = {"a.cu": "1", "b.cu": "2", "new.cu": "3"}
    assert gpu_check.changed_since(report_of({"a.cu": "1", "b.cu": "0", "gone.cu": "4"}), now) == [
        "b.cu",
        "gone.cu",
        "new.cu",
    ]
    assert gpu_check.changed_since(report_of(now), now) == []


def test_the_newest_report_is_the_last_by_date(tmp_path: Path) -> None:
    assert gpu_check.newest_report(tmp_path) is None
    for name, date in (("cuda-b.json", "2026-01-01"), ("cuda-a.json", "2026-02-01")):
        (tmp_path / name).write_text(json.dumps(report_of({}, date)))
    newest = gpu_check.newest_report(tmp_path)
    assert newest is not None and newest.name == "cuda-a.json"


def test_the_report_for_people() -> None:
    text = gpu_check.markdown(report_of({}))
    assert "| build | passed | 1.5 | all 3 families: 1.5 s |" in text
    assert "| Adam GPT-2 XL float32 | FusedAdam | 12.0000 | 3600 | 0.90 | 1.00 |" in text
    assert "LAMB: out of memory" in text


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpu_check.Run:
    monkeypatch.setattr(gpu_check, "WORK", tmp_path / "work")
    return gpu_check.Run(tmp_path / "results", tmp_path)


def test_a_step_that_fails_or_hangs_is_noted(run: gpu_check.Run) -> None:
    assert run.python("fails", "-c", "print('why'); raise SystemExit(3)", limit=30) is False
    assert run.python("hangs", "-c", "import time; time.sleep(60)", limit=1) is False
    assert run.step("is missing", ("/no/such/program",), limit=1) is False
    assert [run.steps[name]["status"] for name in ("fails", "hangs", "is missing")] == [3, 124, 127]
    assert run.steps["fails"]["tail"] == ["why"]


def test_what_a_step_has_started_ends_with_it(run: gpu_check.Run) -> None:
    """A worker that goes on would disturb the measurements that follow."""
    assert run.step("hangs", ("sh", "-c", "sleep 60 & echo $!; wait"), limit=2) is False
    worker = Path("/proc", run.steps["hangs"]["tail"][0], "stat")
    deadline = time.monotonic() + 10
    while worker.exists() and " Z " not in worker.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not worker.exists() or " Z " in worker.read_text()


def test_a_step_that_breaks_stops_no_other_and_is_reported(run: gpu_check.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def breaks(run: gpu_check.Run) -> None:
        raise OSError("no room")

    monkeypatch.setattr(gpu_check, "install", breaks)
    for name in ("build", "native_tests", "conformance", "benchmarks"):
        monkeypatch.setattr(gpu_check, name, lambda *arguments, name=name: ran.append(name))
    environment = {"gpu": "NVIDIA H200", "nvcc_path": "nvcc", "arch": "sm_90", "deepspeed": None}
    report = json.loads(gpu_check.check(run, environment).read_text())
    assert ran == ["build", "native_tests", "conformance", "benchmarks"]
    assert report["steps"]["install: broke"]["tail"][-1] == "OSError: no room"


def test_all_steps_together_end_in_time(run: gpu_check.Run) -> None:
    """Whatever a step may take, it gets no more than is left."""
    run.start -= gpu_check.SECONDS - 1
    begin = time.monotonic()
    assert run.step("late", ("sleep", "60"), limit=60) is False
    assert time.monotonic() - begin < 10


def test_plugins_are_found_beside_their_sources(tmp_path: Path) -> None:
    project = gpu_check.ROOT / "plugins" / "cuda" / "pyproject.toml"
    gpu_check.write_entry_points(tmp_path, project.read_text())
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert found.metadata["Name"] == "ds-plugin-cuda"
    points = {(point.group, point.name): point.value for point in found.entry_points}
    assert points == {("ds_plugin_sdk.plugins", "cuda"): "ds_plugin_cuda:plugin"}
