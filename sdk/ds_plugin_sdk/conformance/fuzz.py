"""Random calls of the ops: the device's kernel, the reference implementation and the formula in float64 must agree.

A case draws everything from its id: arguments, by the op's description in `op_info`, and edits of them. An edit gives a
tensor another layout, spoils some of its values, or makes the call one that may be rejected. Then both
kernel and reference must reject it. `sdk fuzz` runs cases in a worker and shrinks those that fail.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ds_plugin_sdk import op_builder
from ds_plugin_sdk.conformance import op_info
from ds_plugin_sdk.conformance.op_info import Make, OpInfo
from ds_plugin_sdk.conformance.placed import Layout, Placed, same_bits
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.errors import ConformanceError, InvalidTensorError
from ds_plugin_sdk.ops import _library

Arguments = dict[str, Any]

# What `Edit.kind` says of the results.
#   layout   the same call: within the tolerances of the op
#   special  NaN, infinities, zeros or repeated values: as near to the formula as float32 can
#   extreme  huge and tiny values: the same, and float32 may overflow
#   wrong    may be rejected, by both; otherwise as `extreme`
KINDS = ("layout", "special", "extreme", "wrong")

_SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0)
_EXTREME = (1e-45, 1e-38, 1e-20, 1e4, 1e19, 3e38)
# What float32 arithmetic may lose of a number on the way.
_UNIT = 2e-6
_INTEGERS = (-1, 0, 1, 2**31 - 1, 2**31, 2**62, 2**63 - 1)
_FLOATS = (0.0, -1.0, 1e30, float("nan"))
# A tensor without elements has as many groups as one asks for; of more, results without a meaning take gigabytes.
_MOST_OF_NOTHING = 2**10
# What torch raises of a tensor that no memory can hold.
_TOO_LARGE = re.compile("allocate memory|integer multiplication overflow")


# ---- cases -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Edit:
    """A change to one argument, or to one tensor of a list.

    Attributes:
        kind: of `KINDS`.
        text: what it does, for the reader.
        apply: gives the new argument; for a layout, where it is to lie on a device.
    """

    kind: str
    argument: str
    text: str
    apply: Callable[[Any], Any]


@dataclass(frozen=True)
class Fuzzed:
    """A case.

    Attributes:
        op, dtype: by name.
        seed: all else is drawn from it.
        largest: of the sizes that are drawn.
        kept: which of its edits are made, by their numbers; None for all.
    """

    op: str
    dtype: str
    seed: int
    largest: int = 3000
    kept: tuple[int, ...] | None = None

    @property
    def id(self) -> str:
        edits = "" if self.kept is None else ":" + ",".join(map(str, self.kept))
        return f"{self.op}:{self.dtype}:{self.seed}:{self.largest}{edits}"

    @staticmethod
    def of(id: str) -> Fuzzed:
        """The case of an id.

        Raises:
            ConformanceError: it is none.
        """
        try:
            op, dtype, seed, largest, *rest = id.split(":")
            kept = tuple(int(number) for number in rest[0].split(",") if number) if rest else None
            return Fuzzed(op, dtype, int(seed), int(largest), kept)
        except ValueError:
            raise ConformanceError(f"'{id}' is no case", hint="copy what sdk fuzz printed") from None

    def arguments(self) -> Arguments:
        """As the op's description draws them."""
        make = Make.seeded(getattr(torch, self.dtype), self.seed)
        return dict(op_info.find(self.op).random(dataclasses.replace(make, largest=self.largest)))

    def edits(self, arguments: Arguments) -> list[Edit]:
        """Those that are kept."""
        found = list(_draw_edits(op_info.find(self.op), arguments, random.Random(self.seed)))
        return found if self.kept is None else [found[i] for i in self.kept if i < len(found)]

    def smaller(self, edits: int) -> Iterator[Fuzzed]:
        """Cases with smaller tensors, and with one of so many edits less, to look for a simpler failure."""
        yield from (dataclasses.replace(self, largest=each) for each in (1, 3, 9, 17, 40, 130) if each < self.largest)
        kept = tuple(range(edits)) if self.kept is None else self.kept
        for number in kept:
            yield dataclasses.replace(self, kept=tuple(each for each in kept if each != number))


# ---- edits -----------------------------------------------------------------------------------------------------------
def _draw_edits(info: OpInfo, arguments: Arguments, rng: random.Random) -> Iterator[Edit]:
    """Layouts of about half of the tensors; in half of the cases something else, too."""
    names = [name for name, value in arguments.items() if _flat(value)]
    for name in names:
        if rng.random() < 0.5 and name not in info.contiguous:
            yield _layout(name, name not in info.written, rng)
    kind = rng.choice(("", "", "", "special", "extreme", "wrong"))
    floating = [name for name in names if _flat(arguments[name])[-1].is_floating_point()]
    if kind == "wrong":
        yield _wrong(info, arguments, rng)
    elif kind and floating and info.nan:
        values = _SPECIAL if kind == "special" else _EXTREME
        for name in rng.sample(floating, rng.randint(1, min(2, len(floating)))):
            value = rng.choice(values)
            yield _values(kind, name, 0.0 if name in info.finite and value not in (0.0, *_EXTREME) else value, rng)


def _values(kind: str, name: str, value: float, rng: random.Random) -> Edit:
    """One element, some, or all become a special value; an extreme one multiplies."""
    share, seed = rng.choice((0.0, 0.1, 1.0)), rng.randrange(2**31)

    def spoil(tensor: Tensor) -> Tensor:
        chosen = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)) < share
        if tensor.numel():
            chosen.view(-1)[seed % tensor.numel()] = True
        if kind == "special":
            return torch.where(chosen, torch.full_like(tensor, value), tensor)
        most = torch.finfo(tensor.dtype).max
        return torch.where(chosen, (tensor.double() * value).clamp(-most, most).to(tensor.dtype), tensor)

    what = "becomes" if kind == "special" else "is multiplied by"
    text = f"{'all' if share == 1 else 'some' if share else 'one element'} of {name} {what} {value}"
    return Edit(kind, name, text, lambda given: _map_last(spoil, given))


def _layout(name: str, expand: bool, rng: random.Random) -> Edit:
    """Where the elements lie: in another order of dimensions, with gaps, shifted from a vector's boundary, repeated."""
    order, gap, pad, shift = rng.random(), rng.choice((1, 1, 2, 3)), rng.choice((0, 0, 1, 5, 16)), rng.randrange(9)
    repeated = rng.random() if expand and rng.random() < 0.2 else None
    text = f"{name} with order {order:.3f}, gap {gap}, pad {pad}, shift {shift}"
    text += "" if repeated is None else f", repeated {repeated:.3f}"
    kind = "layout" if repeated is None else "special"
    return Edit(kind, name, text, lambda given: Layout(order, gap, pad, shift, repeated))


def _wrong(info: OpInfo, arguments: Arguments, rng: random.Random) -> Edit:
    """An argument of another dtype, shape, device or value."""
    name = rng.choice(list(arguments))
    value = arguments[name]
    if _flat(value):
        change, text = rng.choice(_wrong_tensors(rng))
        return Edit("wrong", name, f"{name} {text}", lambda given: _map_last(change, given))
    if isinstance(value, bool) or value is None or isinstance(value, str | torch.dtype | list | tuple):
        other = {bool: not value, torch.dtype: torch.int32}.get(type(value), value)
    else:
        other = rng.choice(_INTEGERS if isinstance(value, int) else _FLOATS)
        if isinstance(other, int) and other > _MOST_OF_NOTHING and not all(map(Tensor.numel, _tensors(arguments))):
            other = _MOST_OF_NOTHING
    return Edit("wrong", name, f"{name} is {other}", lambda given: other)


def _wrong_tensors(rng: random.Random) -> Sequence[tuple[Callable[[Tensor], Tensor], str]]:
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.bool))
    dimension = rng.random()

    def resize(by: int) -> Callable[[Tensor], Tensor]:
        def change(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0:
                return tensor
            sizes = list(tensor.shape)
            at = int(dimension * len(sizes))
            sizes[at] = max(0, sizes[at] + by)
            return tensor.new_ones(sizes)

        return change

    return (
        (lambda tensor: tensor.to(dtype), f"in {dtype}"),
        (resize(1), "is one larger in a dimension"),
        (resize(-1), "is one smaller in a dimension"),
        (lambda tensor: tensor.unsqueeze(0), "has one more dimension"),
        (lambda tensor: tensor[0] if tensor.dim() and tensor.shape[0] else tensor, "has one dimension less"),
        (lambda tensor: tensor.flatten(), "is flat"),
        (lambda tensor: tensor.to("meta"), "is on the meta device"),
        (lambda tensor: tensor[..., :1].expand(tensor.shape) if tensor.dim() else tensor, "is expanded"),
    )


# ---- running ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Found:
    """What came of a case.

    Attributes:
        failure: what is wrong, empty if nothing.
        call: the call, for the reader.
        edits: how many edits it had.
        rejected: whether kernel and reference rejected it.
    """

    failure: str
    call: str
    edits: int
    rejected: bool


def start(target: Target, ops: Sequence[str] = ()) -> list[str]:
    """Load the kernels of these ops, of all if there are none, which may have to be compiled.

    Gives the dtypes that the target declares.
    """
    for family in dict.fromkeys(info.family for info in op_info.infos() if info.name in (ops or (info.name,))):
        op_builder.load_family(family, target.device_type)
    return [str(dtype).removeprefix("torch.") for dtype in target.dtypes]


def run(target: Target, case: Fuzzed) -> Found:
    """Run a case on a target.

    Raises:
        ConformanceError: there is no such op.
    """
    torch.set_num_threads(1 if case.seed % 8 else 2)
    info, arguments, layouts, edits = _drawn(case)
    call = _text(info, arguments, layouts, edits)
    failure, rejected = compare(target, info, arguments, layouts, {edit.kind for edit in edits})
    return Found(failure, call, len(edits), rejected)


def rejected_by_reference(case: Fuzzed) -> bool:
    """Whether a call may be rejected, and is by the reference: for a kernel that could only end its process."""
    info, arguments, layouts, edits = _drawn(case)
    if "wrong" not in {edit.kind for edit in edits}:
        return False
    return _Run(info, arguments, layouts, torch.device("cpu"), reference=True).kind == "rejected"


def _drawn(case: Fuzzed) -> tuple[OpInfo, Arguments, dict[str, Layout], list[Edit]]:
    """A case's op, its arguments after its edits, where they are to lie, and its edits."""
    arguments = case.arguments()
    edits = case.edits(arguments)
    layouts: dict[str, Layout] = {}
    for edit in edits:
        made = edit.apply(arguments[edit.argument])
        if isinstance(made, Layout):
            layouts[edit.argument] = made
        else:
            arguments[edit.argument] = made
    arguments |= {name: _map(layout.values, arguments[name]) for name, layout in layouts.items()}
    return op_info.find(case.op), arguments, layouts, edits


def compare(
    target: Target, info: OpInfo, arguments: Arguments, layouts: Mapping[str, Layout], kinds: Collection[str]
) -> tuple[str, bool]:
    """What is wrong with a call, empty if nothing, and whether kernel and reference rejected it.

    Args:
        target: where the kernel is; the reference runs on the host.
        info: the op.
        arguments: of its Python function, on the host.
        layouts: of some of them.
        kinds: those of `KINDS` that the call is of.
    """
    kernel = _Run(info, arguments, layouts, target.device, reference=False)
    reference = _Run(info, arguments, layouts, torch.device("cpu"), reference=True)
    rejected = bool(kernel.error) and bool(reference.error)
    for changes in (3, 24):  # where few move a result less than they could, by chance
        failure = next(_wrongs(info, arguments, kernel, reference, kinds, changes), "")
        if not failure:
            return "", rejected
    return failure, rejected


class _Run:
    """A call, made: what it raised, or what it wrote and returned, by place."""

    def __init__(
        self,
        info: OpInfo,
        arguments: Arguments,
        layouts: Mapping[str, Layout],
        device: torch.device,
        *,
        reference: bool,
    ) -> None:
        self.placed: dict[str, list[Placed]] = {}
        self.error, self.results = "", list[tuple[str, Tensor]]()
        self.kind = ""  # of the error
        given = {name: self._place(name, value, layouts.get(name), device) for name, value in arguments.items()}
        with torch.no_grad(), mock.patch.object(_library, "call", _call_reference if reference else _library.call):
            try:
                outputs = _flat(info.function(**given))
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"
                self.kind = "rejected" if isinstance(error, InvalidTensorError) else type(error).__name__
                outputs = []
        known = {id(t) for value in given.values() for t in _flat(value)}
        if not self.error:
            written = [(f"{name}[{i}]", t) for name in info.written for i, t in enumerate(_flat(given[name]))]
            new = [output for output in outputs if id(output) not in known]
            self.results = written + [(f"output {i}", output) for i, output in enumerate(new)]

    def _place(self, name: str, value: Any, layout: Layout | None, device: torch.device) -> Any:
        placed: list[Placed] = []

        def place(tensor: Tensor) -> Tensor:
            placed.append(Placed.at(tensor, layout, device))
            return placed[-1].tensor

        given = _map(place, value)
        self.placed[name] = placed
        return given


def _call_reference(name: str, *args: Any) -> Any:
    return getattr(torch.ops.ds_plugin_reference, name).default(*args)


def _wrongs(
    info: OpInfo, arguments: Arguments, kernel: _Run, reference: _Run, kinds: Collection[str], changes: int
) -> Iterator[str]:
    """What is wrong, the worst first; `changes` as in `_moved`."""
    for who, made in (("the kernel", kernel), ("the reference", reference)):
        yield from _touched(who, info, arguments, made)
    if kernel.error or reference.error:
        sizes_too_large = all(_TOO_LARGE.search(each.error) for each in (kernel, reference))
        if kernel.kind != reference.kind or kernel.kind != "rejected" or "wrong" not in kinds:
            if sizes_too_large and "wrong" in kinds:
                return
            yield f"the kernel {_outcome(kernel)}, the reference {_outcome(reference)}"
        return
    expected = _formula(info, arguments, strict="wrong" not in kinds)
    loose = not set(kinds) <= {"layout"} or info.levels or expected is None
    moved = _moved(info, arguments, expected, changes) if loose and expected is not None else None
    if len(kernel.results) != len(reference.results):
        yield f"the kernel gave {len(kernel.results)} tensors, the reference {len(reference.results)}"
        return
    for i, ((where, ours), (_, theirs)) in enumerate(zip(kernel.results, reference.results, strict=True)):
        if (ours.shape, ours.dtype, ours.is_meta) != (theirs.shape, theirs.dtype, theirs.is_meta):
            yield f"{where} is {ours.dtype} {list(ours.shape)}, by the reference {theirs.dtype} {list(theirs.shape)}"
        elif not ours.is_meta:
            wanted = expected[i] if expected is not None and len(expected) == len(kernel.results) else None
            if expected is not None and wanted is None:
                yield f"{len(kernel.results)} results, by the formula {len(expected)}"
            before = _before(info, arguments, i)
            bound = None
            if loose:
                left = _overflowed(info, arguments, expected, ours.cpu(), theirs)
                if "extreme" in kinds:  # an exponential leaves float32 at 88, in the reference's arithmetic too
                    left |= ~ours.cpu().isfinite() & ~theirs.isfinite()
                bound = torch.where(left, torch.inf, 0.0)
                bound = bound if moved is None or moved[i].shape != bound.shape else bound + moved[i]
            allowed = info.allowed(arguments, ours.dtype)
            yield from _compare(allowed, where, ours.detach().cpu(), theirs.detach(), wanted, before, bound)


def _touched(who: str, info: OpInfo, arguments: Arguments, made: _Run) -> Iterator[str]:
    """Memory that changed and is no argument's, or one's that is only read, or of a call that was rejected."""
    for name, placed in made.placed.items():
        for i, (each, old) in enumerate(zip(placed, _flat(arguments[name]), strict=True)):
            if each.beyond():
                yield f"{who} wrote beyond {name}[{i}]"
            kept = name not in info.written or bool(made.error)
            if kept and not old.is_meta and not same_bits(each.tensor.detach().cpu(), old):
                yield f"{who} modified {name}[{i}]" + (f", and raised {made.error}" if made.error else "")


def _outcome(made: _Run) -> str:
    return f"raised {made.error}" if made.error else "returned"


def _formula(info: OpInfo, arguments: Arguments, *, strict: bool) -> list[Tensor] | None:
    """What the formula gives; None where it has no answer to a call that need not make sense."""
    exact = {
        name: _map(lambda t: t.double() if t.is_floating_point() else t.clone(), value)
        for name, value in arguments.items()
    }
    try:
        return [t for each in info.formula(**exact) for t in _flat(each)]
    except Exception:
        if strict:
            raise
        return None


def _moved(info: OpInfo, arguments: Arguments, expected: Sequence[Tensor], changes: int) -> list[Tensor]:
    """How far the formula's results move at most where its arguments change, so many times at random, by as much as an
    op may round them.
    """
    tensors = _tensors(arguments)
    if any(t.is_meta for t in tensors):
        return [torch.zeros(each.shape) for each in expected]
    dtypes = {t.dtype for t in tensors if t.is_floating_point()}
    most = max((_lost(info, arguments, dtype) for dtype in dtypes), default=_UNIT)
    furthest = [torch.zeros(each.shape, dtype=torch.float64) for each in expected]
    for seed in range(changes):
        for sign in (1, -1):  # what is rounded to a level goes to either side
            results = _formula(info, _changed(arguments, seed, sign * most), strict=False)
            if results is None or [each.shape for each in results] != [each.shape for each in expected]:
                continue
            for so_far, exact, result in zip(furthest, expected, results, strict=True):
                by = (result.double() - exact.double()).abs().nan_to_num(0.0, 0.0, 0.0)
                so_far.copy_(torch.maximum(so_far, by))
    return furthest


def _changed(arguments: Arguments, seed: int, most: float) -> Arguments:
    """The arguments, every number times another factor that differs from 1 by up to `most`."""
    generator = torch.Generator().manual_seed(seed)

    def change(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        by = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return tensor.double() * (1 + most * by)

    return {name: _map(change, value) for name, value in arguments.items()}


def _lost(info: OpInfo, arguments: Arguments, dtype: torch.dtype) -> float:
    """The share of a number that an op's arithmetic may lose before its result is rounded."""
    return max(info.allowed(arguments, dtype)[0] - torch.finfo(dtype).eps / 2, _UNIT)


def _overflowed(
    info: OpInfo, arguments: Arguments, expected: Sequence[Tensor] | None, ours: Tensor, theirs: Tensor
) -> Tensor:
    """Where the arithmetic may have left its range: in the square of a large number, or in a sum, by the order of ours
    alone; by a tiny number's reciprocal if the reference did, too.
    """
    nothing = torch.zeros(ours.shape, dtype=torch.bool)
    if not ours.is_floating_point():
        return nothing
    sizes = [t.double().abs() for t in _tensors(arguments) if t.is_floating_point()]
    given = torch.cat([t.flatten() for t in sizes if not t.is_meta] or [torch.zeros(1, dtype=torch.float64)])
    results = (t.double().abs().nan_to_num(0.0, 0.0, 0.0) for t in expected or () if t.numel() and not t.is_meta)
    result = max((t.max().item() for t in results), default=0.0)
    # A result that is kept on the way may be of the op's dtype, and so are the sums of an op that rounds them.
    rounds = _lost(info, arguments, ours.dtype) > 1e-4
    most = 1e3 if rounds and ours.dtype == torch.float16 else 1e16
    if bool((given[given.isfinite()] > most).any()) or not result < min(1e34, torch.finfo(ours.dtype).max):
        return ~ours.isfinite() | ~theirs.isfinite()
    return ~theirs.isfinite() if bool(((given > 0) & (given < 1e-16)).any()) else nothing


def _before(info: OpInfo, arguments: Arguments, result: int) -> Tensor | None:
    """What a result replaced."""
    replaced = [t for name in info.written for t in _flat(arguments[name])]
    return replaced[result].double() if result < len(replaced) and not replaced[result].is_meta else None


def _compare(
    allowed: tuple[float, float],
    where: str,
    ours: Tensor,
    theirs: Tensor,
    wanted: Tensor | None,
    before: Tensor | None,
    moved: Tensor | None,
) -> Iterator[str]:
    """Ours against the formula, or the reference where that has no answer, element by element.

    With `moved`, what `_moved` gives, the formula need only be met as float32 can; all is right where it is infinite.
    """
    floating = ours.dtype.is_floating_point
    rtol, atol = allowed
    exact = theirs.double() if wanted is None else wanted.double()
    if exact.shape != ours.shape:
        yield f"{where} has shape {list(ours.shape)}, by the formula {list(exact.shape)}"
        return
    if floating:
        # What float64 holds and the dtype does not is infinite there.
        exact = torch.where(exact.abs() > torch.finfo(ours.dtype).max, exact.sign() * torch.inf, exact)
    if moved is not None:
        error = 4 * ((theirs.double() - exact).abs().nan_to_num(0.0, 0.0, 0.0) + moved)
        near = (ours.double() - exact).abs() <= rtol * exact.abs() + atol + error
        exact = torch.where(near | (moved.isinf() & exact.isfinite()), ours.double(), exact)
    # An infinity times what is 0 in float32 or in float64 alone is NaN there.
    either = (ours.isnan() & exact.isinf()) | (ours.isinf() & exact.isnan())
    wrong = op_info.close_to(
        ours, torch.where(either, ours.double(), exact), before=before, rtol=rtol, atol=atol or 1e-300
    )
    if wrong is not None:
        times, index = wrong
        yield (
            f"{where}{list(index)} is {ours[index].item():.9g}, by the reference {theirs[index].item():.9g}, expected "
            f"{exact[index].item():.9g}: {times:.3g} times the allowed error"
        )


# ---- text and tensors ------------------------------------------------------------------------------------------------
def _text(info: OpInfo, arguments: Arguments, layouts: Mapping[str, Layout], edits: Sequence[Edit]) -> str:
    """The call as a reader wants it: shapes, strides, options, edits."""

    def tensor(name: str, value: Tensor) -> str:
        layout = layouts.get(name)
        strides = f" strides {layout.strides(value.shape)[0]} offset {layout.shift}" if layout else ""
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{strides}"

    parts = []
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            parts.append(f"{name}={tensor(name, value)}")
        elif _flat(value):
            parts.append(f"{name}=[{', '.join(tensor(name, each) for each in _flat(value))}]")
        else:
            parts.append(f"{name}={value!r}")
    said = [edit.text for edit in edits if edit.kind != "layout"]
    return f"{info.name}({', '.join(parts)})" + "".join(f"; {text}" for text in said)


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for each in value if isinstance(each, Tensor)] if isinstance(value, list | tuple) else []


def _tensors(arguments: Arguments) -> list[Tensor]:
    return [t for value in arguments.values() for t in _flat(value)]


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    return type(value)(_map(function, each) for each in value) if isinstance(value, list | tuple) else value


def _map_last(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    return function(value) if isinstance(value, Tensor) else [*value[:-1], function(value[-1])]
