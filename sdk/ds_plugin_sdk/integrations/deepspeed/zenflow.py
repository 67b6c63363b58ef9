"""ZenFlow's overlapped optimizer: one process steps while another trains.

They share a block of memory, `Control`: a command, its numbers, two semaphores. The training process submits a step and
waits for it later. The optimizer's process runs a `Worker` until it is told to end; parameters and gradients are in
shared memory, moments in its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ds_plugin_sdk.errors import PluginError, SdkError
from ds_plugin_sdk.ops.adam import adam_
from ds_plugin_sdk.registry import current, scan
from ds_plugin_sdk.settings import export

MOST_GROUPS = 1024
_NUMBERS = 6  # of a group: lr, beta1, beta2, eps, weight_decay, bias_correction
_SEMAPHORE_BYTES = 64  # sem_t has 32 on 64-bit Linux

# Its functions let other threads of Python run while they wait.
_libc = ctypes.CDLL(None, use_errno=True)


def name_accelerator() -> None:
    """Say in this process's environment which plugin its accelerator is of: the optimizer's process is to have it, too.

    That process is spawned and chooses by itself. With another accelerator, such as DeepSpeed's own, it would have
    another op, to which `Control` means nothing.
    """
    kind = type(current())
    name = f"{kind.__module__}:{kind.__qualname__}"
    for candidate in (each for installed in scan().values() for each in installed):
        with contextlib.suppress(PluginError):  # another's, which is of no use here
            if candidate.manifest.accelerator == name:
                export({"DS_ACCELERATOR": candidate.name})


class _Time(ctypes.Structure):
    """``struct timespec``."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Step(NamedTuple):
    """A step that was submitted.

    Attributes:
        state: 0 or 1: which of the two gradients and moments of each group.
        number: the step number, counted from 1.
        groups: lr, beta1, beta2, eps, weight_decay and bias_correction (0 or 1) of each group.
    """

    state: int
    number: int
    groups: Sequence[Sequence[float]]


class Control(ctypes.Structure):
    """The memory that both processes share: ``Control.from_address(address)``, and `begin` before any other method."""

    _fields_ = (
        ("submitted", ctypes.c_char * _SEMAPHORE_BYTES),
        ("finished", ctypes.c_char * _SEMAPHORE_BYTES),
        ("ends", ctypes.c_bool),
        ("state", ctypes.c_int),
        ("number", ctypes.c_int64),
        ("groups", ctypes.c_int),
        ("numbers", ctypes.c_double * _NUMBERS * MOST_GROUPS),
    )

    def begin(self, groups: int) -> None:
        """Make the block ready, before the optimizer's process starts.

        Raises:
            SdkError: it has no room for so many groups.
        """
        if not 0 <= groups <= MOST_GROUPS:
            raise SdkError(
                "ZenFlow's overlapped optimizer cannot step so many groups of parameters",
                op="cpu_adam",
                why=f"there are {groups}, and the memory that its processes share has room for {MOST_GROUPS}",
                hint='merge groups, or set "overlap_step" of "zenflow" to false in the DeepSpeed config',
            )
        self.ends = False
        for name in ("submitted", "finished"):
            _libc.sem_init(self._at(name), 1, 0)

    def submit(self, step: Step) -> None:
        """Have a step done; does not wait."""
        self.state, self.number, self.groups = step.state, step.number, len(step.groups)
        for row, numbers in zip(self.numbers, step.groups, strict=False):
            row[:] = numbers
        _libc.sem_post(self._at("submitted"))

    def wait(self, seconds: float) -> bool:
        """Wait for a step to be done; False if none is in this time."""
        until = _Time(*divmod(time.time_ns() + int(seconds * 1e9), 10**9))
        return _repeat(lambda: _libc.sem_timedwait(self._at("finished"), ctypes.byref(until)))

    def end(self) -> None:
        """Have the worker end."""
        self.ends = True
        _libc.sem_post(self._at("submitted"))

    def next(self) -> Step | None:
        """The worker's side: wait for a step; None at the end."""
        _repeat(lambda: _libc.sem_wait(self._at("submitted")))
        if self.ends:
            return None
        return Step(self.state, self.number, [tuple(row) for row in self.numbers[: self.groups]])

    def done(self) -> None:
        """The worker's side: the step is done."""
        _libc.sem_post(self._at("finished"))

    def _at(self, name: str) -> ctypes.c_void_p:
        return ctypes.c_void_p(ctypes.addressof(self) + getattr(Control, name).offset)


def _repeat(wait: Callable[[], int]) -> bool:
    """Whether a semaphore was taken; a signal that interrupts the waiting does not end it."""
    while wait() != 0:
        if ctypes.get_errno() != errno.EINTR:
            return False
    return True


class _Group(NamedTuple):
    param: Tensor
    grads: tuple[Tensor, Tensor]
    exp_avgs: tuple[Tensor, Tensor]
    exp_avg_sqs: tuple[Tensor, Tensor]
    stale: Tensor | None


class Worker:
    """Steps groups of parameters on command.

    Args:
        adamw: decay the parameter itself, else add the decay to the gradient.
        affinity: numbers of the cores to step on; those that the process may not use, and none, change nothing.
    """

    def __init__(self, adamw: bool, affinity: Sequence[int]) -> None:
        self._adamw = adamw
        self._cores = os.sched_getaffinity(0).intersection(affinity)
        self._groups: list[_Group] = []

    def add(
        self,
        param: Tensor,
        grads: tuple[Tensor, Tensor],
        exp_avgs: tuple[Tensor, Tensor],
        exp_avg_sqs: tuple[Tensor, Tensor],
        stale: Tensor | None,
    ) -> None:
        """Add a group: `stale` gets what the parameter is after each step."""
        self._groups.append(_Group(param, grads, exp_avgs, exp_avg_sqs, stale))

    def run(self, control: Control) -> None:
        """Step on command until the end. It keeps the process to its cores, which is there for nothing else.

        Raises:
            InvalidTensorError: the tensors of a group do not fit.
        """
        if self._cores:
            os.sched_setaffinity(0, self._cores)
            torch.set_num_threads(len(self._cores))
        while (step := control.next()) is not None:
            self._step(step)
            control.done()

    def _step(self, step: Step) -> None:
        now = step.state
        for group, numbers in zip(self._groups, step.groups, strict=True):
            lr, beta1, beta2, eps, weight_decay, bias_correction = numbers
            adam_(
                [group.param],
                [group.grads[now]],
                [group.exp_avgs[now]],
                [group.exp_avg_sqs[now]],
                step.number,
                lr=lr,
                betas=(beta1, beta2),
                eps=eps,
                weight_decay=max(weight_decay, 0.0),
                adamw=self._adamw,
                bias_correction=bool(bias_correction),
            )
            if group.stale is not None:
                group.stale.copy_(group.param)


__all__ = ["MOST_GROUPS", "Control", "Step", "Worker"]
