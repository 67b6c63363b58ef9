"""Where and when an op runs: streams, devices, earlier calls, the memory beside its tensors, sizes beyond a launch."""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch

from ds_plugin_sdk.conformance.check import Clause, NonconformanceError, check, expect, expect_equal
from ds_plugin_sdk.conformance.op_info import Make, OpInfo, Sample
from ds_plugin_sdk.conformance.ops.support import (
    LAYOUTS,
    Arguments,
    call_op,
    cheap_samples,
    compare,
    dtype_of,
    each_op,
    expect_kernel,
    expect_same,
    has_kernel,
    made_again,
    map_last,
    map_tensors,
    name_of,
    on_device,
    only,
    ready,
    run_and_compare,
    run_placed,
    samples_of,
    small_and_large,
    small_samples,
    smallest,
    tensors_of,
    widths,
    with_value,
)
from ds_plugin_sdk.conformance.runtime.support import (
    current_device_kept,
    host_waits,
    in_threads,
    needs_streams,
    needs_two_devices,
    random_state_kept,
    slow_work,
)
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.errors import SdkError


def _first(target: Target, op: str) -> tuple[OpInfo, Sample]:
    """An op, ready, and its cheapest call in its first dtype."""
    info = ready(target, op)
    return info, smallest(info, name_of(dtype_of(target, info)))


# ---- earlier calls ---------------------------------------------------------------------------------------------------
@check(
    "ops.successive",
    Clause(
        "O1.6",
        "What an op gives depends on the values that its tensors have and on the numbers it is given at this call, and "
        "what an earlier call gave stays as it was.",
        reason="Weights are updated in place, schedules change the learning rate, and results outlive the next call.",
    ),
    cases=each_op,
)
def successive(target: Target, op: str) -> None:
    info = ready(target, op)
    for sample in cheap_samples(info, name_of(dtype_of(target, info))):
        _expect_own_memory(info, sample, on_device(target, sample.arguments))
    for dtype in widths(target, info):
        again = made_again(info, dtype)
        for first in small_samples(info, dtype):
            _succeed(target, info, first, again[first.label])


def _expect_own_memory(info: OpInfo, sample: Sample, arguments: Arguments) -> None:
    """Expect that nothing of what is returned is in the memory of an argument, which the next step writes."""
    results = call_op(info, arguments)
    theirs = {t.untyped_storage().data_ptr() for value in arguments.values() for t in tensors_of(value) if t.numel()}
    written = sum(len(tensors_of(arguments[name])) for name in info.written)
    for where, result in results[written:]:
        shared = result.numel() and result.untyped_storage().data_ptr() in theirs
        expect(not shared, f"{where} of {info.name} on '{sample.label}' is an argument's memory")


def _succeed(target: Target, info: OpInfo, first: Sample, changed: Sample) -> None:
    op = info.name
    arguments = on_device(target, first.arguments)
    written = sum(len(tensors_of(arguments[name])) for name in info.written)
    outputs = [(where, tensor, tensor.clone()) for where, tensor in call_op(info, arguments)[written:]]
    second = Sample(
        f"{first.label}, after another call in the same memory",
        {name: _other_numbers(value) for name, value in changed.arguments.items()},
        first.kind,
    )
    for name, value in second.arguments.items():
        tensors = tensors_of(arguments[name])
        for tensor, new in zip(tensors, tensors_of(value), strict=True):
            tensor.copy_(new)
        if not tensors:
            arguments[name] = value
    compare(info, second, call_op(info, arguments))
    for where, tensor, before in outputs:
        expect_same(tensor, before, f"{where} of a call of {op} was changed by the next call")


def _other_numbers(value: Any) -> Any:
    """An argument, its floating-point numbers others.

    A dropout of 3/4 leaves exact what one of a half did; with betas nearer to 1 a moment still outweighs a gradient.
    """
    if isinstance(value, float):
        return 0.75 * value if value != 0.5 else 0.75
    return tuple((1 + each) / 2 for each in value) if isinstance(value, tuple) else value


# ---- sizes -----------------------------------------------------------------------------------------------------------
@check(
    "ops.large",
    Clause(
        "O1.7",
        "An op gives what its formula gives beyond the limits of a launch: with more than 65,535 rows, with more than "
        "1,024 columns or past positions, with hundreds of tensors, and in its 100,000th step.",
        reason="Grids, blocks and the arguments of a launch have such limits, and batches and models do not.",
    ),
    cases=only(lambda info: info.large is not OpInfo.large),
    timeout=180,
)
def large(target: Target, op: str) -> None:
    info = ready(target, op)
    for dtype in widths(target, info):
        for sample in info.large(Make.seeded(getattr(torch, dtype))):
            run_and_compare(target, info, sample)


# ---- what an op touches ----------------------------------------------------------------------------------------------
@check(
    "ops.guards",
    Clause(
        "O2.3",
        "An op neither writes memory before, between or after the elements of its tensors, nor lets it reach results.",
        reason="Parameters, gradients and states are slices of flat buffers: beside them lie those of others.",
    ),
    cases=each_op,
    timeout=120,
)
def guards(target: Target, op: str) -> None:
    info = ready(target, op)
    for sample in (each for dtype in widths(target, info) for each in small_samples(info, dtype)):
        for label in ("in a flat buffer", "with gaps", "rows apart"):
            run_placed(target, info, sample, label, LAYOUTS[label])


@check(
    "ops.generators",
    Clause(
        "O2.4",
        "An op leaves torch's generators, the host's and the device's, as they are: it draws by the seed it is given.",
        reason="The order of the data is drawn on the host, and activation checkpointing restores the device's state.",
    ),
    cases=each_op,
)
def generators(target: Target, op: str) -> None:
    info = ready(target, op)
    states = {"host": torch.get_rng_state, "device": target.accelerator.get_rng_state}
    with random_state_kept(target):
        before = {whose: read() for whose, read in states.items()}
        for sample in small_samples(info, name_of(dtype_of(target, info))):
            call_op(info, on_device(target, sample.arguments))
        for whose, read in states.items():
            expect(torch.equal(read(), before[whose]), f"calls of {op} changed the generator of the {whose}")


@check(
    "ops.leaks",
    Clause(
        "O2.5",
        "Calls of an op leave no memory of the device behind, but for what the first of them has made for all.",
        reason="A training has millions of calls; of a handle that is not given back memory runs out after hours.",
    ),
    cases=each_op,
    needs=lambda target: "the host's memory is others' too" if target.device_type == "cpu" else None,
)
def leaks(target: Target, op: str) -> None:
    info, sample = _first(target, op)
    arguments = on_device(target, sample.arguments)

    def held_after(calls: int) -> int:
        for _ in range(calls):
            call_op(info, arguments)
        gc.collect()
        target.accelerator.synchronize()
        return int(target.accelerator.memory_allocated())

    before, calls = held_after(3), 20
    after = held_after(calls)
    expect(after <= before, f"after {calls} calls of {op} the device holds {after - before} bytes more than before")


# ---- what an op rejects ----------------------------------------------------------------------------------------------
@check(
    "ops.rejects.index",
    Clause(
        "O3.5",
        "An op given an index that is out of range raises, at the latest when the device is synchronized.",
        reason="What lies there is another tensor's; a kernel that reads or writes it says nothing.",
    ),
    cases=only(lambda info: bool(info.indices)),
    isolated=True,  # what a device asserts may leave the process without it
)
def rejects_index(target: Target, op: str) -> None:
    info, sample = _first(target, op)
    for name, end in info.indices.items():
        for entry in (end(sample.arguments), -1, 1_000_000):
            _expect_index_rejected(target, info, sample, name, entry)


def _expect_index_rejected(target: Target, info: OpInfo, sample: Sample, name: str, entry: int) -> None:
    wrong = map_last(lambda tensor: with_value(entry, -1, tensor), sample.arguments[name])
    arguments = on_device(target, {**sample.arguments, name: wrong})
    try:
        call_op(info, arguments)
        target.accelerator.synchronize()
    except (SdkError, RuntimeError, IndexError, ValueError):
        return
    raise NonconformanceError(f"{info.name} took {name} with an entry of {entry}", why="it is out of range")


# ---- streams and devices ---------------------------------------------------------------------------------------------
@check(
    "ops.stream",
    Clause(
        "O8.1",
        "A kernel runs on the current stream: behind slow work on a side stream it reads what was written there before "
        "it, and what comes after it there sees its results.",
        reason="ZeRO and offload step and quantize on side streams, without a wait around each op.",
    ),
    needs=needs_streams,
    cases=each_op,
)
def stream(target: Target, op: str) -> None:
    info = ready(target, op)
    expect_kernel(target, info)
    chosen = [*small_and_large(target, info), *small_samples(info, name_of(dtype_of(target, info)))[1:]]
    for sample in chosen:
        _on_a_side_stream(target, info, sample)


def _zeroed(target: Target, sample: Sample) -> tuple[Arguments, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Arguments on the device that hold zeros, and each of their tensors with what it is to hold."""
    given = on_device(target, sample.arguments)
    arguments: Arguments = {name: map_tensors(torch.zeros_like, value) for name, value in given.items()}
    pairs = [pair for name in given for pair in zip(*map(tensors_of, (arguments[name], given[name])), strict=True)]
    return arguments, pairs


def _on_a_side_stream(target: Target, info: OpInfo, sample: Sample) -> None:
    arguments, pairs = _zeroed(target, sample)
    call_op(info, on_device(target, sample.arguments))  # what a first call does once is no part of this
    side = target.accelerator.Stream()
    target.accelerator.synchronize()
    with slow_work(target) as keep_busy:
        with target.accelerator.stream(side):
            keep_busy()
            for tensor, value in pairs:
                tensor.copy_(value)
            results = [(where, tensor.clone()) for where, tensor in call_op(info, arguments)]
            for tensor, _ in pairs:
                tensor.zero_()
        side.synchronize()
    compare(info, Sample(f"{sample.label}, on a side stream", sample.arguments, sample.kind), results)


@check(
    "ops.asynchronous",
    Clause(
        "O8.2",
        "A call of a kernel returns before the work before it is done.",
        reason="The host prepares the next ops meanwhile; one that waits in each step idles the device.",
    ),
    needs=needs_streams,
    cases=each_op,
)
def asynchronous(target: Target, op: str) -> None:
    info = ready(target, op)
    expect_kernel(target, info)
    for sample in small_and_large(target, info):
        arguments = on_device(target, sample.arguments)
        waits = host_waits(target, functools.partial(call_op, info, arguments))
        expect(
            not waits,
            f"when a call of {op} on '{sample.label}' returned, all work before it was done",
            why="the host waited",
        )


@check(
    "ops.device",
    Clause(
        "O8.3",
        "On tensors of a device that is not current an op computes on theirs, a kernel on its current stream: its "
        "results lie there, and the current device stays.",
        reason="Pipeline stages, offloaded states and autograd's threads call ops while another device is current.",
    ),
    needs=needs_two_devices,
    cases=each_op,
)
def device(target: Target, op: str) -> None:
    info = ready(target, op)
    for sample in small_and_large(target, info):
        _on_the_second(target, info, sample)
        if has_kernel(target, info):
            _behind_work_of_the_second(target, info, sample)


def _on_the_second(target: Target, info: OpInfo, sample: Sample) -> None:
    op, accelerator = info.name, target.accelerator
    with current_device_kept(target):
        accelerator.set_device(1)
        arguments = on_device(target, sample.arguments)
        accelerator.set_device(0)
        results = call_op(info, arguments)
        expect_equal(accelerator.current_device(), 0, f"current_device() after {op} on tensors of device 1")
        for where, tensor in results:
            expect_equal(tensor.device.index, 1, f"index of the device of {where} of {op} on tensors of device 1")
        compare(info, Sample(f"{sample.label}, on device 1", sample.arguments, sample.kind), results)


def _behind_work_of_the_second(target: Target, info: OpInfo, sample: Sample) -> None:
    """Device 1 is busy when its tensors are written, and they are written again after the call."""
    accelerator = target.accelerator
    with current_device_kept(target):
        accelerator.set_device(1)
        arguments, pairs = _zeroed(target, sample)
        call_op(info, on_device(target, sample.arguments))  # what a first call does once is no part of this
        accelerator.synchronize()
        with slow_work(target) as keep_busy:
            keep_busy()
            for tensor, value in pairs:
                tensor.copy_(value)
            accelerator.set_device(0)
            results = [(where, tensor.clone()) for where, tensor in call_op(info, arguments)]
            accelerator.set_device(1)
            for tensor, _ in pairs:
                tensor.zero_()
        label = f"{sample.label}, on device 1, which was busy"
        compare(info, Sample(label, sample.arguments, sample.kind), results)


# ---- threads ---------------------------------------------------------------------------------------------------------
_THREADS, _CALLS = 4, 8


@check(
    "ops.threads",
    Clause(
        "O8.4",
        "Called from several threads at the same time, each on a stream of its own where there are streams, an op "
        "gives each what its own arguments give.",
        reason="torch runs the backward pass in threads of its own, servers run a model in several, and ZeRO runs ops "
        "on side streams beside the main one.",
    ),
    cases=each_op,
)
def threads(target: Target, op: str) -> None:
    info = ready(target, op)
    for dtype in widths(target, info):
        _at_once(target, info, dtype, smallest(info, dtype))


def _at_once(target: Target, info: OpInfo, dtype: str, first: Sample) -> None:
    seeded = [samples_of(info, dtype, seed) for seed in range(_THREADS)]
    made = [next(each for each in samples if each.label == first.label) for samples in seeded]

    accelerator = target.accelerator

    def calls(sample: Sample) -> list[list[tuple[str, torch.Tensor]]]:
        with accelerator.stream(accelerator.Stream() if accelerator.Stream is not None else None):
            results = [call_op(info, on_device(target, sample.arguments)) for _ in range(_CALLS)]
        accelerator.synchronize()
        return results

    found = in_threads(*(lambda sample=sample: calls(sample) for sample in made))
    for number, (sample, results) in enumerate(zip(made, found, strict=True)):
        label = f"{sample.label}, in thread {number} of {_THREADS}"
        for result in results:
            compare(info, Sample(label, sample.arguments, sample.kind), result)
