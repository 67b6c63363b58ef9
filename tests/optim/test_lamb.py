"""FusedLamb: training, DeepSpeed's clipping, the paper's form, checkpoints."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.optim import FusedLamb
from ds_plugin_sdk.optim import lamb as lamb_module


@pytest.fixture(scope="module", autouse=True)
def lamb_kernels(native: Callable[..., None]) -> None:
    native("lamb")


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(17, 33), torch.nn.LayerNorm(33), torch.nn.Linear(33, 5))
    return layers.to(dtype)


def train(network: torch.nn.Module, optimizer: FusedLamb, steps: int, seed: int = 1) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(64, 17, generator=generator).to(next(network.parameters()).dtype)
    targets = inputs[:, :5].square()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (network(inputs) - targets).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def parameters(network: torch.nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in network.parameters()]


@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_loss_falls(dtype: torch.dtype, paper: bool) -> None:
    network = model(dtype)
    options = {"state_dtype": torch.float32} if dtype == torch.float16 else {}
    lr = 1e-2 if paper else 0.1  # DeepSpeed's correction makes early steps smaller
    losses = train(network, FusedLamb(network.parameters(), lr=lr, weight_decay=0.01, paper=paper, **options), 60)
    assert losses[-1] < 0.7 * losses[0]


def formula(params: list[Tensor], grads: list[list[Tensor]], scale: float) -> list[Tensor]:
    """DeepSpeed's LAMB on float64 tensors, some steps."""
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
    for t, step_grads in enumerate(grads, 1):
        for i, g in enumerate(step_grads):
            m = 0.9 * moments[i][0] + 0.1 * g / scale
            v = 0.999 * moments[i][1] + 0.001 * (g / scale) ** 2
            moments[i] = (m, v)
            u = m / (v.sqrt() + 1e-6) + 0.01 * params[i]
            ratio = (params[i].norm() / u.norm()).clamp(0.01, 10)
            params[i] = params[i] - 1e-2 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * ratio * u
    return params


def test_five_steps_follow_the_formula() -> None:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(40, 30)), torch.nn.Parameter(torch.randn(7))]
    start = [p.detach().double() for p in params]
    grads = [[torch.randn_like(p) for p in params] for _ in range(5)]
    optimizer = FusedLamb(params, lr=1e-2, eps=1e-6, weight_decay=0.01)
    for step_grads in grads:
        for p, g in zip(params, step_grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    expected = formula(start, [[g.double() for g in each] for each in grads], 1.0)
    for p, want in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach().double(), want, rtol=2e-6, atol=2e-6)
    coefficients = optimizer.get_lamb_coeffs()
    assert len(coefficients) == 2 and all(0.01 <= c <= 10 for c in coefficients)


def test_the_norm_of_all_gradients_is_clipped_as_deepspeed_does_it() -> None:
    scale, largest = 8.0, 0.5
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(40, 30)), torch.nn.Parameter(torch.randn(7))]
    start = [p.detach().double() for p in params]
    grads = [torch.randn_like(p) for p in params]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    clip = (norm / scale + 1e-6) / largest
    expected = formula(start, [[g.double() for g in grads]], scale * clip)
    for known in (None, norm, torch.tensor(norm)):
        twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
        for p, g in zip(twins, grads, strict=True):
            p.grad = g.clone()
        optimizer = FusedLamb(twins, lr=1e-2, eps=1e-6, weight_decay=0.01, max_grad_norm=largest)
        optimizer.step(scale=scale, grad_norm=known)
        for p, want in zip(twins, expected, strict=True):
            torch.testing.assert_close(p.detach().double(), want, rtol=2e-6, atol=2e-6)
    assert clip > 1


def test_small_gradients_are_not_scaled_up() -> None:
    clipped, free = (torch.nn.Parameter(torch.ones(10)) for _ in range(2))
    for param, largest in ((clipped, 100.0), (free, 0.0)):
        param.grad = torch.linspace(0, 1, 10)
        FusedLamb([param], lr=0.1, eps=0.1, max_grad_norm=largest).step()
    assert torch.equal(clipped, free)


def test_the_paper_s_ratio_has_no_limits() -> None:
    """With all gradients equal, u is 1 everywhere at the first step: the ratio is the weights' size."""
    param = torch.nn.Parameter(torch.full((100,), 50.0))
    param.grad = torch.full((100,), 3.0)
    optimizer = FusedLamb([param], lr=0.1, paper=True)
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == pytest.approx([50.0])
    torch.testing.assert_close(param.detach(), torch.full((100,), 45.0))


def test_training_continues_from_a_checkpoint() -> None:
    straight, resumed = model(), model()
    optimizer = FusedLamb(straight.parameters(), lr=1e-2)
    train(straight, optimizer, 5)
    file = io.BytesIO()
    torch.save({"model": straight.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(straight, optimizer, 5, seed=2)

    file.seek(0)
    saved = torch.load(file)
    resumed.load_state_dict(saved["model"])
    second = FusedLamb(resumed.parameters(), lr=1.0)
    second.load_state_dict(saved["optimizer"])
    train(resumed, second, 5, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(parameters(straight), parameters(resumed), strict=True))


def test_a_copied_optimizer_works() -> None:
    network = model()
    optimizer = FusedLamb(network.parameters(), lr=1e-2)
    train(network, optimizer, 1)
    twin = copy.deepcopy(optimizer)
    assert twin.get_lamb_coeffs() == []
    for param in twin.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    twin.step()
    assert len(twin.get_lamb_coeffs()) == len(list(network.parameters()))


def test_closure_and_parameters_without_gradients() -> None:
    used, unused = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    optimizer = FusedLamb([{"params": [unused]}, {"params": [used]}], lr=0.1)

    def closure() -> Tensor:
        loss = (used**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 4
    assert (used < 1).all() and (unused == 1).all()
    assert len(optimizer.get_lamb_coeffs()) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"eps": -1.0},
        {"betas": (1.0, 0.9)},
        {"min_coeff": -1.0},
        {"max_coeff": 0.001},
        {"max_grad_norm": -1},
    ],
    ids=str,
)
def test_options_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="FusedLamb: "):
        FusedLamb([torch.nn.Parameter(torch.ones(2))], **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_norm_beyond_float16_is_clipped_and_not_infinite(dtype: torch.dtype) -> None:
    """Gradients of norm 1 under a loss scale of 65536: the scaled norm is beyond float16."""
    scale, largest = 65536.0, 0.5
    torch.manual_seed(0)
    grad = torch.randn(1000)
    scaled = (grad / grad.norm() * scale).to(dtype)
    norm = scaled.double().norm().item()
    param, twin = (torch.nn.Parameter(torch.ones(1000, dtype=dtype)) for _ in range(2))
    for each, known in ((param, None), (twin, norm)):
        each.grad = scaled.clone()
        optimizer = FusedLamb([each], lr=1e-2, max_grad_norm=largest, state_dtype=torch.float32)
        optimizer.step(scale=scale, grad_norm=known)
        # m = 0.1 g / (scale clip), whose norm is a tenth of the largest.
        assert optimizer.state[each]["exp_avg"].norm().item() == pytest.approx(0.1 * largest, rel=1e-5)
    torch.testing.assert_close(param, twin)


def test_the_norm_is_that_of_groups_of_several_dtypes() -> None:
    params = [torch.nn.Parameter(torch.ones(10, dtype=dtype)) for dtype in (torch.float16, torch.float32)]
    for param in params:
        param.grad = torch.full_like(param, 3.0)
    optimizer = FusedLamb([{"params": [param]} for param in params], max_grad_norm=1.0, state_dtype=torch.float32)
    optimizer.step()
    norm = math.sqrt(20 * 9.0)
    for param in params:
        expected = torch.full((10,), 0.1 * 3.0 / norm)
        torch.testing.assert_close(optimizer.state[param]["exp_avg"], expected, rtol=1e-5, atol=0)


def test_clipping_leaves_a_bad_gradient_to_the_op() -> None:
    param = torch.nn.Parameter(torch.ones(4, 2))
    param.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(InvalidTensorError, match=r"grads\[0\] is not strided"):
        FusedLamb([param], max_grad_norm=1.0).step()


@pytest.mark.parametrize("known", [False, True], ids=["norm computed", "norm given as a tensor"])
def test_clipping_does_not_wait_for_the_device(known: bool) -> None:
    """A meta tensor has no value: whoever asks for one gets an error."""
    param = torch.nn.Parameter(torch.ones(4, 2, device="meta"))
    param.grad = torch.ones_like(param)
    optimizer = FusedLamb([param], max_grad_norm=1.0)
    optimizer.step(scale=8.0, grad_norm=torch.ones((), device="meta") if known else None)
    assert optimizer.state[param]["step"] == 1


@pytest.mark.parametrize("largest", [0.5, 1e3], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_without_waiting_the_result_is_the_same(
    dtype: torch.dtype, largest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for waits in (True, False):
        if not waits:
            monkeypatch.setattr(lamb_module, "_is_read_at_once", lambda _: False)
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((40, 30), (7,))]
        optimizer = FusedLamb(params, lr=1e-2, weight_decay=0.01, max_grad_norm=largest)
        for _ in range(3):
            for param in params:
                param.grad = torch.randn_like(param) * 8
            optimizer.step(scale=8.0)
        results.append([param.detach() for param in params])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1.6e-2 if dtype == torch.bfloat16 else 2e-3 if dtype == torch.float16 else 1e-5, atol=1e-5
        )


def test_flattened_parameters_of_fsdp_are_warned_of() -> None:
    """FullyShardedDataParallel marks them so; each rank's part would have a ratio of its own without a word."""
    for mark in ("_is_flat_param", "_fsdp_flattened"):
        param = torch.nn.Parameter(torch.ones(3))
        setattr(param, mark, True)
        with pytest.warns(UserWarning, match="a trust ratio for a part of it"):
            FusedLamb([param])
