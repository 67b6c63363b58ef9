"""Every op of the SDK on the target's device, its kernel or its reference implementation, against its formula.

`ds_plugin_sdk.conformance.op_info` describes what an op computes; nothing here depends on a particular op.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from ds_plugin_sdk import op_builder, provenance
from ds_plugin_sdk.conformance import op_info
from ds_plugin_sdk.conformance.check import Clause, NonconformanceError, Parameters, check, expect
from ds_plugin_sdk.conformance.op_info import Make, OpInfo, Sample
from ds_plugin_sdk.conformance.ops.support import (
    LAYOUTS,
    call_op,
    compare,
    compare_gradients,
    dispatch_key,
    dtype_of,
    each_op,
    each_op_and_dtype,
    empty_samples,
    exact_copies,
    expanded,
    expect_kernel,
    expect_same,
    fullest,
    higher,
    longer,
    map_last,
    map_tensors,
    name_of,
    on_device,
    only,
    other_dtype,
    ready,
    run_and_compare,
    run_placed,
    samples_of,
    small_samples,
    smallest,
    tensor_names,
    tensors_of,
    widths,
    with_value,
)
from ds_plugin_sdk.conformance.placed import same_bits
from ds_plugin_sdk.conformance.runtime.support import has_two_devices, place
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.errors import DOCUMENTATION, InvalidTensorError
from ds_plugin_sdk.op_builder import op_table


# ---- numbers ---------------------------------------------------------------------------------------------------------
@check(
    "ops.accuracy",
    Clause(
        "O1.1",
        "An op gives what its formula gives in float64, within the tolerance of its dtype, on ordinary values, at the "
        "ends of vectors and blocks, and on the shapes of real models.",
        reason="A model must train on this device as well as on any other.",
    ),
    cases=each_op_and_dtype,
    timeout=120,
)
def accuracy(target: Target, op: str, dtype: str) -> None:
    info = ready(target, op)
    for sample in samples_of(info, dtype):
        run_and_compare(target, info, sample)


@check(
    "ops.strided",
    Clause(
        "O1.2",
        "An op gives the same on tensors with gaps between their elements or rows, with their dimensions in another "
        "order, and on expanded ones that it only reads, as on contiguous ones, and writes into the former; where it "
        "asks for contiguous tensors, its description says so.",
        reason="DeepSpeed hands over slices of flat buffers, and views that autograd made.",
    ),
    cases=each_op_and_dtype,
)
def strided(target: Target, op: str, dtype: str) -> None:
    info = ready(target, op)
    for sample in (smallest(info, dtype), fullest(info, dtype)):
        first, *others = tensor_names(sample)
        for label, layout in LAYOUTS.items():
            run_placed(target, info, sample, label, layout)
            if others:
                run_placed(target, info, sample, f"{first} {label}", layout, [first])
                run_placed(target, info, sample, f"{', '.join(others)} {label}", layout, others)


@check(
    "ops.empty",
    Clause(
        "O1.3",
        "An op on tensors without elements returns, and gives tensors of the shapes that follow.",
        reason="A rank can own an empty partition under ZeRO, and an expert can get no token.",
    ),
    cases=each_op_and_dtype,
)
def empty(target: Target, op: str, dtype: str) -> None:
    info = ready(target, op)
    for sample in empty_samples(info, dtype):
        run_and_compare(target, info, sample)


@check(
    "ops.not_finite",
    Clause(
        "O1.4",
        "A NaN or an infinity in an argument reaches exactly the results that the formula lets it reach.",
        reason="Loss scaling finds overflows in gradients by it; a NaN that a kernel drops hides a broken model.",
    ),
    cases=only(lambda op: op.nan, each_op_and_dtype),
)
def not_finite(target: Target, op: str, dtype: str) -> None:
    info = ready(target, op)
    for name, at, value, sample in _spoilable(info, dtype):
        spoilt = _spoilt(sample.arguments[name], value, at)
        label = f"{sample.label}, {value} at {at} of {name}"
        run_and_compare(target, info, Sample(label, {**sample.arguments, name: spoilt}, sample.kind))


def _spoilable(info: OpInfo, dtype: str) -> Iterator[tuple[str, int, float, Sample]]:
    """Arguments, positions and values: in the smallest sample all positions of a vector, and the last.

    In each other sample NaN, somewhere.
    """
    least = smallest(info, dtype)
    for name in tensor_names(least, floating=True):
        tensors = tensors_of(least.arguments[name])
        size, step = tensors[-1].numel(), len(tensors)
        # Where what becomes of it depends on the position, there is one that the description stands for.
        positions = (size // 2,) if name in info.finite else (-1, *range(0, min(size, 16), step))
        yield from ((name, at, value, least) for at in positions for value in (math.nan, math.inf, -math.inf))
    for number, sample in enumerate(small_samples(info, dtype)[1:]):
        names = [name for name in tensor_names(sample, floating=True) if name not in info.finite]
        yield from ((name, 7 * number, math.nan, sample) for name in names)


def _spoilt(argument: Any, value: float, at: int) -> Any:
    """With a value at a position, in a list at the next one of each next tensor; -1 is the last."""
    shifts = itertools.count()
    return map_tensors(lambda tensor: with_value(value, at if at < 0 else at + next(shifts), tensor), argument)


@check(
    "ops.deterministic",
    Clause(
        "O1.5",
        "The same call of a kernel gives the same bits each time.",
        reason="Activation checkpointing computes twice; ranks that hold the same replica must stay equal.",
    ),
    cases=each_op,
    timeout=180,
)
def deterministic(target: Target, op: str) -> None:
    info = ready(target, op)
    expect_kernel(target, info)  # of torch's ops a device need not add up in one order
    made = Make.seeded(dtype_of(target, info))
    for sample in (*samples_of(info, name_of(made.dtype)), *info.large(made)):
        first, second = (call_op(info, on_device(target, sample.arguments)) for _ in range(2))
        for (where, a), (_, b) in zip(first, second, strict=True):
            expect_same(a, b, f"{op} on '{sample.label}': {where} differs between two calls")


@check(
    "ops.inference_mode",
    Clause(
        "O1.8",
        "An op gives the same in `torch.inference_mode`, of tensors that were made in it.",
        reason="Servers run whole models in it; its tensors have no version counters, and no graph.",
    ),
    cases=each_op,
)
def inference_mode(target: Target, op: str) -> None:
    info = ready(target, op)
    for dtype in widths(target, info):
        for sample in (smallest(info, dtype), fullest(info, dtype)):
            with torch.inference_mode():
                results = call_op(info, on_device(target, sample.arguments))
            compare(info, Sample(f"{sample.label}, in inference mode", sample.arguments, sample.kind), results)


# ---- what an op touches ----------------------------------------------------------------------------------------------
@check(
    "ops.in_place",
    Clause(
        "O2.1",
        "What an op writes is written into the tensors it was given, and autograd's version counters say so.",
        reason="DeepSpeed's front ends ignore what a step returns and continue with the tensors they hold.",
    ),
    cases=only(lambda op: bool(op.written)),
)
def in_place(target: Target, op: str) -> None:
    info = ready(target, op)
    sample = smallest(info, name_of(dtype_of(target, info)))
    arguments = on_device(target, sample.arguments)
    tensors = [(f"{name}[{i}]", t) for name in info.written for i, t in enumerate(tensors_of(arguments[name]))]
    before = [(t.data_ptr(), t._version, t.clone()) for _, t in tensors]
    call_op(info, arguments)
    for (where, tensor), (address, version, _) in zip(tensors, before, strict=True):
        expect(tensor.data_ptr() == address, f"{op} moved {where} to other memory")
        if tensor.numel():
            expect(tensor._version > version, f"{op} wrote {where}, and its version counter still says {version}")
    changed = any(not same_bits(t, old) for (_, t), (_, _, old) in zip(tensors, before, strict=True))
    expect(changed, f"{op} on '{sample.label}' changed nothing in {', '.join(info.written)}")


@check(
    "ops.read_only",
    Clause(
        "O2.2",
        "An op modifies no argument that its schema does not mark as written.",
        reason="Gradients are used again after a step: for norms, logs and accumulation.",
    ),
    cases=each_op,
)
def readonly(target: Target, op: str) -> None:
    info = ready(target, op)
    for sample in small_samples(info, name_of(dtype_of(target, info))):
        arguments = on_device(target, sample.arguments)
        kept = {name: map_tensors(Tensor.clone, value) for name, value in arguments.items() if name not in info.written}
        call_op(info, arguments)
        for name, old in kept.items():
            for i, (now, then) in enumerate(zip(tensors_of(arguments[name]), tensors_of(old), strict=True)):
                expect_same(now, then, f"{op} on '{sample.label}' modified {name}[{i}], which it may only read")


# ---- what an op rejects ----------------------------------------------------------------------------------------------
def _expect_rejected(target: Target, info: OpInfo, label: str, arguments: Mapping[str, Any]) -> None:
    """Expect `InvalidTensorError`, and nothing written; arguments are moved to the device."""
    moved = {name: map_tensors(lambda t: t.to(target.device), value) for name, value in arguments.items()}
    _expect_rejected_there(info, label, moved)


def _expect_rejected_there(info: OpInfo, label: str, arguments: Mapping[str, Any]) -> None:
    """The same of arguments that are where they are to be."""
    written = [t for name in info.written for t in tensors_of(arguments[name]) if not t.is_meta]
    before = [t.clone() for t in written]
    try:
        info.function(**arguments)
    except InvalidTensorError:
        pass
    except Exception as error:
        raise NonconformanceError(
            f"{info.name} with {label} raised {type(error).__name__}", why=str(error), hint="raise InvalidTensorError"
        ) from error
    else:
        raise NonconformanceError(f"{info.name} took {label}", why="it must raise InvalidTensorError")
    for now, then in zip(written, before, strict=True):
        expect(same_bits(now, then), f"{info.name} rejected {label}, but had already written")


@check(
    "ops.rejects.dtype",
    Clause(
        "O3.1",
        "An op given a tensor of a dtype that it does not support raises `InvalidTensorError` before it writes; given "
        "one of another floating-point dtype than the others it raises that, or computes with its values.",
        reason="Bits read as another type give numbers that can look right.",
    ),
    cases=each_op,
)
def rejects_dtype(target: Target, op: str) -> None:
    info = ready(target, op)
    sample = fullest(info, name_of(dtype_of(target, info)))
    for name in tensor_names(sample):
        if name not in info.any_dtype:
            wrong = map_last(other_dtype, sample.arguments[name])
            _expect_rejected(
                target, info, f"{name} as {name_of(tensors_of(wrong)[-1].dtype)}", {**sample.arguments, name: wrong}
            )
    for name in tensor_names(sample, floating=True):
        for dtype in (getattr(torch, width) for width in widths(target, info)):
            mixed = map_tensors(_to(dtype), sample.arguments[name])
            if tensors_of(mixed)[0].dtype != tensors_of(sample.arguments[name])[0].dtype:
                label = f"{sample.label}, {name} as {name_of(dtype)}"
                changed = Sample(label, {**sample.arguments, name: mixed}, sample.kind)
                _expect_rejected_or_right(info, changed, on_device(target, changed.arguments))


def _expect_rejected_or_right(info: OpInfo, sample: Sample, arguments: dict[str, Any]) -> None:
    """Expect `InvalidTensorError` and nothing written, or what the formula gives; `arguments` are the sample's."""
    try:
        results = call_op(info, arguments)
    except InvalidTensorError:
        for name in info.written:
            for now, then in zip(tensors_of(arguments[name]), tensors_of(sample.arguments[name]), strict=True):
                expect(same_bits(now, then), f"{info.name} rejected {sample.label}, but had already written")
    else:
        compare(info, sample, results)


@check(
    "ops.rejects.shape",
    Clause(
        "O3.2",
        "An op given tensors whose shapes do not fit together raises `InvalidTensorError` before it writes.",
        reason="A kernel that trusts shapes reads and writes beyond its tensors.",
    ),
    cases=each_op,
)
def rejects_shape(target: Target, op: str) -> None:
    info = ready(target, op)
    sample = fullest(info, name_of(dtype_of(target, info)))
    names = tensor_names(sample)
    for name in names if len(names) > 1 else ():
        if name not in info.broadcasts:
            # The first argument says how many rows there are.
            for change in (longer, higher) if name != names[0] else (longer,):
                wrong = map_last(change, sample.arguments[name])
                label = f"a {name} of shape {list(tensors_of(wrong)[-1].shape)}"
                _expect_rejected(target, info, label, {**sample.arguments, name: wrong})


@check(
    "ops.rejects.device",
    Clause(
        "O3.3",
        "An op given tensors on different devices raises `InvalidTensorError` before it writes, also if one is on the "
        "host, or on another device of the same type.",
        reason="With optimizer offload, a host tensor is easily passed where a device tensor is meant.",
    ),
    cases=each_op,
)
def rejects_device(target: Target, op: str) -> None:
    info = ready(target, op)
    sample = fullest(info, name_of(dtype_of(target, info)))
    names = tensor_names(sample)
    for name in names if len(names) > 1 else ():
        for device in _elsewhere(target):
            arguments = on_device(target, sample.arguments)
            arguments[name] = map_last(_to(device), arguments[name])
            _expect_rejected_there(info, f"{name} on {device}, beside others on {target.device}", arguments)


def _to(other: torch.device | torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(other)


def _elsewhere(target: Target) -> list[torch.device]:
    """Where a tensor may be in place of the current device: nowhere, on the host, on a second device."""
    others = [torch.device("meta"), torch.device("cpu")]
    if has_two_devices(target):
        others.append(place(target, 0 if target.device.index == 1 else 1))
    return [device for device in others if device.type != target.device.type or device.index is not None]


@check(
    "ops.rejects.overlap",
    Clause(
        "O3.4",
        "An op that writes into a tensor whose elements share memory raises `InvalidTensorError`.",
        reason="The result would depend on the order of threads.",
    ),
    cases=only(lambda op: bool(op.written)),
)
def rejects_overlap(target: Target, op: str) -> None:
    info = ready(target, op)
    sample = smallest(info, name_of(dtype_of(target, info)))
    for name in info.written:
        arguments = on_device(target, sample.arguments)
        arguments[name] = map_last(expanded, arguments[name])
        _expect_rejected(target, info, f"an expanded {name}", arguments)


@check(
    "ops.rejects.shared_memory",
    Clause(
        "O3.6",
        "An op given an argument that shares memory with one that it writes computes as with a copy of that argument, "
        "or raises `InvalidTensorError` before it writes.",
        reason="Tensors are slices of flat buffers. A kernel that reads what it has just written gives other numbers.",
    ),
    cases=only(lambda op: bool(op.written)),
)
def rejects_shared_memory(target: Target, op: str) -> None:
    info = ready(target, op)
    sample = fullest(info, name_of(dtype_of(target, info)))
    read = [name for name in tensor_names(sample, floating=True) if name not in info.written]
    for name, other in itertools.product(info.written, read):
        arguments = on_device(target, sample.arguments)
        pairs = zip(tensors_of(arguments[name]), tensors_of(arguments[other]), strict=False)
        shared = [_in_one_buffer(*pair) for pair in pairs]
        for which, views in zip((name, other), zip(*shared, strict=True), strict=True):
            arguments[which] = _replaced(arguments[which], views)
        host = {key: map_tensors(lambda tensor: tensor.cpu().clone(), value) for key, value in arguments.items()}
        label = f"{sample.label}, {other} in the memory of {name}"
        _expect_rejected_or_right(info, Sample(label, host, sample.kind), arguments)


def _replaced(argument: Any, tensors: Iterable[Tensor]) -> Any:
    """These in the place of an argument's first tensors."""
    given = iter(tensors)
    return map_tensors(lambda tensor: next(given, tensor), argument)


def _in_one_buffer(written: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one buffer, `written` as it was and 16 elements after `read`: what a kernel writes, it reads later."""
    if written.dtype != read.dtype or written.numel() < 2:
        return written, read
    shift = min(16, written.numel() - 1)
    buffer = written.new_zeros(shift + max(written.numel(), read.numel()))
    views = buffer[shift : shift + written.numel()].view(written.shape), buffer[: read.numel()].view(read.shape)
    views[1].copy_(read)
    views[0].copy_(written)
    return views


# ---- derivatives and tracing -----------------------------------------------------------------------------------------
@check(
    "ops.gradients",
    Clause(
        "O4.1",
        "The gradients of a differentiable op are those of its formula, within the tolerance of its dtype.",
        reason="Training depends on them.",
    ),
    cases=only(lambda op: bool(op.differentiable), each_op_and_dtype),
    timeout=120,
)
def gradients(target: Target, op: str, dtype: str) -> None:
    info = ready(target, op)
    for sample in samples_of(info, dtype):
        compare_gradients(target, info, sample)
    for name in info.differentiable:
        compare_gradients(target, info, fullest(info, dtype), name)


@check(
    "ops.gradcheck",
    Clause(
        "O4.2",
        "In float64 the derivative of an op agrees with finite differences.",
        reason="It is the one test of a derivative that does not trust another derivative.",
    ),
    cases=only(lambda op: bool(op.differentiable) and op.float64),
    needs=lambda target: (
        None if target.accelerator.is_fp64_supported() else "declares that it has no float64 (is_fp64_supported)"
    ),
)
def gradcheck(target: Target, op: str) -> None:
    info = ready(target, op)
    sample = smallest(info, name_of(info.dtypes[0]))
    arguments = on_device(target, sample.arguments)
    names = [name for name in info.differentiable if isinstance(arguments.get(name), Tensor)]
    leaves = [arguments[name].double().requires_grad_() for name in names]

    def function(*values: Tensor) -> Any:
        outputs = tensors_of(info.function(**{**arguments, **dict(zip(names, values, strict=True))}))
        return tuple(output for output in outputs if output.is_floating_point())

    try:
        torch.autograd.gradcheck(function, leaves, fast_mode=True)
    except GradcheckError as error:
        raise NonconformanceError(f"{op} on '{sample.label}': gradcheck disagrees", why=str(error)) from error


@check(
    "ops.second_derivative",
    Clause(
        "O4.3",
        "The derivative of an op's gradient is that of its formula's, or an error.",
        reason="Penalties of gradients and Hessians ask for it; one that is left out is zero, and says nothing.",
    ),
    cases=only(lambda op: bool(op.differentiable)),
)
def second_derivative(target: Target, op: str) -> None:
    info = ready(target, op)
    sample = smallest(info, name_of(dtype_of(target, info)))
    arguments, exact = on_device(target, sample.arguments), exact_copies(sample.arguments)
    names = [name for name in info.differentiable if isinstance(arguments.get(name), Tensor)]
    try:
        found = _twice_derived(info.function, arguments, names)
    except Exception:  # of whatever kind: it says that there is none
        return
    for name, actual, expected in zip(names, found, _twice_derived(info.formula, exact, names), strict=True):
        worst = float((actual.cpu().double() - expected).abs().max())
        expect(
            worst <= 1e-2 * float(expected.abs().max()) + 1e-4,
            f"{op} on '{sample.label}': the second derivative by {name} is off by {worst:.3g}",
            why=f"that of its formula is up to {float(expected.abs().max()):.3g}; what has none raises",
        )


def _twice_derived(function: Callable[..., Any], arguments: Mapping[str, Any], names: list[str]) -> list[Tensor]:
    """The derivatives of the squares of the derivatives of the squares; zeros where nothing depends."""
    leaves = [arguments[name].requires_grad_() for name in names]
    values: Any = function(**arguments)
    for _ in range(2):
        squares = [value.square().sum() for value in tensors_of(values) if value.requires_grad]
        total = torch.stack(squares).sum() if squares else leaves[0].sum() * 0
        values = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True, materialize_grads=True)
    return [value.detach() for value in values]


@check(
    "ops.opcheck",
    Clause(
        "O5.1",
        "An op does what its schema says, and its fake kernel gives the shapes and dtypes that the op gives.",
        reason="torch.compile, export and autograd trust schema and fake kernel, not the op.",
    ),
    cases=each_op,
    timeout=120,
)
def opcheck(target: Target, op: str) -> None:
    info = ready(target, op)
    for dtype in widths(target, info):
        _opcheck(target, info, smallest(info, dtype))
        if fullest(info, dtype) is not smallest(info, dtype):
            _opcheck(target, info, fullest(info, dtype))


def _opcheck(target: Target, info: OpInfo, sample: Sample) -> None:
    arguments = on_device(target, sample.arguments)
    positional = info.schema_arguments(arguments) if info.schema_arguments else list(arguments.values())
    try:
        torch.library.opcheck(info.overload, tuple(positional))
    except Exception as error:
        raise NonconformanceError(
            f"{info.name} on '{sample.label}': torch.library.opcheck fails", why=str(error)
        ) from error


def _native_ops(target: Target) -> Iterator[Parameters]:
    for cls in target.builders().values():
        without_code = op_builder.ReferenceOpBuilder | op_builder.LentOpBuilder
        if issubclass(cls, op_builder.OpBuilder) and not issubclass(cls, without_code):
            family = op_table.family_of(cls.NAME)
            wanted = [op.name for op in op_info.infos() if op.family == family and not op.plain]
            yield from ({"builder": cls.__name__, "op": name} for name in wanted)


@check(
    "ops.native",
    Clause(
        "O6.1",
        "Where there is a builder of native code, the code can be had and loaded, and registers a kernel for the "
        "device for each op of the builder's family, but for three that are a call or two of torch's own kernels.",
        reason="Otherwise the slow reference implementation runs, without an error.",
    ),
    cases=_native_ops,
    timeout=600,
)
def native(target: Target, builder: str, op: str) -> None:
    cls = target.builders()[builder]
    cls().load(verbose=False)
    fell_back = [each.detail for each in provenance.records() if each.name == cls.NAME and each.origin == "reference"]
    expect(
        not fell_back, f"{builder} has native code, and the reference implementation is used", why="".join(fell_back)
    )
    # DeepSpeed's names for ops on host tensors begin with CPU, whatever the accelerator is.
    key = "CPU" if builder.startswith("CPU") else dispatch_key(target.device_type)
    expect(
        torch._C._dispatch_has_kernel_for_dispatch_key(f"ds_plugin::{op}", key),
        f"{builder} has loaded native code, and {op} has no kernel for {key}",
        hint=f'register it: DS_KERNELS_IMPL({key}, m) {{ m.impl("{op}", ...); }}, or say in conformance.toml why',
    )


def _own_builders(target: Target) -> Iterator[Parameters]:
    package = getattr(target.accelerator, "op_builders", None)
    return ({"builder": name} for name in sorted(op_builder.problems_in(package) if package else ()))


@check(
    "ops.builder_name",
    Clause(
        "O6.2",
        "The modules of the package that `op_builders` names can be imported, and a builder of kernels in it has the "
        "class name and the `NAME` of an op; those of a pybind11 module are free.",
        reason="Kernels are found by the op's name; under another one they are never loaded.",
    ),
    cases=_own_builders,
)
def builder_name(target: Target, builder: str) -> None:
    problem = op_builder.problems_in(target.accelerator.op_builders)[builder]
    expect(problem is None, f"{builder}: {problem}", hint=f"{DOCUMENTATION}/writing-a-plugin.md has the table of names")
