"""Level ``deepspeed``: a folder of tests runs on a target, and a test that hangs or crashes is lost alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_plugin_sdk.conformance import deepspeed
from ds_plugin_sdk.conformance.check import ExcusedError, NonconformanceError, take_told
from ds_plugin_sdk.conformance.deepspeed import session as sessions
from ds_plugin_sdk.conformance.deepspeed.known import Known
from ds_plugin_sdk.conformance.target import Target

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow, pytest.mark.timeout(300)]

FILES = {
    "test_ends.py": """
import os, time, pytest
def test_passes(): pass
def test_fails(): assert 1 == 2
def test_crashes(): os.abort()
def test_skips(): pytest.skip("no reason")
def test_hangs(): time.sleep(600)
def test_after(): pass
""",
    "test_imports.py": "import a_module_that_is_not_there\n",
    "test_skipped.py": "import pytest\npytest.skip('no such device', allow_module_level=True)\n",
    "test_calls.py": """
import multiprocessing, pytest, torch
import ds_plugin_sdk.ops.activation
from deepspeed.accelerator import get_accelerator

def step():
    torch.ops.ds_plugin.bias_activation(torch.ones(4), None, 1)

def test_calls_one(): step()
def test_calls_none(): torch.ones(4).add_(1)
def test_calls_in_a_rank():
    process = multiprocessing.get_context("forkserver").Process(target=step)
    process.start()
    process.join()
    assert process.exitcode == 0
@pytest.mark.parametrize("use_triton_ops", [True, False])
def test_for_both(use_triton_ops):
    if not get_accelerator().is_triton_supported():
        pytest.skip("triton is not supported on this system")
""",
    "test_ranks.py": """
import multiprocessing, time

def rank(index):
    if index == 0:
        raise ValueError("rank 0 has no model")
    time.sleep(600)

def test_ranks():
    with multiprocessing.get_context("forkserver").Pool(2) as pool:
        pool.starmap(rank, [(0,), (1,)])

def test_after(): pass
""",
    "test_path.py": """
import pathlib, sys
def test_the_clone_is_not_on_the_path(): assert str(pathlib.Path.cwd().parent) not in sys.path
""",
    "ops/test_device.py": """
from deepspeed.accelerator import get_accelerator
def test_device(): assert type(get_accelerator()).__module__ == "ds_plugin_cpu.accelerator"
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("clone") / "tests"
    (made / "unit" / "ops").mkdir(parents=True)
    (made / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    # As DeepSpeed's: spawned processes would import the clone's DeepSpeed.
    conftest = "import os, sys\nsys.path.insert(1, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))\n"
    (made / "conftest.py").write_text(conftest, encoding="utf-8")
    for name, text in FILES.items():
        (made / "unit" / name).write_text(text, encoding="utf-8")
    return made


@pytest.fixture(autouse=True)
def named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_PLUGIN_DEEPSPEED_TESTS", str(folder))


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    yield Target.find("cpu")
    for session in deepspeed._sessions.values():
        session.close()
    deepspeed._sessions.clear()


def test_each_test_has_its_end_and_those_after_a_crash_or_a_hang_are_run(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "CASE_SECONDS", 30.0)
    with pytest.raises(NonconformanceError, match="test_fails, test_crashes, test_hangs: of 6 tests 2 passed"):
        deepspeed.tests(target, "unit/test_ends.py")
    ends = {case: end for case, (end, _, _) in take_told()["tests"].items()}
    assert ends == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_crashes": "crashed",
        "test_skips": "skipped",
        "test_hangs": "timed out",
        "test_after": "passed",
    }


def test_a_test_ends_soon_after_one_of_its_ranks_has_failed(target: Target) -> None:
    with pytest.raises(NonconformanceError, match="of 2 tests 1 failed, 1 passed") as error:
        deepspeed.tests(target, "unit/test_ranks.py")
    assert "ValueError: rank 0 has no model\n(the other ranks had not ended 5 s later)" in error.value.why


def test_a_file_that_cannot_be_imported_fails(target: Target) -> None:
    with pytest.raises(NonconformanceError, match=r"\(file\): of 1 tests 1 failed") as error:
        deepspeed.tests(target, "unit/test_imports.py")
    assert "a_module_that_is_not_there" in error.value.why


def test_a_file_that_skips_itself_is_skipped_with_its_reason(target: Target) -> None:
    with pytest.raises(ExcusedError, match="no such device") as excuse:
        deepspeed.tests(target, "unit/test_skipped.py")
    assert excuse.value.verdict == "skipped"


def test_calls_of_ops_are_counted_in_ranks_too_and_what_needs_no_triton_runs_without(target: Target) -> None:
    deepspeed.tests(target, "unit/test_calls.py")
    told = {case: (end, calls > 0) for case, (end, _, calls) in take_told()["tests"].items()}
    assert told == {
        "test_calls_one": ("passed", True),
        "test_calls_none": ("passed", False),
        "test_calls_in_a_rank": ("passed", True),
        "test_for_both[True]": ("skipped", False),
        "test_for_both[False]": ("passed", False),
    }


def test_the_tests_run_on_the_target(target: Target) -> None:
    deepspeed.tests(target, "unit/ops/test_device.py")


def test_the_release_is_tested_not_the_clone(target: Target) -> None:
    deepspeed.tests(target, "unit/test_path.py")


def test_files_of_ops_come_first(target: Target) -> None:
    assert next(iter(deepspeed._files(target)))["file"] == "unit/ops/test_device.py"


def test_what_fails_on_deepspeeds_own_accelerator_too_is_excused_unless_it_passes_by_our_ops() -> None:
    own, cpu = {"failed": ["test_x", "test_z"]}, {"passed": ["test_z"], "failed": ["test_x"]}
    ends = {"deepspeed": {"unit/test_a.py": own}, "cpu": {"unit/test_a.py": cpu}}
    known = Known("0", "", ends, {}, {"unit/b.py::*": "later"})
    assert known.excuse("unit/test_a.py", "test_x") == "it fails on DeepSpeed's own CPU accelerator too"
    assert known.excuse("unit/test_a.py", "test_y") is None
    assert known.excuse("unit/test_a.py", "test_z") is None
    assert known.excuse("unit/b.py", "test_x") == "later"


def test_the_file_of_known_ends_is_whole() -> None:
    known = Known.read()
    assert set(known.accelerators) == {"cpu", "deepspeed"}
    assert all(why.strip() for why in known.reasons.values())
