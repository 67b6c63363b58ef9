"""LAMB beyond what the suite checks of every op: norms of long tensors, threads, copies, errors."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.ops.lamb import lamb_


@pytest.fixture(scope="module", autouse=True)
def lamb_kernels(native: Callable[..., None]) -> None:
    """The native kernels, and nothing else."""
    native("lamb")


Lists = list[list[Tensor]]


def lists(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 0) -> Lists:
    """Params, grads and moments."""
    generator = torch.Generator().manual_seed(seed)
    made = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(4)]
    made[3] = [tensor.square() for tensor in made[3]]
    return [[tensor.to(dtype) for tensor in tensors] for tensors in made]


def run(implementation: str, tensors: Lists, copies: list[Tensor] | None = None, lr: float = 1e-2) -> Tensor:
    if implementation == "kernel":
        return lamb_(*tensors, 3, lr=lr, weight_decay=0.1, copies=copies or [])
    numbers = (lr, 0.9, 0.999, 1e-8, 0.1, 0.01, 10.0, 1.0, False, True, False)
    ratios: Tensor = torch.ops.ds_plugin_reference.lamb_(*tensors, copies or [], [3], *numbers)
    return ratios


def clones(tensors: Lists) -> Lists:
    return [[tensor.clone() for tensor in each] for each in tensors]


@pytest.mark.parametrize("value", [1e-25, 1e25])
def test_norms_neither_overflow_nor_vanish(value: float) -> None:
    """The squares of these do not fit into float32; weights of one size and no gradient make the ratio 1 / decay."""
    p, zeros = torch.full((5000,), value), [torch.zeros(5000) for _ in range(3)]
    ratios = lamb_([p], *([zero] for zero in zeros), 1, lr=1e-2, weight_decay=0.5)
    assert ratios.tolist() == [2.0]
    step_size = 1e-2 * math.sqrt(1 - 0.999) / (1 - 0.9)
    torch.testing.assert_close(p, torch.full((5000,), value * (1 - step_size)), rtol=1e-6, atol=0)


def test_norms_of_long_tensors_are_exact(implementation: str) -> None:
    """Among 2**25 elements of 1 the last ones would be lost on a running sum in float32, which stops at 2**24."""
    count = 1 << 25
    p, zeros = torch.ones(count), [torch.zeros(count) for _ in range(3)]
    p[count // 2 :] = 2.0
    numbers = (0.0, 0.9, 0.999, 1.0, 1.0, 0.0, math.inf, 1.0, False, False, False)
    g = torch.full((count,), 10.0)  # m = 1, v = 0.1, so u = 1 / (sqrt(0.1) + 1) + p
    op = (torch.ops.ds_plugin if implementation == "kernel" else torch.ops.ds_plugin_reference).lamb_
    (ratio,) = op([p], [g], [zeros[0]], [zeros[1]], [], [1], *numbers).tolist()
    update = 1 / (math.sqrt(0.1) + 1)
    exact = math.sqrt((1 + 4) / ((update + 1) ** 2 + (update + 2) ** 2))
    assert ratio == pytest.approx(exact, rel=2e-7 if implementation == "kernel" else 2e-6)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    shapes = [(300, 257), (5,), (40_000,), (70, 1024)]
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            tensors = lists(shapes)
            results.append([run("kernel", tensors), *tensors[0]])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_list_gives_what_its_tensors_give_alone(implementation: str) -> None:
    shapes = [(300,), (4, 5), (0,), (5000,), (2_100_000,), (17,)]
    together = lists(shapes)
    alone = clones(together)
    ratios = run(implementation, together)
    for i, ratio in enumerate(ratios):
        assert torch.equal(run(implementation, [[each[i]] for each in alone])[0], ratio)
    assert all(torch.equal(a, b) for a, b in zip(together[0], alone[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_copies_may_be_leaves_that_require_grad(dtype: torch.dtype, implementation: str) -> None:
    masters = lists([(33, 7), (65,)])
    model = [torch.nn.Parameter(p.to(dtype, copy=True)) for p in masters[0]]
    masters[1] = [g.to(dtype) for g in masters[1]]  # the model's gradients
    versions = [copy._version for copy in model]
    run(implementation, masters, copies=model)
    for master, copy, version in zip(masters[0], model, versions, strict=True):
        assert torch.equal(copy, master.to(dtype))
        assert copy.is_leaf and copy.requires_grad and copy.grad_fn is None
        assert copy._version > version


def test_a_copy_s_gradient_flows_after_the_step() -> None:
    masters = lists([(9,)])
    copy = torch.nn.Parameter(masters[0][0].bfloat16())
    run("kernel", masters, copies=[copy])
    (copy.float() * 3).sum().backward()
    assert copy.grad is not None and copy.grad.tolist() == [3.0] * 9


def test_autograd_notices_a_copy_that_changed_under_a_graph() -> None:
    masters = lists([(9,)])
    copy = torch.nn.Parameter(masters[0][0].clone())
    loss = (copy * copy).sum()
    lamb_(*masters, 1, lr=0.1, copies=[copy])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def rejected_cases() -> dict[str, tuple[Lists, list[Tensor], str]]:
    base = lists([(4, 3), (5,)])
    low = lists([(4, 3), (5,)], torch.bfloat16)
    return {
        "one copy for two": (base, [torch.zeros(4, 3)], r"copies has 1 tensors.*expected 2, as many as params"),
        "shape of a copy": (base, [torch.zeros(4, 3), torch.zeros(6)], r"copies\[1\] has shape \[6\].*expected \[5\]"),
        "a copy that is the parameter": (base, base[0], r"params\[\d\] and copies\[\d\] share memory|share memory"),
        "dtype of copies": (base, [torch.zeros(4, 3).int(), torch.zeros(5).int()], r"copies"),
        "gradients": ([low[0], [g.half() for g in low[1]], low[2], low[3]], [], r"grads are float16.*bfloat16"),
        "states": ([low[0], low[1], [m.half() for m in low[2]], low[3]], [], r"exp_avgs are float16.*bfloat16"),
        "second state": ([low[0], low[1], low[2], [v.float() for v in low[3]]], [], r"exp_avg_sqs are float32"),
    }


@pytest.mark.parametrize("case", rejected_cases())
def test_what_does_not_fit_is_rejected(case: str, implementation: str) -> None:
    tensors, copies, message = rejected_cases()[case]
    before = clones(tensors)
    with pytest.raises((InvalidTensorError, RuntimeError), match=message) as caught:
        run(implementation, tensors, copies)
    if implementation == "reference":
        assert isinstance(caught.value, InvalidTensorError)
    for left, right in zip(tensors, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_steps_count_from_one() -> None:
    with pytest.raises(InvalidTensorError, match="steps has an entry 0"):
        lamb_(*lists([(3,)]), 0, lr=0.1)
    with pytest.raises(InvalidTensorError, match="steps has 2 entries"):
        lamb_(*lists([(3,)]), [1, 2], lr=0.1)


def test_nothing_to_do() -> None:
    assert lamb_([], [], [], [], 1, lr=0.1).shape == (0,)


def test_compiled_function_updates_its_arguments() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(params: list[Tensor], grads: list[Tensor], m: list[Tensor], v: list[Tensor]) -> Tensor:
        return lamb_(params, grads, m, v, 3, lr=1e-2) * 2

    tensors, expected = lists([(7,), (3, 5)]), lists([(7,), (3, 5)])
    ratios = step(*tensors)
    assert torch.equal(ratios, lamb_(*expected, 3, lr=1e-2) * 2)
    assert all(torch.equal(a, b) for a, b in zip(tensors[0], expected[0], strict=True))


def test_float64_is_exact() -> None:
    tensors = lists([(50,)], torch.float64)
    p, g, m, v = (each[0].clone() for each in tensors)
    ratios = lamb_(*tensors, 2, lr=0.1, weight_decay=0.01)
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    u = m / (v.sqrt() + 1e-8) + 0.01 * p
    ratio = (p.norm() / u.norm()).clamp(0.01, 10)
    assert ratios.dtype == torch.float64
    expected = p - 0.1 * math.sqrt(1 - 0.999**2) / (1 - 0.9**2) * ratio * u
    torch.testing.assert_close(tensors[0][0], expected, rtol=1e-14, atol=1e-14)
