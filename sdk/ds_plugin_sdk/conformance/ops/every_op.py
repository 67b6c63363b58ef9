"""Every op of the SDK on the target's device, its kernel or its reference implementation, against its formula.

`ds_plugin_sdk.conformance.op_info` describes what an op computes; nothing here depends on a particular op.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from ds_plugin_sdk import op_builder, provenance
from ds_plugin_sdk.conformance import op_info
from ds_plugin_sdk.conformance.check import Clause, NonconformanceError, Parameters, check, expect
from ds_plugin_sdk.conformance.op_info import Make, OpInfo, Sample
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.op_builder import op_table

Arguments = dict[str, Any]


# ---- cases -----------------------------------------------------------------------------------------------------------
def each_op(target: Target) -> Iterator[Parameters]:
    """Every op."""
    return ({"op": op.name} for op in op_info.infos())


def each_op_and_dtype(target: Target) -> Iterator[Parameters]:
    """Every op in every dtype that both it and the target declare."""
    declared = target.dtypes
    return (
        {"op": op.name, "dtype": _text(dtype)} for op in op_info.infos() for dtype in op.dtypes if dtype in declared
    )


def _takes_nan(op: OpInfo) -> bool:
    return op.nan


def _only(condition: Callable[[OpInfo], bool]) -> Callable[[Target], Iterator[Parameters]]:
    return lambda target: (case for case in each_op(target) if condition(op_info.find(case["op"])))


def _only_with_dtype(condition: Callable[[OpInfo], bool]) -> Callable[[Target], Iterator[Parameters]]:
    return lambda target: (case for case in each_op_and_dtype(target) if condition(op_info.find(case["op"])))


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
    info = _ready(target, op)
    for sample in _samples(info, dtype):
        _run_and_compare(target, info, sample)


@check(
    "ops.strided",
    Clause(
        "O1.2",
        "An op gives the same on tensors with gaps between their elements as on contiguous ones, and writes into the "
        "former; where it asks for contiguous tensors, its description says so.",
        reason="DeepSpeed hands over slices of flat buffers, and views that autograd made.",
    ),
    cases=each_op_and_dtype,
)
def strided(target: Target, op: str, dtype: str) -> None:
    info = _ready(target, op)
    sample = _smallest(info, dtype)
    gaps = {
        name: value if name in info.contiguous else _map(_with_gaps, value) for name, value in sample.arguments.items()
    }
    _run_and_compare(target, info, Sample(f"{sample.label}, strided", gaps, sample.kind))


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
    info = _ready(target, op)
    for sample in _empty_samples(info, dtype):
        _run_and_compare(target, info, sample)


@check(
    "ops.not_finite",
    Clause(
        "O1.4",
        "A NaN or an infinity in an argument reaches exactly the results that the formula lets it reach.",
        reason="Loss scaling finds overflows in gradients by it; a NaN that a kernel drops hides a broken model.",
    ),
    cases=_only_with_dtype(_takes_nan),
)
def not_finite(target: Target, op: str, dtype: str) -> None:
    info = _ready(target, op)
    sample = _smallest(info, dtype)
    for name in _tensor_names(sample, floating=True):
        for value in (float("nan"), float("inf")):
            spoilt = {**sample.arguments, name: _map_last(functools.partial(_with, value), sample.arguments[name])}
            _run_and_compare(target, info, Sample(f"{sample.label}, {value} in {name}", spoilt, sample.kind))


@check(
    "ops.deterministic",
    Clause(
        "O1.5",
        "The same call gives the same bits each time.",
        reason="Activation checkpointing computes twice; ranks that hold the same replica must stay equal.",
    ),
    cases=each_op,
)
def deterministic(target: Target, op: str) -> None:
    info = _ready(target, op)
    for sample in _samples(info, _text(_dtype(target, info))):
        first, second = (_call(info, _on(target, sample.arguments)) for _ in range(2))
        for (where, a), (_, b) in zip(first, second, strict=True):
            _expect_same(a, b, f"{op} on '{sample.label}': {where} differs between two calls")


# ---- what an op touches ----------------------------------------------------------------------------------------------
@check(
    "ops.in_place",
    Clause(
        "O2.1",
        "What an op writes is written into the tensors it was given, and autograd's version counters say so.",
        reason="DeepSpeed's front ends ignore what a step returns and continue with the tensors they hold.",
    ),
    cases=_only(lambda op: bool(op.written)),
)
def in_place(target: Target, op: str) -> None:
    info = _ready(target, op)
    sample = _smallest(info, _text(_dtype(target, info)))
    arguments = _on(target, sample.arguments)
    tensors = [(f"{name}[{i}]", t) for name in info.written for i, t in enumerate(_flat(arguments[name]))]
    before = [(t.data_ptr(), t._version, t.clone()) for _, t in tensors]
    _call(info, arguments)
    for (where, tensor), (address, version, _) in zip(tensors, before, strict=True):
        expect(tensor.data_ptr() == address, f"{op} moved {where} to other memory")
        if tensor.numel():
            expect(tensor._version > version, f"{op} wrote {where}, and its version counter still says {version}")
    changed = any(not _same_bits(t, old) for (_, t), (_, _, old) in zip(tensors, before, strict=True))
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
def read_only(target: Target, op: str) -> None:
    info = _ready(target, op)
    sample = _smallest(info, _text(_dtype(target, info)))
    arguments = _on(target, sample.arguments)
    kept = {name: _map(Tensor.clone, value) for name, value in arguments.items() if name not in info.written}
    _call(info, arguments)
    for name, old in kept.items():
        for i, (now, then) in enumerate(zip(_flat(arguments[name]), _flat(old), strict=True)):
            _expect_same(now, then, f"{op} on '{sample.label}' modified {name}[{i}], which it may only read")


# ---- what an op rejects ----------------------------------------------------------------------------------------------
def _expect_rejected(target: Target, info: OpInfo, label: str, arguments: Mapping[str, Any]) -> None:
    """Expect `InvalidTensorError`, and nothing written."""
    moved = {name: _map(lambda t: t if t.is_meta else t.to(target.device), v) for name, v in arguments.items()}
    written = [t for name in info.written for t in _flat(moved[name]) if not t.is_meta]
    before = [t.clone() for t in written]
    try:
        info.function(**moved)
    except InvalidTensorError:
        pass
    except Exception as error:
        raise NonconformanceError(
            f"{info.name} with {label} raised {type(error).__name__}", why=str(error), hint="raise InvalidTensorError"
        ) from error
    else:
        raise NonconformanceError(f"{info.name} took {label}", why="it must raise InvalidTensorError")
    for now, then in zip(written, before, strict=True):
        expect(_same_bits(now, then), f"{info.name} rejected {label}, but had already written")


@check(
    "ops.rejects.dtype",
    Clause(
        "O3.1",
        "An op given a tensor of a dtype that it does not support raises `InvalidTensorError` before it writes.",
        reason="Bits read as another type give numbers that can look right.",
    ),
    cases=each_op,
)
def rejects_dtype(target: Target, op: str) -> None:
    info = _ready(target, op)
    sample = _smallest(info, _text(_dtype(target, info)))
    for name in _tensor_names(sample):
        if name not in info.any_dtype:
            wrong = _map_last(_other_dtype, sample.arguments[name])
            _expect_rejected(
                target, info, f"{name} as {_text(_flat(wrong)[-1].dtype)}", {**sample.arguments, name: wrong}
            )


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
    info = _ready(target, op)
    sample = _smallest(info, _text(_dtype(target, info)))
    names = _tensor_names(sample)
    for name in names if len(names) > 1 else ():
        if name not in info.broadcasts:
            wrong = _map_last(_longer, sample.arguments[name])
            _expect_rejected(
                target, info, f"a {name} of shape {list(_flat(wrong)[-1].shape)}", {**sample.arguments, name: wrong}
            )


@check(
    "ops.rejects.device",
    Clause(
        "O3.3",
        "An op given tensors on different devices raises `InvalidTensorError` before it writes.",
        reason="With optimizer offload, a host tensor is easily passed where a device tensor is meant.",
    ),
    cases=each_op,
)
def rejects_device(target: Target, op: str) -> None:
    info = _ready(target, op)
    sample = _smallest(info, _text(_dtype(target, info)))
    names = _tensor_names(sample)
    for name in names if len(names) > 1 else ():
        wrong = _map_last(lambda t: t.to("meta"), sample.arguments[name])
        _expect_rejected(target, info, f"{name} on another device", {**sample.arguments, name: wrong})


@check(
    "ops.rejects.overlap",
    Clause(
        "O3.4",
        "An op that writes into a tensor whose elements share memory raises `InvalidTensorError`.",
        reason="The result would depend on the order of threads.",
    ),
    cases=_only(lambda op: bool(op.written)),
)
def rejects_overlap(target: Target, op: str) -> None:
    info = _ready(target, op)
    sample = _smallest(info, _text(_dtype(target, info)))
    for name in info.written:
        arguments = _on(target, sample.arguments)
        arguments[name] = _map_last(_expanded, arguments[name])
        _expect_rejected(target, info, f"an expanded {name}", arguments)


# ---- derivatives and tracing -----------------------------------------------------------------------------------------
@check(
    "ops.gradients",
    Clause(
        "O4.1",
        "The gradients of a differentiable op are those of its formula, within the tolerance of its dtype.",
        reason="Training depends on them.",
    ),
    cases=_only_with_dtype(lambda op: bool(op.differentiable)),
    timeout=120,
)
def gradients(target: Target, op: str, dtype: str) -> None:
    info = _ready(target, op)
    for sample in _samples(info, dtype):
        _compare_gradients(target, info, sample)


@check(
    "ops.gradcheck",
    Clause(
        "O4.2",
        "In float64 the derivative of an op agrees with finite differences.",
        reason="It is the one test of a derivative that does not trust another derivative.",
    ),
    cases=_only(lambda op: bool(op.differentiable)),
    needs=lambda target: (
        None if target.accelerator.is_fp64_supported() else "declares that it has no float64 (is_fp64_supported)"
    ),
)
def gradcheck(target: Target, op: str) -> None:
    info = _ready(target, op)
    sample = _smallest(info, _text(info.dtypes[0]))
    arguments = _on(target, sample.arguments)
    names = [name for name in info.differentiable if isinstance(arguments.get(name), Tensor)]
    leaves = [arguments[name].double().requires_grad_() for name in names]

    def function(*values: Tensor) -> Any:
        outputs = _outputs(info.function(**{**arguments, **dict(zip(names, values, strict=True))}))
        return tuple(output for output in outputs if output.is_floating_point())

    try:
        torch.autograd.gradcheck(function, leaves, fast_mode=True)
    except GradcheckError as error:
        raise NonconformanceError(f"{op} on '{sample.label}': gradcheck disagrees", why=str(error)) from error


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
    info = _ready(target, op)
    sample = _smallest(info, _text(_dtype(target, info)))
    arguments = _on(target, sample.arguments)
    positional = info.schema_arguments(arguments) if info.schema_arguments else list(arguments.values())
    try:
        torch.library.opcheck(info.overload, tuple(positional))
    except Exception as error:
        raise NonconformanceError(f"{op} on '{sample.label}': torch.library.opcheck fails", why=str(error)) from error


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
    key = "CPU" if builder.startswith("CPU") else _dispatch_key(target.device_type)
    expect(
        torch._C._dispatch_has_kernel_for_dispatch_key(f"ds_plugin::{op}", key),
        f"{builder} has loaded native code, and {op} has no kernel for {key}",
        hint=f'register it: DS_KERNELS_IMPL({key}, m) {{ m.impl("{op}", ...); }}, or say in conformance.toml why',
    )


def _own_builders(target: Target) -> Iterator[Parameters]:
    package = getattr(target.accelerator, "op_builders", None)
    return ({"builder": name} for name in sorted(op_builder.builders_in(package) if package else ()))


@check(
    "ops.builder_name",
    Clause(
        "O6.2",
        "The `NAME` of a builder of kernels, in the package that `op_builders` names, is an op's; that of a pybind11 "
        "module is free.",
        reason="Kernels are found by the op's name; under another one they are never loaded.",
    ),
    cases=_own_builders,
)
def builder_name(target: Target, builder: str) -> None:
    problem = op_builder.name_problem(op_builder.builders_in(target.accelerator.op_builders)[builder])
    expect(problem is None, f"{builder}: {problem}", hint="docs/writing-a-plugin.md has the table of names")


def _dispatch_key(device_type: str) -> str:
    private = torch._C._get_privateuse1_backend_name()
    return "PrivateUse1" if device_type == private else device_type.upper()


# ---- calling and comparing -------------------------------------------------------------------------------------------
def _ready(target: Target, op: str) -> OpInfo:
    """An op's description, its kernels loaded."""
    info = op_info.find(op)
    op_builder.load_family(info.family, target.device_type)
    return info


def _call(info: OpInfo, arguments: Arguments) -> list[tuple[str, Tensor]]:
    """Call an op. What it wrote, then what it returned and was not handed, each with its place."""
    with torch.no_grad():
        outputs = _outputs(info.function(**arguments))
    given = {id(t) for value in arguments.values() for t in _flat(value)}
    outputs = [output for output in outputs if id(output) not in given]
    written = [(f"{name}[{i}]", t) for name in info.written for i, t in enumerate(_flat(arguments[name]))]
    return written + [(f"output {i}", output) for i, output in enumerate(outputs)]


def _run_and_compare(target: Target, info: OpInfo, sample: Sample) -> None:
    """Run an op on one sample and fail at the worst element that its tolerance does not cover."""
    expected = [t for each in info.formula(**_exact(sample.arguments)) for t in _flat(each)]
    replaced = [t.double() for name in info.written for t in _flat(sample.arguments[name])]
    results = _call(info, _on(target, sample.arguments))
    expect(
        len(results) == len(expected),
        f"{info.name} on '{sample.label}' gave {len(results)} tensors",
        why=f"its formula gives {len(expected)}",
    )
    for i, ((where, actual), wanted) in enumerate(zip(results, expected, strict=True)):
        before = replaced[i] if i < len(replaced) else None
        _compare(info, sample, where, actual, wanted, before, info.rtol, info.atol)


def _compare_gradients(target: Target, info: OpInfo, sample: Sample) -> None:
    exact, arguments = _exact(sample.arguments), _on(target, sample.arguments)
    names = [name for name in info.differentiable if isinstance(arguments.get(name), Tensor)]
    for name in names:
        exact[name].requires_grad_()
        arguments[name].requires_grad_()
    wanted = [t for each in info.formula(**exact) for t in _flat(each)]
    outputs = _outputs(info.function(**arguments))
    pairs = [(out, want) for out, want in zip(outputs, wanted, strict=True) if want.requires_grad]
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(out.shape, generator=generator).to(out.dtype) for out, _ in pairs]
    actual = torch.autograd.grad(
        [out for out, _ in pairs], [arguments[n] for n in names], [c.to(target.device) for c in cotangents]
    )
    expected = torch.autograd.grad(
        [want for _, want in pairs], [exact[n] for n in names], [c.double() for c in cotangents]
    )
    rtol, atol = {**info.rtol, **info.gradient_rtol}, {**info.atol, **info.gradient_atol}
    for name, grad, want in zip(names, actual, expected, strict=True):
        _compare(info, sample, f"the gradient of {name}", grad, want, None, rtol, atol)


def _compare(
    info: OpInfo,
    sample: Sample,
    where: str,
    actual: Tensor,
    expected: Tensor,
    before: Tensor | None,
    rtol: Mapping[torch.dtype, float],
    atol: Mapping[torch.dtype, float],
) -> None:
    host = actual.detach().cpu()
    subject = f"{info.name} on '{sample.label}' ({_text(host.dtype)}): {where}"
    expect(
        host.shape == expected.shape, f"{subject} has shape {list(host.shape)}", why=f"expected {list(expected.shape)}"
    )
    exact = not host.dtype.is_floating_point
    allowed = (0.0, 0.0) if exact else (rtol.get(host.dtype, 0.0), atol.get(host.dtype, 0.0))
    wrong = op_info.close_to(host, expected.detach(), before=before, rtol=allowed[0], atol=allowed[1])
    if wrong is not None:
        times, index = wrong
        raise NonconformanceError(
            f"{subject}{list(index)} is {host[index].item():.9g}, its formula gives {expected[index].item():.9g}",
            op=info.name,
            why=f"{times:.3g} times the allowed error of {allowed[0]:.2g} relative + {allowed[1]:.2g}",
            hint=f"compare with torch.ops.ds_plugin_reference.{info.name} on these arguments",
        )


# ---- samples and arguments -------------------------------------------------------------------------------------------
def _samples(info: OpInfo, dtype: str) -> Iterator[Sample]:
    """The samples that have elements."""
    made = info.samples(Make.seeded(getattr(torch, dtype)))
    return itertools.dropwhile(_is_empty, made)


def _empty_samples(info: OpInfo, dtype: str) -> Iterator[Sample]:
    return itertools.takewhile(_is_empty, info.samples(Make.seeded(getattr(torch, dtype))))


def _is_empty(sample: Sample) -> bool:
    return sample.kind == "empty"


@functools.cache
def _smallest(info: OpInfo, dtype: str) -> Sample:
    """The cheapest sample that has elements. Its tensors are to be copied, not used."""
    return min(itertools.takewhile(lambda sample: sample.kind != "real", _samples(info, dtype)), key=_elements)


def _elements(sample: Sample) -> int:
    return sum(t.numel() for value in sample.arguments.values() for t in _flat(value))


def _dtype(target: Target, info: OpInfo) -> torch.dtype:
    """The first dtype of an op that the target has."""
    declared = target.dtypes
    return next((dtype for dtype in info.dtypes if dtype in declared), info.dtypes[0])


def _on(target: Target, arguments: Mapping[str, Any]) -> Arguments:
    """New copies on the target's device, with the same strides."""
    return {name: _map(lambda t: _copy(t, target.device), value) for name, value in arguments.items()}


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    strides = tensor.stride()
    if tensor.is_contiguous() or 0 in strides:
        return tensor.clone().to(device)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    memory = torch.zeros(last + 1, dtype=tensor.dtype, device=device)
    return torch.as_strided(memory, tensor.shape, strides).copy_(tensor)


def _exact(arguments: Mapping[str, Any]) -> Arguments:
    """Copies in host memory, floating point in float64."""
    return {
        name: _map(lambda t: t.double() if t.is_floating_point() else t.clone(), value)
        for name, value in arguments.items()
    }


def _tensor_names(sample: Sample, *, floating: bool = False) -> list[str]:
    """The arguments that hold tensors."""
    tensors = {name: _flat(value) for name, value in sample.arguments.items()}
    return [name for name, found in tensors.items() if found and (not floating or found[0].is_floating_point())]


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for each in value if isinstance(each, Tensor)] if isinstance(value, list | tuple) else []


def _outputs(value: Any) -> list[Tensor]:
    return _flat(value)


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A function of each tensor of an argument; what is no tensor stays."""
    if isinstance(value, Tensor):
        return function(value)
    return [_map(function, each) for each in value] if isinstance(value, list | tuple) else value


def _map_last(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A function of an argument, or of its last tensor."""
    return function(value) if isinstance(value, Tensor) else [*value[:-1], function(value[-1])]


def _with(value: float, tensor: Tensor) -> Tensor:
    spoilt = tensor.clone()
    spoilt.view(-1)[spoilt.numel() // 2] = value
    return spoilt


def _with_gaps(tensor: Tensor) -> Tensor:
    if tensor.dim() == 0:
        return tensor
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def _other_dtype(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int32 if tensor.is_floating_point() else torch.float32)


def _longer(tensor: Tensor) -> Tensor:
    return tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 1) if tensor.dim() else tensor.new_zeros(2)


def _expanded(tensor: Tensor) -> Tensor:
    """The shape of a tensor, on one element."""
    return (
        tensor.flatten()[:1].expand(tensor.numel()).view(tensor.shape)
        if tensor.numel() > 1
        else tensor.new_zeros(1).expand(2)
    )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _expect_same(a: Tensor, b: Tensor, what: str) -> None:
    """Fail unless two tensors have the same bits; say where they differ first."""
    if not _same_bits(a, b):
        a, b = a.detach().cpu().double().flatten(), b.detach().cpu().double().flatten()
        index = int((a != b).int().argmax())
        raise NonconformanceError(what, why=f"element {index} is {a[index].item():.9g} and {b[index].item():.9g}")


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
