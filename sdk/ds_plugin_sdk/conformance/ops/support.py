"""What the checks of ops share: which ops there are, samples, calls, and comparisons with the formula."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk import op_builder
from ds_plugin_sdk.conformance import op_info
from ds_plugin_sdk.conformance.check import ExcusedError, NonconformanceError, Parameters, expect
from ds_plugin_sdk.conformance.op_info import Make, OpInfo, Sample
from ds_plugin_sdk.conformance.placed import Layout, Placed, same_bits
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.ops import _library

Arguments = dict[str, Any]

# Ways to lie in memory: slices of flat buffers and of matrices, views that autograd made, broadcast arguments.
_MOST_ELEMENTS = 100_000  # of a call that many checks make

LAYOUTS = {
    "in a flat buffer": Layout(shift=9),
    "with gaps": Layout(gap=2, shift=1),
    "rows apart": Layout(pad=3, shift=1),
    "transposed": Layout(order=0.87, shift=1),  # which reverses two, three and four dimensions
    "rows in another order": Layout(rows=True, shift=1),  # heads of [batch, tokens, heads, width], sequences last
    "expanded": Layout(repeated=0.0),
    "one number": Layout(one=True),
}


# ---- ops and cases ---------------------------------------------------------------------------------------------------
def described(target: Target) -> tuple[OpInfo, ...]:
    """The SDK's ops, and those that the plugin describes."""
    own = getattr(target.accelerator, "op_info", None)
    return (*op_info.infos(), *(op_info.described_in(own) if own else ()))


def find(target: Target, op: str) -> OpInfo:
    return next(info for info in described(target) if info.name == op)


def each_op(target: Target) -> Iterator[Parameters]:
    """Every op."""
    return ({"op": info.name} for info in described(target))


def each_op_and_dtype(target: Target) -> Iterator[Parameters]:
    """Every op in every dtype that both it and the target declare."""
    declared = target.dtypes
    return (
        {"op": info.name, "dtype": name_of(dtype)}
        for info in described(target)
        for dtype in info.dtypes
        if dtype in declared
    )


def only(
    condition: Callable[[OpInfo], bool], cases: Callable[[Target], Iterator[Parameters]] = each_op
) -> Callable[[Target], Iterator[Parameters]]:
    """The cases of the ops for which a condition holds."""
    return lambda target: (case for case in cases(target) if condition(find(target, case["op"])))


def ready(target: Target, op: str) -> OpInfo:
    """An op's description, its kernels loaded."""
    info = find(target, op)
    if info.family:
        op_builder.load_family(info.family, target.device_type)
    return info


def has_kernel(target: Target, info: OpInfo) -> bool:
    """Whether an op that is ready has a kernel for the device, and is not left to its reference implementation."""
    key = dispatch_key(target.device_type)
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"{info.namespace}::{info.name}", key))


def expect_kernel(target: Target, info: OpInfo) -> None:
    """Skip the case where an op that is ready is left to its reference implementation."""
    if not has_kernel(target, info):
        raise ExcusedError("skipped", "no kernel for this device: torch's ops run in its place")


# ---- calling and comparing -------------------------------------------------------------------------------------------


def call_op(info: OpInfo, arguments: Arguments) -> list[tuple[str, Tensor]]:
    """Call an op. What it wrote, then what it returned and was not handed, each with its place."""
    with torch.no_grad():
        outputs = tensors_of(info.function(**arguments))
    given = {id(t) for value in arguments.values() for t in tensors_of(value)}
    outputs = [output for output in outputs if id(output) not in given]
    written = [(f"{name}[{i}]", t) for name in info.written for i, t in enumerate(tensors_of(arguments[name]))]
    return written + [(f"output {i}", output) for i, output in enumerate(outputs)]


def run_and_compare(target: Target, info: OpInfo, sample: Sample) -> None:
    """Run an op on one sample, and compare."""
    compare(info, sample, call_op(info, on_device(target, sample.arguments)))


def run_placed(
    target: Target,
    info: OpInfo,
    sample: Sample,
    label: str,
    layout: Layout,
    names: Collection[str] | None = None,
) -> None:
    """Run an op on a sample whose tensors lie as a layout says, compare, and look at the memory around them.

    Args:
        names: of the arguments that lie so; None for all. The others are contiguous.
    """
    values, placed = dict(sample.arguments), list[tuple[str, Placed]]()
    given = on_device(target, sample.arguments)
    for name in tensor_names(sample):
        dense = layout.gap == 1 and not (layout.pad or layout.rows or layout.shared) and layout.order < 0.5
        elsewhere = names is not None and name not in names
        if elsewhere or (name in info.contiguous and not dense) or (name in info.written and layout.shared):
            continue
        if layout.one and not all(t.is_floating_point() for t in tensors_of(values[name])):
            continue  # indices that are the same mean something else
        values[name] = map_tensors(layout.values, values[name])
        each = [Placed.at(t, layout, target.device) for t in tensors_of(values[name])]
        given[name] = _with_tensors(values[name], iter([one.tensor for one in each]))
        placed += [(f"{name}[{i}]", one) for i, one in enumerate(each)]
    compare(info, Sample(f"{sample.label}, {label}", values, sample.kind), call_op(info, given))
    for where, one in placed:
        expect(
            not one.beyond(),
            f"{info.name} on '{sample.label}, {label}' wrote memory beside {where}",
            why="elements between those of the tensor, before the first or after the last have changed",
        )


def compare(info: OpInfo, sample: Sample, results: list[tuple[str, Tensor]]) -> None:
    """Fail at the worst element of what `call_op` gave for a sample that the op's tolerance does not cover."""
    expected = [t for each in info.formula(**exact_copies(sample.arguments)) for t in tensors_of(each)]
    replaced = [t.double() for name in info.written for t in tensors_of(sample.arguments[name])]
    expect(
        len(results) == len(expected),
        f"{info.name} on '{sample.label}' gave {len(results)} tensors",
        why=f"its formula gives {len(expected)}",
    )
    for i, ((where, actual), wanted) in enumerate(zip(results, expected, strict=True)):
        before = replaced[i] if i < len(replaced) else None
        _compare(info, sample, where, actual, wanted, before, info.allowed(sample.arguments, actual.dtype))


def compare_gradients(target: Target, info: OpInfo, sample: Sample, only: str = "") -> None:
    """Compare the gradients of all differentiable arguments, or of one, where the others want none."""
    exact, arguments = exact_copies(sample.arguments), on_device(target, sample.arguments)
    names = [name for name in tensor_names(sample, floating=True) if name in info.differentiable and only in ("", name)]
    if not names:
        return
    for name in names:
        exact[name].requires_grad_()
        arguments[name].requires_grad_()
    wanted = [t for each in info.formula(**exact) for t in tensors_of(each)]
    outputs = tensors_of(info.function(**arguments))
    pairs = [(out, want) for out, want in zip(outputs, wanted, strict=True) if want.requires_grad]
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(out.shape, generator=generator).to(out.dtype) for out, _ in pairs]
    actual = torch.autograd.grad(
        [out for out, _ in pairs], [arguments[n] for n in names], [c.to(target.device) for c in cotangents]
    )
    expected = torch.autograd.grad(
        [want for _, want in pairs], [exact[n] for n in names], [c.double() for c in cotangents]
    )
    for name, grad, want in zip(names, actual, expected, strict=True):
        rtol, atol = info.allowed(sample.arguments, grad.dtype)
        allowed = info.gradient_rtol.get(grad.dtype, rtol), info.gradient_atol.get(grad.dtype, atol)
        _compare(info, sample, f"the gradient of {name}", grad, want, None, allowed)


def _compare(
    info: OpInfo,
    sample: Sample,
    where: str,
    actual: Tensor,
    expected: Tensor,
    before: Tensor | None,
    allowed: tuple[float, float],
) -> None:
    host = actual.detach().cpu()
    subject = f"{info.name} on '{sample.label}' ({name_of(host.dtype)}): {where}"
    expect(
        host.shape == expected.shape, f"{subject} has shape {list(host.shape)}", why=f"expected {list(expected.shape)}"
    )
    wrong = op_info.close_to(host, expected.detach(), before=before, rtol=allowed[0], atol=allowed[1])
    if wrong is not None:
        times, index = wrong
        raise NonconformanceError(
            f"{subject}{list(index)} is {host[index].item():.9g}, its formula gives {expected[index].item():.9g}",
            op=info.name,
            why=f"{times:.3g} times the allowed error of {allowed[0]:.2g} relative + {allowed[1]:.2g}",
            hint=f"compare with torch.ops.{_library.REFERENCE_NAMESPACE}.{info.name} on these arguments"
            if info.namespace == _library.NAMESPACE
            else "",
        )


# ---- samples and arguments -------------------------------------------------------------------------------------------
def samples_of(info: OpInfo, dtype: str, seed: int = 0) -> Iterator[Sample]:
    """The samples that have elements."""
    made = info.samples(Make.seeded(getattr(torch, dtype), seed))
    return itertools.dropwhile(_is_empty, made)


def empty_samples(info: OpInfo, dtype: str) -> Iterator[Sample]:
    return itertools.takewhile(_is_empty, info.samples(Make.seeded(getattr(torch, dtype))))


def _is_empty(sample: Sample) -> bool:
    return sample.kind == "empty"


@functools.cache
def smallest(info: OpInfo, dtype: str) -> Sample:
    """The cheapest sample that has elements. Its tensors are to be copied, not used.

    In matrices of one row strides do not matter, and of one column neither does what a softmax or a norm is of: so
    there are as few of them as can be.
    """
    return min(_made(info, dtype), key=lambda sample: (_singles(sample), _elements(sample)))


@functools.cache
def largest(info: OpInfo, dtype: str) -> Sample:
    """The sample with most elements, but for those of real models: devices have other kernels for it."""
    return max((each for each in _made(info, dtype) if _elements(each) <= _MOST_ELEMENTS), key=_elements)


@functools.cache
def fullest(info: OpInfo, dtype: str) -> Sample:
    """The cheapest of the samples with most tensors, and of these with most dimensions: of a mask, of a batch."""

    def key(sample: Sample) -> tuple[float, ...]:
        tensors = [t for value in sample.arguments.values() for t in tensors_of(value)]
        dimensions = sum(t.dim() for t in tensors) / max(len(tensors), 1)
        return -len(tensor_names(sample)), -dimensions, _singles(sample), _elements(sample)

    return min(_made(info, dtype), key=key)


def _made(info: OpInfo, dtype: str, seed: int = 0) -> Iterator[Sample]:
    return itertools.takewhile(lambda sample: sample.kind != "real", samples_of(info, dtype, seed))


def made_again(info: OpInfo, dtype: str) -> dict[str, Sample]:
    """The samples but for those of real models, by their labels, with other values."""
    return {sample.label: sample for sample in _made(info, dtype, seed=1)}


def small_and_large(target: Target, info: OpInfo) -> list[Sample]:
    """The cheapest and the largest sample, each in an op's first dtype and in one of 16 bits."""
    made = [each for dtype in widths(target, info) for each in (smallest(info, dtype), largest(info, dtype))]
    return list({id(sample): sample for sample in made}.values())


def widths(target: Target, info: OpInfo) -> list[str]:
    """The first dtype of an op that the target has, and the first of another width: kernels differ by it."""
    first = dtype_of(target, info)
    others = [dtype for dtype in info.dtypes if dtype in target.dtypes and dtype.itemsize != first.itemsize]
    return [name_of(dtype) for dtype in (first, *others[:1])]


def cheap_samples(info: OpInfo, dtype: str) -> list[Sample]:
    """All with few elements."""
    return [sample for sample in _made(info, dtype) if _elements(sample) <= 4096]


def small_samples(info: OpInfo, dtype: str, most: int = 12) -> list[Sample]:
    """Some of those with few elements, the smallest among them: of each kind of call, and of each part of the list."""
    least = smallest(info, dtype)
    kinds: dict[tuple[Any, ...], Sample] = {_kind(least): least}
    others = list[Sample]()
    for sample in _made(info, dtype):
        if sample.label == least.label or _elements(sample) > 4096:
            continue
        if kinds.setdefault(_kind(sample), sample) is not sample:
            others.append(sample)
    _, *firsts = kinds.values()
    chosen = _spread(firsts, most - 1)
    return [least, *chosen, *_spread(others, most - 1 - len(chosen))]


def _spread(samples: list[Sample], most: int) -> list[Sample]:
    """As many at most, of each part of a list."""
    return samples[:: -(-len(samples) // most) or 1] if most > 0 else []


def _kind(sample: Sample) -> tuple[Any, ...]:
    """What a kernel is written or compiled for: which tensors there are, of which dtypes, and what is switched."""
    return tuple(
        frozenset(t.dtype for t in tensors_of(value)) if tensors_of(value) else value
        for value in sample.arguments.values()
        if value is None or tensors_of(value) or isinstance(value, bool | str)
    )


def _singles(sample: Sample) -> int:
    """Dimensions with one entry, in tensors with several dimensions."""
    tensors = [t for value in sample.arguments.values() for t in tensors_of(value) if t.dim() > 1]
    return sum(size < 2 for tensor in tensors for size in tensor.shape)


def _elements(sample: Sample) -> int:
    return sum(t.numel() for value in sample.arguments.values() for t in tensors_of(value))


def dtype_of(target: Target, info: OpInfo) -> torch.dtype:
    """The first dtype of an op that the target has."""
    declared = target.dtypes
    return next((dtype for dtype in info.dtypes if dtype in declared), info.dtypes[0])


def on_device(target: Target, arguments: Mapping[str, Any]) -> Arguments:
    """New copies on the target's device, with the same strides."""
    return {name: map_tensors(lambda t: _copy(t, target.device), value) for name, value in arguments.items()}


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    strides = tensor.stride()
    if tensor.is_contiguous() or 0 in strides:
        return tensor.clone().to(device)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    memory = torch.zeros(last + 1, dtype=tensor.dtype, device=device)
    return torch.as_strided(memory, tensor.shape, strides).copy_(tensor)


def exact_copies(arguments: Mapping[str, Any]) -> Arguments:
    """Copies in host memory, floating point in float64."""
    return {
        name: map_tensors(lambda t: t.double() if t.is_floating_point() else t.clone(), value)
        for name, value in arguments.items()
    }


def tensor_names(sample: Sample, *, floating: bool = False) -> list[str]:
    """The arguments that hold tensors."""
    tensors = {name: tensors_of(value) for name, value in sample.arguments.items()}
    return [name for name, found in tensors.items() if found and (not floating or found[0].is_floating_point())]


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for each in value if isinstance(each, Tensor)] if isinstance(value, list | tuple) else []


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A function of each tensor of an argument; what is no tensor stays."""
    if isinstance(value, Tensor):
        return function(value)
    return [map_tensors(function, each) for each in value] if isinstance(value, list | tuple) else value


def _with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """An argument with other tensors, in their order."""
    return map_tensors(lambda _: next(tensors), value)


def map_last(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A function of an argument, or of its last tensor."""
    return function(value) if isinstance(value, Tensor) else [*value[:-1], function(value[-1])]


def with_value(value: float, at: int, tensor: Tensor) -> Tensor:
    """With a value at one position, counted around."""
    spoilt = tensor.clone()
    if spoilt.numel():
        spoilt[torch.unravel_index(torch.tensor(at % spoilt.numel()), spoilt.shape)] = value
    return spoilt


def other_dtype(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int32 if tensor.is_floating_point() else torch.float32)


def longer(tensor: Tensor) -> Tensor:
    return tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 1) if tensor.dim() else tensor.new_zeros(2)


def higher(tensor: Tensor) -> Tensor:
    """By one entry of the first dimension; by two where there is one, for two may be what others have."""
    more = [2 * size + 1 if size == 1 else size + 1 for size in tensor.shape[:1]] or [2]
    return tensor.new_zeros(*more, *tensor.shape[1:])


def expanded(tensor: Tensor) -> Tensor:
    """The shape of a tensor, on one element."""
    return (
        tensor.flatten()[:1].expand(tensor.numel()).view(tensor.shape)
        if tensor.numel() > 1
        else tensor.new_zeros(1).expand(2)
    )


def expect_same(a: Tensor, b: Tensor, what: str) -> None:
    """Fail unless two tensors have the same bits; say where they differ first."""
    if not same_bits(a, b):
        a, b = a.detach().cpu().double().flatten(), b.detach().cpu().double().flatten()
        index = int((a != b).int().argmax())
        raise NonconformanceError(what, why=f"element {index} is {a[index].item():.9g} and {b[index].item():.9g}")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dispatch_key(device_type: str) -> str:
    private = torch._C._get_privateuse1_backend_name()
    return "PrivateUse1" if device_type == private else device_type.upper()
