"""Mistakes that are easily made in a device's runtime are seen by the checks, each by the one that is named for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from device_programs import RunChecks

Change = Callable[[str, str, str], None]

pytestmark = [pytest.mark.compiler, pytest.mark.slow]


def failing(run_checks: RunChecks, sources: Path, names: list[str]) -> set[str]:
    outcomes = run_checks(names, "--sources", str(sources))
    assert set(outcomes) == set(names)
    return {name for name, failure in outcomes.items() if failure}


@pytest.mark.parametrize(
    ("file", "right", "wrong", "caught_by"),
    [
        pytest.param(
            "runtime/memory.cpp",
            'launch(stream, [=] { std::memmove(target, source, bytes); }, "memcpy");',
            "std::memmove(target, source, bytes);",
            "a_copy_waits_its_turn_on_the_stream",
            id="memcpy ignores the stream",
        ),
        pytest.param(
            "runtime/event.cpp",
            'submit(stream, {[mark] { mark->reach(); }, "event_record", false});',
            "mark->reach();",
            "events_follow_the_work_before_them",
            id="an event reports early",
        ),
        pytest.param(
            "runtime/event.cpp",
            'submit(stream, {[mark = event->mark] { mark->wait(); }, "stream_wait_event", false});',
            "",
            "an_event_makes_another_stream_wait",
            id="a stream does not wait for an event",
        ),
        pytest.param(
            "runtime/memory.cpp",
            "return pool(device).take(rounded(bytes));",
            "return pool(0 * device).take(rounded(bytes));",
            "devices_have_memory_of_their_own",
            id="malloc ignores the device",
        ),
    ],
)
def test_a_mistake_in_the_runtime_is_caught(
    file: str, right: str, wrong: str, caught_by: str, with_change: Change, run_checks: RunChecks, tmp_path: Path
) -> None:
    with_change(file, right, wrong)
    assert failing(run_checks, tmp_path, [caught_by, "tensors_make_the_round_trip"]) >= {caught_by}


def test_mistakes_in_torch_s_side_are_caught(with_change: Change, run_checks: RunChecks, tmp_path: Path) -> None:
    """Together, because they take long to compile and do not meet."""
    with_change("torch/hooks.cpp", "const DeviceIndex index = or_current(device);", "const DeviceIndex index = 0;")
    with_change(
        "torch/allocators.cpp",
        "amount >= 0 ? all.increase(amount) : all.decrease(-amount);",
        "if (amount >= 0) all.increase(amount);",
    )
    with_change("torch/allocators.cpp", "found->second.borrowers.insert(key);", "{}")
    with_change("torch/allocators.cpp", "found->second.streams.insert(key_of(stream));", "{}")
    caught = {
        "each_device_has_its_own_random_numbers",
        "memory_statistics_rise_and_fall",
        "record_stream_keeps_memory_from_being_reused",
        "pinned_copies_do_not_keep_the_host_waiting",
    }
    assert failing(run_checks, tmp_path, [*caught, "tensors_make_the_round_trip"]) == caught


@pytest.mark.parametrize(
    ("file", "right", "wrong", "declaration"),
    [
        ("memory.cpp", "void* host_malloc(", "void* hostmalloc(", "host_malloc"),
        ("memory.cpp", "MemoryInfo memory_info(int device) {", "MemoryInfo memory_info(long device) {", "memory_info"),
        ("device.cpp", "const char* runtime_start(const", "const char* runtime_starts(const", "runtime_start"),
    ],
    ids=["misspelt", "other arguments", "the first one"],
)
def test_a_function_that_is_missing_is_named(
    file: str, right: str, wrong: str, declaration: str, with_change: Change, run_checks: RunChecks, tmp_path: Path
) -> None:
    """It is found before anything calls it, which would end the process."""
    with_change(f"runtime/{file}", right, wrong)
    with pytest.raises(AssertionError, match=rf"lacks functions of runtime\.h[^;]* {declaration}\([^;]*\n"):
        run_checks(["tensors_make_the_round_trip"], "--sources", str(tmp_path))
