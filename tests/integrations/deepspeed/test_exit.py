"""A process whose training is done ends with status 0, also while torch still has a thread at work."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path

import pytest
from deepspeed_support import Python

from ds_plugin_sdk import torch_threads

# Each child has a group that outlives destroy_process_group(), as a DeepSpeed engine keeps its groups, and a collective
# whose tensors only gloo's thread still refers to; that thread waits for the GIL when the child ends. Nothing may be
# printed before: to write gives the GIL away.
PROGRAM = """
import os, sys, time
import deepspeed, torch
from torch import distributed

failed = []
for _ in range(6):
    child = os.fork()
    if child:
        failed += [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
        continue
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    group = distributed.new_group([0])
    sys.setswitchinterval(1000)
    work = distributed.all_gather([torch.empty(1_000_000)], torch.ones(1_000_000), group=group, async_op=True)
    del work
    distributed.destroy_process_group()
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        pass
    break
else:
    print(*failed)
"""


@pytest.mark.deepspeed
@pytest.mark.slow
def test_a_thread_of_gloo_that_wants_the_gil_ends_before_python_does(python: Python) -> None:
    done = python(PROGRAM, OMP_NUM_THREADS="1")
    assert done.stdout.split() == ["0"] * 6, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["pt_gloo_runloop", "gloo_tcp_loop", "pt_autograd_0", "pt_autograd_12"])
def test_a_thread_at_work_is_waited_for_but_not_for_ever(name: str) -> None:
    started, stop = threading.Event(), threading.Event()
    worker = threading.Thread(target=work_under, args=(name, started, stop))
    worker.start()
    started.wait()
    try:
        start = time.monotonic()
        torch_threads.wait(0.2)
        assert time.monotonic() - start >= 0.2
        threading.Timer(0.2, stop.set).start()
        torch_threads.wait(60)
        assert stop.is_set()
    finally:
        stop.set()
        worker.join()


def test_a_thread_whose_name_is_cut_within_a_letter_is_no_error() -> None:
    own = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    name = own.read_bytes()
    own.write_bytes("fünfzehn Byteä".encode())  # 16 bytes, of which Linux keeps 15
    try:
        torch_threads.wait(0.2)
    finally:
        own.write_bytes(name)


def test_without_such_threads_nothing_is_waited_for() -> None:
    start = time.monotonic()
    torch_threads.wait(60)
    assert time.monotonic() - start < 30


def work_under(name: str, started: threading.Event, stop: threading.Event) -> None:
    """Compute until `stop`, without the GIL most of the time, under the name of one of torch's threads."""
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name, encoding="utf-8")
    data = bytes(1 << 27)
    started.set()
    while not stop.is_set():
        hashlib.sha256(data)
