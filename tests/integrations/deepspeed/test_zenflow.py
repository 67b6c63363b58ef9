"""ZenFlow's overlapped optimizer: a process that steps while another trains."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.synchronize import Event

import pytest
import torch
from torch import Tensor, multiprocessing

from ds_plugin_cpu.accelerator import CPU_Accelerator
from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.integrations.deepspeed import zenflow
from ds_plugin_sdk.integrations.deepspeed.modules import cpu_adam

LR, BETAS, EPS = 0.01, (0.9, 0.95), 1e-6
SIZES, DECAYS = (1003, 17), (0.1, -1.0)  # of two groups; a negative decay is none


def shared(*sizes: int) -> list[Tensor]:
    return [torch.randn(size).share_memory_() for size in sizes]


def optimizer_process(groups: list[tuple[Tensor, ...]], control: Tensor, ready: Event) -> None:
    cpu_adam.create_adam(0, LR, *BETAS, EPS, 0.0, True, False)
    handle = cpu_adam.zenflow_adam_create(0, [0, 1, 4096])  # no machine of ours has the last core
    for param, grad0, grad1, stale in groups:
        moments = [torch.zeros_like(param) for _ in range(4)]
        cpu_adam.zenflow_adam_register_group(handle, param, grad0, grad1, *moments, stale)
    ready.set()
    cpu_adam.zenflow_adam_run_worker(handle, control.data_ptr())
    cpu_adam.zenflow_adam_destroy(handle)


def submit(control: Tensor, step: int, state: int) -> None:
    numbers = ([number] * 2 for number in (LR, *BETAS, EPS))
    cpu_adam.zenflow_adam_submit(control.data_ptr(), state, step, *numbers, list(DECAYS), [1, 0])


def test_another_process_steps_as_this_one_would() -> None:
    torch.manual_seed(0)
    params, grads0, grads1, stale = (shared(*SIZES) for _ in range(4))
    expected = [param.clone() for param in params]
    moments = [[torch.zeros_like(param) for param in params] for _ in range(4)]
    control = torch.zeros(cpu_adam.zenflow_adam_ctrl_size(), dtype=torch.uint8).share_memory_()
    cpu_adam.zenflow_adam_ctrl_init(control.data_ptr(), len(params))
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    groups = list(zip(params, grads0, grads1, stale, strict=True))
    process = context.Process(target=optimizer_process, args=(groups, control, ready), daemon=True)
    process.start()
    try:
        assert ready.wait(timeout=240)
        begin = time.monotonic()
        assert cpu_adam.zenflow_adam_wait(control.data_ptr(), 0.05) is False
        assert 0.04 < time.monotonic() - begin < 5
        cpu_adam.create_adam(1, LR, *BETAS, EPS, 0.0, True, False)
        for step in range(1, 5):
            state = step % 2
            grads = (grads0, grads1)[state]
            for grad in grads:
                grad.copy_(torch.randn_like(grad))
            submit(control, step, state)
            os.kill(process.pid or 0, signal.SIGCONT)  # a signal ends no waiting
            assert cpu_adam.zenflow_adam_wait(control.data_ptr(), 60.0)
            for i, (param, grad) in enumerate(zip(expected, grads, strict=True)):
                m, v = moments[state][i], moments[2 + state][i]
                cpu_adam.adam_update(1, step, LR, *BETAS, EPS, DECAYS[i], i == 0, param, grad, m, v)
                assert torch.equal(params[i], param) and torch.equal(stale[i], param)
        cpu_adam.zenflow_adam_ctrl_exit(control.data_ptr())
        process.join(timeout=60)
        assert process.exitcode == 0
    finally:
        process.terminate()
        process.join()


def test_what_cannot_be_right_is_rejected() -> None:
    control = torch.zeros(cpu_adam.zenflow_adam_ctrl_size(), dtype=torch.uint8)
    with pytest.raises(SdkError, match="1025, and the memory that its processes share has room for 1024"):
        cpu_adam.zenflow_adam_ctrl_init(control.data_ptr(), 1025)
    with pytest.raises(SdkError, match=r"no create_adam\(78"):
        cpu_adam.zenflow_adam_create(78, [])
    with pytest.raises(SdkError, match=r"no zenflow_adam_create\(\) that gave 99"):
        cpu_adam.zenflow_adam_run_worker(99, control.data_ptr())
    cpu_adam.zenflow_adam_destroy(99)


def test_the_optimizer_process_is_told_which_accelerator_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is spawned and chooses by itself: with several plugins it would take DeepSpeed's own accelerator and op."""
    monkeypatch.setenv("DS_ACCELERATOR", "")
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setattr(zenflow, "current", CPU_Accelerator)
    control = torch.zeros(cpu_adam.zenflow_adam_ctrl_size(), dtype=torch.uint8)
    cpu_adam.zenflow_adam_ctrl_init(control.data_ptr(), 1)
    assert os.environ["DS_ACCELERATOR"] == "cpu"
