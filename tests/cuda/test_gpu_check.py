"""What `make gpu-check` reports, and whether the kernels are still those that were measured."""

from __future__ import annotations

import importlib.metadata
import json
import time
import zipfile
from pathlib import Path

import pytest

from gpu_check import check as gpu_check
from gpu_check import report


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
    layer = {**row, "case": "layer", "gigabytes_per_second": None, "times_copy": None, "speed_of_ours": None}
    errors = {"LAMB": "out of memory"}
    failure = {"case": "ops.empty/adam_/float32", "verdict": "failed", "what": "1 differs"}
    return {
        "date": date,
        "environment": {"gpu": "NVIDIA H200", "nvcc": "13.0"},
        "sources": sources,
        "steps": {"build": step},
        "conformance": {"ops": {"counts": {"passed": 7, "failed": 1}, "failures": [failure]}, "runtime": None},
        "benchmarks": {
            "copy_gigabytes_per_second": 4000.0,
            "rows": [row, layer],
            "errors": errors,
            "complete": False,
        },
    }


def test_the_kernels_are_those_of_the_newest_report() -> None:
    """Skipped with the reason where they are not: figures are then those of other kernels."""
    newest = report.newest_report(report.RESULTS)
    if newest is None:
        pytest.skip("no report in tools/gpu_check/results yet: run make gpu-check on a machine with a GPU")
    changed = report.changed_since(json.loads(newest.read_text()), report.source_digests())
    if changed:
        pytest.skip(f"{newest.name} measured other kernels, run make gpu-check; changed since: {', '.join(changed)}")


def test_every_kernel_source_is_digested() -> None:
    digests = report.source_digests()
    assert {"kernels/cuda/adam.cu", "kernels/cuda/adam_binding.cpp", "kernels/include/ds_kernels/adam.h"} <= set(
        digests
    )
    assert all(len(digest) == 16 for digest in digests.values())


def test_changes_since_a_report_are_named() -> None:
    now = {"a.cu": "1", "b.cu": "2", "new.cu": "3"}
    assert report.changed_since(report_of({"a.cu": "1", "b.cu": "0", "gone.cu": "4"}), now) == [
        "b.cu",
        "gone.cu",
        "new.cu",
    ]
    assert report.changed_since(report_of(now), now) == []


def test_the_newest_report_is_the_last_by_date(tmp_path: Path) -> None:
    assert report.newest_report(tmp_path) is None
    for name, date in (("cuda-b.json", "2026-01-01"), ("cuda-a.json", "2026-02-01")):
        (tmp_path / name).write_text(json.dumps(report_of({}, date)))
    newest = report.newest_report(tmp_path)
    assert newest is not None and newest.name == "cuda-a.json"


def test_the_report_for_people() -> None:
    text = report.markdown(report_of({}))
    assert "| build | passed | 1.5 | all 3 families: 1.5 s |" in text
    assert "| Adam GPT-2 XL float32 | FusedAdam | 12.0000 | 3600 | 0.90 | 1.00 |" in text
    assert "| layer | FusedAdam | 12.0000 | - | - | - |" in text
    assert "LAMB: out of memory" in text and "The time was over" in text
    assert "Conformance, ops: 7 passed, 1 failed.\n- ops.empty/adam_/float32: failed\n" in text


def test_failures_of_conformance_are_reported_in_full() -> None:
    failure = {"what": "1 differs", "why": "expected 2"}
    outcomes = [
        {"item": {"id": "a"}, "verdict": "passed", "failure": None},
        {"item": {"id": "b"}, "verdict": "crashed", "failure": failure},
        {"item": {"id": "c"}, "verdict": "expected failure", "failure": failure},
    ]
    found = {"counts": {"passed": 1, "crashed": 1, "expected failure": 1}, "seconds": 2.0, "outcomes": outcomes}
    result = report.conformance_result(found)
    assert result is not None and result["failures"] == [{"case": "b", "verdict": "crashed", **failure}]
    assert report.conformance_result(None) is None


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


def test_a_step_without_time_is_not_begun(run: gpu_check.Run) -> None:
    assert run.step("late", ("touch", run.into), limit=-3) is False
    assert run.steps["late"]["status"] == 124 and not run.into.exists()


def test_a_step_that_is_out_of_time_can_write_down_what_it_knows(run: gpu_check.Run) -> None:
    program = "import time\ntry: print('begun', flush=True), time.sleep(60)\nexcept KeyboardInterrupt: print('so far')"
    assert run.python("long", "-c", program, limit=5) is False
    assert run.steps["long"]["tail"] == ["begun", "so far"] and run.steps["long"]["status"] == 124


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

    def breaks(*arguments: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(gpu_check, "install", breaks)
    monkeypatch.setattr(gpu_check, "native_tests", breaks)
    for name in ("choice", "build", "deepspeed_ops", "deepspeed_runs", "warm_up", "benchmarks"):
        monkeypatch.setattr(gpu_check, name, lambda *arguments, name=name: ran.append(name))
    monkeypatch.setattr(gpu_check, "conformance", lambda run, part: ran.append(part))
    dealt: dict[str, tuple[str, ...]] = {"ops, share 1": (), "runtime": (), "runtime, memory": ()}
    monkeypatch.setattr(gpu_check, "share_out", lambda run: run.parts.update(dealt))
    environment = {"gpu": "NVIDIA H200", "nvcc_path": "nvcc", "arch": "sm_90", "deepspeed": "0.19.8"}
    written = json.loads(gpu_check.check(run, environment).read_text())
    assert ran[0] == "build" and ran[-2:] == ["runtime, memory", "benchmarks"]
    parts = ["ops, share 1", "runtime", "training", "features"]
    assert sorted(ran[1:-2]) == sorted(["choice", "deepspeed_ops", "deepspeed_runs", "warm_up", *parts])
    assert written["steps"]["install: broke"]["tail"][-1] == "OSError: no room"
    assert "native tests: broke" in written["steps"]


def test_every_case_is_in_one_part(run: gpu_check.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ops, runtime = [f"ops.accuracy/op_{i}/float32" for i in range(20)], ["runtime.flags.fp16", "runtime.memory.peak"]

    def list_cases(name: str, command: object, **more: object) -> bool:
        run.log(name).parent.mkdir(parents=True)
        run.log(name).write_text("Cases of cuda\n case  clause\n" + "".join(f" {c}   O1.1  x\n" for c in ops + runtime))
        return True

    monkeypatch.setattr(run, "step", list_cases)
    gpu_check.share_out(run)
    dealt = [word for part in run.parts.values() for word in part if word.startswith(("ops.", "runtime."))]
    assert sorted(dealt) == sorted(ops + runtime)
    assert run.parts["runtime"] == ("-k", "runtime.flags.fp16")
    assert run.parts["runtime, memory"] == ("-k", "runtime.memory.peak")


def test_where_no_case_is_listed_no_share_runs_the_whole_suite(
    run: gpu_check.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lists_nothing(name: str, command: object, **more: object) -> bool:
        run.log(name).parent.mkdir(parents=True)
        run.log(name).write_text("torch is broken\n")
        return False

    monkeypatch.setattr(run, "step", lists_nothing)
    with pytest.raises(RuntimeError, match="named no case"):
        gpu_check.share_out(run)
    assert set(run.parts) == {"training", "features"}


def test_results_that_were_not_written_to_their_end_stop_nothing(run: gpu_check.Run) -> None:
    gpu_check.WORK.mkdir(parents=True)
    (gpu_check.WORK / "cuda_ops.json").write_text('{"rows": [')
    written = json.loads(gpu_check.write_report(run, {"gpu": "NVIDIA H200"}).read_text())
    assert written["benchmarks"] is None and written["conformance"] == dict.fromkeys(run.parts)


def test_benchmarks_go_on_in_another_process(run: gpu_check.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter([False, True])
    names: list[str] = []
    monkeypatch.setattr(run, "python", lambda name, *arguments, limit: names.append(name) or next(ends))
    gpu_check.benchmarks(run)
    assert names == ["benchmarks", "benchmarks, second process"]


def test_wheels_are_carried_along(run: gpu_check.Run) -> None:
    run.wheels.mkdir(exist_ok=True)
    with zipfile.ZipFile(run.wheels / "small-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("small.py", "SIZE = 3")
    gpu_check.install(run)
    assert run.python("import", "-c", "import small; print(small.SIZE)", limit=60)
    assert run.steps["import"]["tail"] == ["3"]


def test_what_was_compiled_elsewhere_is_used(run: gpu_check.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.wheels.mkdir(exist_ok=True)
    (run.wheels / gpu_check.DEEPSPEED_OPS / "fused_adam").mkdir(parents=True)
    (run.wheels / gpu_check.NATIVE_TESTS).write_text("#!/bin/sh\necho native")
    (run.wheels / gpu_check.NATIVE_TESTS).chmod(0o755)
    gpu_check.install(run)
    gpu_check.deepspeed_ops(run)
    monkeypatch.setattr(gpu_check, "sanitizer", lambda nvcc: "true")
    gpu_check.native_tests(run, "/no/such/nvcc", "sm_90")
    assert (gpu_check.WORK / gpu_check.DEEPSPEED_OPS / "fused_adam").is_dir()
    assert run.steps["native tests"]["tail"] == ["native"]


def test_the_sanitizer_is_found_beside_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    binary = tmp_path / "cuda" / "bin" / "compute-sanitizer"
    binary.parent.mkdir(parents=True)
    binary.touch(mode=0o755)
    assert gpu_check.sanitizer(str(binary.with_name("nvcc"))) == str(binary)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert gpu_check.sanitizer("/usr/local/bin/nvcc") == str(binary)


def test_all_steps_together_end_in_time(run: gpu_check.Run) -> None:
    """Whatever a step may take, it gets no more than is left."""
    run.start -= gpu_check.SECONDS - 1
    begin = time.monotonic()
    assert run.step("late", ("sleep", "60"), limit=60) is False
    assert time.monotonic() - begin < 10


def test_plugins_are_found_beside_their_sources(tmp_path: Path) -> None:
    project = report.ROOT / "plugins" / "cuda" / "pyproject.toml"
    gpu_check.write_entry_points(tmp_path, project.read_text())
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert found.metadata["Name"] == "ds-plugin-cuda"
    points = {(point.group, point.name): point.value for point in found.entry_points}
    assert points == {("ds_plugin_sdk.plugins", "cuda"): "ds_plugin_cuda:plugin"}
