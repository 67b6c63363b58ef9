"""R1: what a call leaves alone: the current device, and Python's other threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ds_plugin_sdk.conformance.check import Clause, check, expect, expect_equal
from ds_plugin_sdk.conformance.runtime.support import (
    current_device_kept,
    indices,
    needs_streams,
    needs_two_devices,
    random_state_kept,
    slow_work,
)
from ds_plugin_sdk.conformance.target import Target

# Members that are asked of a device by its index.
_OF_AN_INDEX = (
    "available_memory",
    "current_stream",
    "default_generator",
    "default_stream",
    "device",
    "device_name",
    "get_rng_state",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_memory_stats",
    "total_memory",
)


@check(
    "runtime.device.left_current",
    Clause(
        "R1.24",
        "A member that is called with another device's index, and one that concerns all devices, leaves the current "
        "device.",
        reason="A log that asks for the memory of each device must not move the rank to the last of them.",
    ),
    needs=needs_two_devices,
)
def left_current(target: Target) -> None:
    accelerator = target.accelerator
    calls: dict[str, Callable[[int], object]] = {
        **{member: getattr(accelerator, member) for member in _OF_AN_INDEX},
        "set_rng_state": lambda index: accelerator.set_rng_state(accelerator.get_rng_state(), index),
        "Stream": lambda index: accelerator.Stream and accelerator.Stream(device=index),
        "manual_seed_all": lambda index: accelerator.manual_seed_all(7),
        "empty_cache": lambda index: accelerator.empty_cache(),
    }
    with random_state_kept(target), current_device_kept(target):
        for index in indices(target):
            torch.zeros(1 << 20, device=accelerator.device_name(index))  # for empty_cache
        for current, other in ((0, 1), (1, 0)):
            for member, call in calls.items():
                accelerator.set_device(current)
                call(other)
                after = f"current_device() after {member} for device {other}"
                expect_equal(accelerator.current_device(), current, after)


def _waits(target: Target) -> dict[str, Callable[[Any, torch.Tensor], object]]:
    """Ways to wait for the work before an event, and for a tensor that it writes."""
    accelerator = target.accelerator
    return {
        "synchronize": lambda event, tensor: accelerator.synchronize(),
        "stream.synchronize": lambda event, tensor: accelerator.current_stream().synchronize(),
        "event.synchronize": lambda event, tensor: event.synchronize(),
        "item": lambda event, tensor: tensor[0].item(),
        "cpu": lambda event, tensor: tensor.cpu(),
    }


@check(
    "runtime.device.threads_go_on",
    Clause(
        "R1.25",
        "While a thread waits for the device, in a `synchronize` or for a value that it reads, Python's other threads "
        "go on.",
        reason="Threads that load and pin batches, write checkpoints and answer a cluster's questions need the "
        "interpreter's lock, which a binding has to release.",
    ),
    needs=needs_streams,
    cases=lambda target: ({"by": by} for by in _waits(target)),
)
def threads_go_on(target: Target, by: str) -> None:
    accelerator = target.accelerator
    tensor, wait = torch.zeros(1 << 10, device=target.device), _waits(target)[by]
    turns: list[float] = []
    done = threading.Event()

    def take_turns() -> None:
        while not done.is_set():
            turns.append(time.perf_counter())
            time.sleep(0.005)

    thread = threading.Thread(target=take_turns)
    accelerator.synchronize()
    with slow_work(target) as keep_busy:
        for _ in range(4):
            keep_busy()
        tensor.fill_(7.0)
        event = accelerator.current_stream().record_event()
        thread.start()
        begin = time.perf_counter()
        wait(event, tensor)
        end = time.perf_counter()
        done.set()
        thread.join()
    inside = sum(begin < turn < end for turn in turns)
    milliseconds = (end - begin) * 1000
    # Of dozens. One may fall between two calls of a wait that holds the lock.
    what = f"another thread had {inside} turns in the {milliseconds:.0f} ms for which {by} waited"
    expect(
        inside > 5 or milliseconds < 60, what, why="expected one in about 5 ms: the wait holds the interpreter's lock"
    )
