"""Optimizers' steps of one tensor, as DeepSpeed calls them, and of lists: the op's numbers past torch's dispatcher, or
the op.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from counted_calls import CountedCalls
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.integrations.deepspeed.modules import cpu_adagrad, cpu_adam, cpu_lion, fused_adam
from ds_plugin_sdk.op_builder.cpu import kernels as kernel_builders
from ds_plugin_sdk.ops import _library, adagrad, adam, lion
from ds_plugin_sdk.ops._c_function import CFunction
from ds_plugin_sdk.ops._cpu_kernels import CPUKernels

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]

# The function, its op, tensors, and the op's numbers; of Adam's function the step comes after them.
ADAM = (adam.c_function, "adam_", 4, (1e-2, 0.9, 0.99, 1e-8, 0.1, True, True))
LION = (lion.c_function, "lion_", 3, (1e-2, 0.9, 0.99, 0.1))
ADAGRAD = (adagrad.c_function, "adagrad_", 3, (1e-2, 1e-8, 0.1))
Case = tuple[CFunction, str, int, tuple[float, ...]]
CASES = pytest.mark.parametrize("case", [ADAM, LION, ADAGRAD], ids=["adam", "lion", "adagrad"])

DTYPES = [
    (param, grad, state)
    for param in (torch.float32, torch.bfloat16, torch.float16)
    for grad, state in itertools.product(dict.fromkeys((param, torch.float32)), repeat=2)
]


@pytest.fixture
def kernels(compiled_once: None) -> None:
    """Taken anew: another test of this process may have loaded kernels of other folders."""
    Target.find("cpu")
    for c_function, *_ in (ADAM, LION, ADAGRAD):
        c_function._handle = 0
    _load()


def _load() -> None:
    """As DeepSpeed does for each optimizer that it makes."""
    for name in ("CPUAdamBuilder", "CPULionBuilder", "CPUAdagradBuilder"):
        builder = kernel_builders.BUILDERS[name]()
        builder.load(verbose=False)
        builder._library_of_process()


def _tensors(lists: int, *shape: int, dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3) -> list[Tensor]:
    made = [torch.rand(shape, generator=torch.Generator().manual_seed(i)) + 0.5 for i in range(lists)]
    return [tensor.to(dtypes[min(i, 2)]) for i, tensor in enumerate(made)]


def _update(case: Case, tensors: list[Tensor], step: object = 1, numbers: tuple[object, ...] = ()) -> bool:
    """By the function; False if it leaves the call to the op."""
    c_function, op, _, its = case
    function = c_function.usable()
    return function is not None and function(*tensors, *(numbers or its), *([step] if op == "adam_" else [])) >= 0


def _by_op(case: Case, tensors: list[Tensor], step: int) -> None:
    _, op, _, numbers = case
    _library.call(op, *((tensor,) for tensor in tensors), *([(step,)] if op == "adam_" else []), *numbers)


@CASES
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2,), (7, 5), (3, 100_000)])
def test_it_is_the_op(case: Case, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> None:
    lists = case[2]
    ours, ops = _tensors(lists, *shape, dtypes=dtypes), _tensors(lists, *shape, dtypes=dtypes)
    for step in (1, 2, 1000):
        assert _update(case, ours, step)
        _by_op(case, ops, step)
    assert all(map(torch.equal, ours, ops))


@CASES
def test_numbers_are_those_of_the_call(case: Case) -> None:
    """A number that is a tensor may change, and threads may have others."""
    _, _, lists, numbers = case
    rate = torch.tensor(0.5)
    for value in (0.5, 0.25, 0.5):
        rate.fill_(value)
        ours, exact = _tensors(lists, 9), _tensors(lists, 9)
        assert _update(case, ours, numbers=(rate, *numbers[1:]))
        assert _update(case, exact, numbers=(value, *numbers[1:]))
        assert torch.equal(ours[0], exact[0])


@CASES
@pytest.mark.parametrize("wrong", ["text", None, torch.ones(2), object()], ids=["text", "None", "two", "an object"])
def test_a_number_that_is_none_is_for_the_op(case: Case, wrong: object) -> None:
    """Which says what is wrong; nothing was raised or written before."""
    _, _, lists, numbers = case
    tensors = _tensors(lists, 9)
    assert not _update(case, tensors, numbers=(*numbers[:-1], wrong))
    assert all(map(torch.equal, tensors, _tensors(lists, 9)))


@CASES
def test_more_or_fewer_arguments_are_for_the_op(case: Case) -> None:
    function = case[0].usable()
    assert function is not None
    assert function() == function(*_tensors(case[2], 9)) == function(*_tensors(case[2], 9), *range(9)) == -1


@CASES
def test_others_may_run_in_the_meantime(case: Case) -> None:
    """Other threads of Python run while one computes, and each has its own numbers."""
    _, _, lists, numbers = case

    def run(value: float) -> Tensor:
        tensors = _tensors(lists, 300_000)
        for _ in range(20):
            assert _update(case, tensors, numbers=(value, *numbers[1:]))
        return tensors[0]

    values = [0.5, 0.25, 0.125, 0.0625]
    with concurrent.futures.ThreadPoolExecutor(len(values)) as threads:
        together = list(threads.map(run, values))
    assert all(map(torch.equal, together, map(run, values)))


def test_autograd_notices() -> None:
    steps: list[tuple[Callable[..., int], tuple[object, ...], int]] = [
        (cpu_adam.adam_update, (4321, 1, 1e-2, 0.9, 0.99, 1e-8, 0.1, True), 4),
        (cpu_lion.lion_update, (0, 1, 1e-2, 0.9, 0.99, 0.1), 3),
        (cpu_adagrad.adagrad_update, (0, 1, 1e-2, 1e-8, 0.1), 3),
    ]
    cpu_adam.create_adam(4321, 1e-2, 0.9, 0.99, 1e-8, 0.1, True, False)
    for step, arguments, lists in steps:
        for tensors in (_tensors(lists, 9), [each[::2] for each in _tensors(lists, 9)]):  # the second: the op
            versions = [tensor._version for tensor in tensors]
            assert step(*arguments, *tensors) == 0
            written = [tensor._version > version for tensor, version in zip(tensors, versions, strict=True)]
            assert written == [True, False, True, True][:lists]
    cpu_adam.destroy_adam(4321)


@CASES
def test_nothing_is_kept(case: Case) -> None:
    tensors = _tensors(case[2], 9)
    before = [sys.getrefcount(each) for each in (Tensor, *tensors, *case[3])]
    for wrong in ("no", 1, 1, 1):
        _update(case, tensors, numbers=(*case[3][:-1], wrong))
    assert [sys.getrefcount(each) for each in (Tensor, *tensors, *case[3])] == before


def test_fused_adam_calls_it_for_one_tensor_and_the_op_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    lists_of_op: list[int] = []
    monkeypatch.setattr(fused_adam, "adam_", lambda params, *rest, **options: lists_of_op.append(len(params)))
    lr, beta1, beta2, eps, decay, adamw, corrected = ADAM[3]
    noop = torch.zeros(1, dtype=torch.int32)
    ours, exact = _tensors(4, 9), _tensors(4, 9)
    param, grad, first, second = ours
    for count in (1, 2):
        lists = [[each] * count for each in (grad, param, first, second)]
        fused_adam.multi_tensor_adam(1, noop, lists, lr, beta1, beta2, eps, 3, int(adamw), int(corrected), decay)
    _by_op(ADAM, exact, 3)
    assert lists_of_op == [2]
    assert all(map(torch.equal, ours, exact))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_fused_adam_takes_the_step_of_torchs_states(count: int, dtype: torch.dtype) -> None:
    """DeepSpeed's front end hands on what it has loaded, and torch's optimizers keep the step in a tensor."""
    lr, beta1, beta2, eps, decay, adamw, corrected = ADAM[3]
    noop = torch.zeros(1, dtype=torch.int32)
    stepped = []
    for step in (3, torch.tensor(3, dtype=dtype)):
        tensors = [_tensors(4, 9) for _ in range(count)]
        params, grads, firsts, seconds = map(list, zip(*tensors, strict=True))
        lists = [grads, params, firsts, seconds]
        fused_adam.multi_tensor_adam(1, noop, lists, lr, beta1, beta2, eps, step, int(adamw), int(corrected), decay)  # type: ignore[arg-type]  # what is under test
        stepped.append(params)
    assert all(map(torch.equal, *stepped))


def _lists(
    case: Case, sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3
) -> list[list[Tensor]]:
    """The lists of an op, of tensors of these sizes."""
    tensors = [_tensors(case[2], size, dtypes=dtypes) for size in sizes]
    return [[each[index] for each in tensors] for index in range(case[2])]


def _call(case: Case, lists: list[list[Tensor]], step: int = 3) -> None:
    """The public function of the op."""
    _, op, _, numbers = case
    if op == "adam_":
        lr, beta1, beta2, eps, decay, *_ = numbers
        adam.adam_(*lists, step, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)
    elif op == "lion_":
        lr, beta1, beta2, decay = numbers
        lion.lion_(*lists, lr=lr, betas=(beta1, beta2), weight_decay=decay)
    else:
        lr, eps, decay = numbers
        adagrad.adagrad_(*lists, lr=lr, eps=eps, weight_decay=decay)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of ops that are called by the dispatcher."""
    seen: list[str] = []
    original = _library.call

    def call(name: str, *args: object) -> object:
        seen.append(name)
        return original(name, *args)

    monkeypatch.setattr(_library, "call", call)
    return seen


@CASES
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_lists_are_updated_as_by_the_op(case: Case, dtypes: tuple[torch.dtype, ...], ops: list[str]) -> None:
    sizes = (2, 300_000, 7, 35, 1000) + (16,) * 200
    ours, exact = _lists(case, sizes, dtypes), _lists(case, sizes, dtypes)
    ours[0] = [torch.nn.Parameter(each) for each in ours[0]]
    versions = [each[0]._version for each in ours]
    for step in (1, 2, 1000):
        _call(case, ours, step)
        assert not ops
        numbers = (*(([step],) if case[1] == "adam_" else ()), *case[3])
        getattr(torch.ops.ds_plugin, case[1]).default(*exact, *numbers)
    for one, other in zip(ours, exact, strict=True):
        assert all(map(torch.equal, one, other))
    written = [each[0]._version > version for each, version in zip(ours, versions, strict=True)]
    assert written == [True, False, True, True][: case[2]]


@CASES
def test_lists_of_which_one_tensor_is_not_plain_are_for_the_op(case: Case, ops: list[str]) -> None:
    """It updates them, or says what is wrong, and nothing was modified."""
    last = case[2] - 1

    def put(which: int, tensor: Callable[[Tensor], Tensor]) -> list[list[Tensor]]:
        lists = _lists(case, (48, 48, 48))
        lists[which][1] = tensor(lists[which][1])
        return lists

    for lists in (
        _lists(case, (48, 1, 48)),
        [[torch.ones(8, 12)[:, ::2]] for _ in range(case[2])],
        put(1, lambda each: each.as_subclass(Named)),
        _lists(case, ()),
        put(0, lambda each: each.double()) and [[each.double() for each in one] for one in _lists(case, (48, 48))],
    ):
        _call(case, lists)
        assert ops.pop() == case[1] and not ops
    shared = _lists(case, (48, 48, 48))
    shared[last][2] = shared[0][0].view(48)
    for wrong in (
        shared,
        put(1, lambda each: each.view(6, 8)),
        put(last, lambda each: each.bfloat16()),
        put(1, lambda each: each.to("meta")),
        [*_lists(case, (48, 48))[:-1], _lists(case, (48,))[-1]],
    ):
        before = [[each.clone() for each in one] for one in wrong]
        with pytest.raises(InvalidTensorError):
            _call(case, wrong)
        assert ops.pop() == case[1] and not ops
        for one, old in zip(wrong, before, strict=True):
            assert all(each.is_meta or torch.equal(each, its) for each, its in zip(one, old, strict=True))


def test_a_step_for_each_tensor_is_for_the_op(ops: list[str]) -> None:
    for steps, expected in (([3, 3], []), ([3], []), (3, []), ([3, 4], ["adam_"])):
        ours, exact = _lists(ADAM, (48, 48)), _lists(ADAM, (48, 48))
        adam.adam_(*ours, steps, lr=0.1)
        assert ops == expected
        torch.ops.ds_plugin.adam_.default(
            *exact, [steps] if isinstance(steps, int) else steps, 0.1, 0.9, 0.999, 1e-8, 0.0, True, True
        )
        assert all(map(torch.equal, ours[0], exact[0]))
    for wrong in (0, [3, 3, 3], []):
        with pytest.raises(InvalidTensorError, match="steps"):
            adam.adam_(*_lists(ADAM, (48, 48)), wrong, lr=0.1)


@CASES
def test_profilers_and_modes_see_the_op_of_lists(case: Case) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _call(case, _lists(case, (48, 48)))
    assert f"ds_plugin::{case[1]}" in {event.key for event in profile.key_averages()}
    with CountedCalls() as counted:
        _call(case, _lists(case, (48, 48)))
    assert counted.calls[case[1]] == 1


class Named(Tensor):
    """Another class of tensors."""


def _overlapping(tensors: list[Tensor]) -> None:
    tensors[2] = tensors[0].view(-1).view(tensors[0].shape)


LEFT: dict[str, Callable[[list[Tensor]], None]] = {
    "another class": lambda t: t.__setitem__(1, t[1].as_subclass(Named)),
    "not contiguous": lambda t: t.__setitem__(0, torch.ones(8, 12)[:, ::2]),
    "another shape": lambda t: t.__setitem__(1, t[1].view(6, 8)),
    "sparse": lambda t: t.__setitem__(1, t[1].to_sparse()),
    "float64": lambda t: t.__setitem__(0, t[0].double()),
    "states of another dtype": lambda t: t.__setitem__(-1, t[-1].bfloat16()),
    "on the meta device": lambda t: t.__setitem__(1, t[1].to("meta")),
    "memory of another": _overlapping,
    "no elements": lambda t: t.__setitem__(slice(None), [each[:0] for each in t]),
    "one element of a complex number": lambda t: t.__setitem__(slice(None), [each[:1, :1] for each in t]),
}


@CASES
@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_plain_is_for_the_op(case: Case, name: str) -> None:
    tensors = _tensors(case[2], 8, 6)
    LEFT[name](tensors)
    before = [tensor.clone() for tensor in tensors]
    assert not _update(case, tensors)
    for tensor, old in zip(tensors, before, strict=True):
        assert tensor.is_meta or torch.equal(tensor.to_dense(), old.to_dense())


@CASES
def test_a_mode_sees_the_op(case: Case) -> None:
    with CountedCalls():
        assert not _update(case, _tensors(case[2], 9))


def test_steps_are_counted_from_1() -> None:
    assert not _update(ADAM, _tensors(4, 9), step=0)


def test_a_kernel_that_was_loaded_later_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a plugin has kernels of its own for the host."""
    monkeypatch.setattr(adam.c_function, "_function", adam.c_function._function)
    others = ["/another/library.so", "/a/third.so"]
    try:
        torch.ops.loaded_libraries.add(others[0])
        assert _update(ADAM, _tensors(4, 9))  # it has other ops
        torch.ops.loaded_libraries.add(others[1])
        monkeypatch.setattr(CPUKernels, "hold", lambda self: False)
        assert not _update(ADAM, _tensors(4, 9))
    finally:
        torch.ops.loaded_libraries.difference_update(others)


@CASES
def test_a_kernel_that_python_registered_later_serves(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    c_function, op, lists, _ = case
    monkeypatch.setattr(c_function, "_function", c_function._function)
    with torch.library._scoped_library("ds_plugin", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a kernel in place of another
            library.impl(op, lambda *arguments: None, "CPU", allow_override=True)
        assert not _update(case, _tensors(lists, 9))
        _load()
        assert not _update(case, _tensors(lists, 9))


DAEMON = """
import threading, time
import torch
from ds_plugin_sdk.integrations.deepspeed.modules import cpu_adam
from ds_plugin_sdk.op_builder.cpu import kernels
from ds_plugin_sdk.ops import adam

kernels.BUILDERS["CPUAdamBuilder"]().load(verbose=False)
kernels.BUILDERS["CPUAdamBuilder"]()._library_of_process()
assert adam.c_function.usable() is not None
cpu_adam.create_adam(0, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
tensors = [torch.rand(10_000_000) for _ in range(4)]

def step():
    while True:
        cpu_adam.adam_update(0, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, *tensors)

threading.Thread(target=step, daemon=True).start()
time.sleep(0.3)
"""


def test_a_daemon_thread_in_a_step_lets_the_process_end() -> None:
    """Python ends such a thread when it asks for the interpreter again: no destructor may stop that."""
    done = subprocess.run([sys.executable, "-c", DAEMON], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
