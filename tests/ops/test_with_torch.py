"""Every op under what torch has around ops: opcheck, export, vmap, autocast, deterministic mode, shared memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_plugin_sdk.conformance import op_info
from ds_plugin_sdk.conformance.op_info import Make, OpInfo, Sample
from ds_plugin_sdk.errors import InvalidTensorError

pytestmark = pytest.mark.compiler

Arguments = Mapping[str, Any]


@pytest.fixture(params=op_info.infos(), ids=lambda info: info.name)
def info(request: pytest.FixtureRequest) -> OpInfo:
    """Each op in turn."""
    return request.param


@pytest.fixture(scope="session", autouse=True)
def every_kernel(native: Callable[..., None]) -> None:
    """An op that falls back to its reference would not be tested."""
    native(*sorted({info.family for info in op_info.infos()}))


def samples(info: OpInfo, dtype: torch.dtype) -> dict[str, Sample]:
    """The first sample of each kind."""
    found: dict[str, Sample] = {}
    for sample in info.samples(Make.seeded(dtype)):
        found.setdefault(sample.kind, sample)
    return found


def small(info: OpInfo, dtype: torch.dtype | None = None) -> Arguments:
    found = samples(info, dtype or info.dtypes[0])
    return next(found[kind] for kind in ("adversarial", "random", "real") if kind in found).arguments


def real(info: OpInfo) -> Arguments:
    return samples(info, info.dtypes[0])["real"].arguments


def copied(arguments: Arguments) -> dict[str, Any]:
    """The arguments, for a call that may write into them."""

    def copy(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(copy(each) for each in value)
        return value.clone() if isinstance(value, Tensor) else value

    return {name: copy(value) for name, value in arguments.items()}


def flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from flat(each)


def results(info: OpInfo, call: Callable[..., Any], arguments: Arguments) -> list[Tensor]:
    """What a call wrote and returned."""
    given = copied(arguments)
    output = call(**given)
    return [t.clone() for t in itertools.chain(*(flat(given[name]) for name in info.written), flat(output))]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


# ---- opcheck ---------------------------------------------------------------------------------------------------------
def test_opcheck_holds_on_calls_of_every_kind(info: OpInfo) -> None:
    first, *others = info.dtypes
    calls = [sample.arguments for kind, sample in samples(info, first).items() if kind != "real"]
    for arguments in map(copied, [*calls, *(small(info, dtype) for dtype in others)]):
        positional = info.schema_arguments(arguments) if info.schema_arguments else list(arguments.values())
        torch.library.opcheck(info.overload, tuple(positional))


# ---- export ----------------------------------------------------------------------------------------------------------
class Calls(torch.nn.Module):
    """A module that calls an op with the tensors that it is given, and numbers that stay as they are."""

    def __init__(self, info: OpInfo, arguments: Arguments) -> None:
        super().__init__()
        self.info, self.arguments = info, arguments

    def forward(self, tensors: dict[str, Any]) -> Any:
        output = self.info.function(**{name: tensors.get(name, value) for name, value in self.arguments.items()})
        # What is written is an output too: an exported program may not have one of its inputs as its only result.
        return output, [each.clone() for name in self.info.written for each in flat(tensors.get(name))]


def test_an_exported_program_has_the_op_and_gives_the_same(info: OpInfo) -> None:
    arguments = small(info)
    tensors = {name: value for name, value in arguments.items() if any(True for _ in flat(value))}
    module = Calls(info, arguments)
    program = torch.export.export(module, (copied(tensors),))
    assert f"ds_plugin.{info.name}" in str(program.graph)
    expected, found = (list(flat(call(copied(tensors)))) for call in (module, program.module()))
    assert_same(found, expected)


# ---- vmap ------------------------------------------------------------------------------------------------------------
def has_tensors(info: OpInfo) -> bool:
    """Whether an argument is a tensor: vmap does not map over lists."""
    return any(isinstance(value, Tensor) for value in small(info).values())


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # the op is called for each, as is asked
@pytest.mark.parametrize("info", [info for info in op_info.infos() if has_tensors(info)], ids=lambda info: info.name)
def test_vmap_gives_what_a_loop_gives(info: OpInfo) -> None:
    arguments = small(info)
    name = next(name for name, value in arguments.items() if isinstance(value, Tensor))
    stacked = torch.stack([arguments[name], arguments[name].flip(0) if arguments[name].dim() else arguments[name]])

    def one(value: Tensor) -> Any:
        return info.function(**{**copied(arguments), name: value})

    if info.written:
        with pytest.raises(RuntimeError, match="Batching rule not implemented"):
            torch.vmap(one)(stacked.clone())
        return
    expected = [torch.stack(each) for each in zip(*(list(flat(one(value))) for value in stacked), strict=True)]
    assert_same(list(flat(torch.vmap(one)(stacked))), expected)


# ---- modes -----------------------------------------------------------------------------------------------------------
def test_autocast_leaves_the_op_as_it_is(info: OpInfo) -> None:
    for sample in info.samples(Make.seeded(info.dtypes[0])):
        expected = results(info, info.function, sample.arguments)
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(results(info, info.function, sample.arguments), expected)


def test_deterministic_mode_allows_the_op_and_threads_do_not_change_its_result(info: OpInfo) -> None:
    arguments, threads = real(info), torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    try:
        torch.set_num_threads(2)
        expected = results(info, info.function, arguments)
        for _ in range(2):
            assert_same(results(info, info.function, arguments), expected)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


# ---- arguments in one memory -----------------------------------------------------------------------------------------
def test_two_arguments_in_one_memory_are_as_two_copies_or_an_error(info: OpInfo) -> None:
    arguments = small(info)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    for one, other in itertools.combinations(tensors, 2):
        a, b = tensors[one], tensors[other]
        if (a.shape, a.dtype) != (b.shape, b.dtype) or {one, other} <= set(info.written):
            continue
        expected = results(info, info.function, {**arguments, other: a})
        given = copied(arguments)
        given[other] = given[one]
        try:
            output = info.function(**given)
        except InvalidTensorError as error:
            assert "memory" in str(error)
            continue
        found = [t.clone() for t in itertools.chain(*(flat(given[name]) for name in info.written), flat(output))]
        assert_same(found, expected)
