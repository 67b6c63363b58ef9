"""R6: the data types one can train in, and the tensor factories."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ds_plugin_sdk.conformance.check import Clause, check, expect, expect_equal
from ds_plugin_sdk.conformance.runtime.support import each_current, expect_type, made_current
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.losses import largest_difference

_TRAINABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_FACTORIES = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}

_STEPS = 6


@check(
    "runtime.dtypes.supported",
    Clause(
        "R6.1",
        "`supported_dtypes()` is a new list of floating-point torch dtypes, each once, with float32 among them.",
        reason="The engine buckets gradients by it and rejects all others; `init_inference` checks the model's dtype.",
    ),
)
def supported(target: Target) -> None:
    given = target.accelerator.supported_dtypes()
    expect_type(given, list, "supported_dtypes()")
    strange = [dtype for dtype in given if dtype not in _TRAINABLE]
    expect(
        not strange, f"supported_dtypes() has {strange}", why="expected floating-point dtypes that can be trained in"
    )
    expect_equal(len(set(given)), len(given), "distinct entries of supported_dtypes()")
    expect(torch.float32 in given, f"supported_dtypes() is {given}", why="float32 is missing")
    before = list(given)
    given.clear()  # a caller may do with it as it likes
    expect_equal(target.accelerator.supported_dtypes(), before, "supported_dtypes() after the list before was emptied")


@check(
    "runtime.dtypes.declared",
    Clause(
        "R6.2",
        "`is_bf16_supported()` and `is_fp16_supported()` are bools and say what `supported_dtypes()` says.",
        reason="The engine rejects a config by the former and buckets gradients by the latter.",
    ),
    cases=lambda target: ({"dtype": dtype} for dtype in ("bfloat16", "float16")),
)
def declared(target: Target, dtype: str) -> None:
    member = {"bfloat16": "is_bf16_supported", "float16": "is_fp16_supported"}[dtype]
    given = getattr(target.accelerator, member)()
    expect_type(given, bool, f"{member}()")
    listed = getattr(torch, dtype) in target.accelerator.supported_dtypes()
    expect_equal(given, listed, f"{member}(), where supported_dtypes() is {target.accelerator.supported_dtypes()},")


def _train(device: torch.device, dtype: torch.dtype) -> list[float]:
    """Losses of a small model on the device in a dtype; the optimizer's states are float32, as DeepSpeed has them."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 6)
    x, y = torch.randn(24, 16, generator=generator), torch.randint(4, (24,), generator=generator)
    model.to(device=device, dtype=dtype)
    masters = [parameter.detach().float().clone() for parameter in model.parameters()]
    losses = []
    for _ in range(_STEPS):
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device, dtype)).float(), y.to(device))
        torch.autograd.backward(loss)
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                assert parameter.grad is not None
                master.add_(parameter.grad.float(), alpha=-0.1)
                parameter.copy_(master)
        losses.append(loss.item())
    return losses


# Of a loss of about 1 that falls to a half in six steps: rounding of weights and activations, seen at most 4e-3 in
# bfloat16 and 6e-4 in float16 on the CPU.
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float64: 2e-5}


@check(
    "runtime.dtypes.trains",
    Clause(
        "R6.3",
        "One can train in every dtype that `supported_dtypes()` declares: a small model's losses follow those of the "
        "CPU in float32.",
        reason="DeepSpeed trusts the declaration.",
    ),
    cases=lambda target: ({"dtype": str(dtype).removeprefix("torch.")} for dtype in target.dtypes),
)
def trains(target: Target, dtype: str) -> None:
    given = getattr(torch, dtype)
    expected, losses = _train(torch.device("cpu"), torch.float32), _train(target.device, given)
    worst = largest_difference(losses, expected)
    expect(
        worst <= _TOLERANCE[given],
        f"losses in {dtype} on {target.device} are {[round(loss, 5) for loss in losses]}",
        why=f"the CPU's in float32 are {[round(loss, 5) for loss in expected]}; allowed is {_TOLERANCE[given]:g}",
    )


@check(
    "runtime.dtypes.fp64",
    Clause(
        "R6.4",
        "`is_fp64_supported()` is a bool; where it is True the device computes in float64.",
        reason="ZeRO accumulates gradient norms in float64 where it may. A device that emulates it may say False.",
    ),
)
def fp64(target: Target) -> None:
    given = target.accelerator.is_fp64_supported()
    expect_type(given, bool, "is_fp64_supported()")
    if not given:
        return
    values = torch.tensor([1.0, 2.0**-40], dtype=torch.float64).to(target.device)
    expect_equal(values.sum().item(), 1.0 + 2.0**-40, "1 + 2**-40 in float64 on the device")


@check(
    "runtime.dtypes.factories",
    Clause(
        "R6.5",
        "`FloatTensor(list)` and its siblings make a tensor of their dtype on the current device, of bools too.",
        reason="Gradient norms and overflow flags are made this way and go straight into collectives.",
    ),
    cases=lambda target: ({"factory": factory, **each} for factory in _FACTORIES for each in each_current(target)),
)
def factories(target: Target, factory: str, current: str = "") -> None:
    dtype = _FACTORIES[factory]
    if dtype == torch.float64 and not target.accelerator.is_fp64_supported():
        return
    numbers = [1, 0.5, float("inf")] if dtype.is_floating_point else [1, 2, 3]
    for given in (numbers, [True]):  # overflow flags are bools
        with made_current(target, current):
            made = getattr(target.accelerator, factory)(given)
            place = torch.empty(0, device=target.device_type).device
        call = f"{factory}({given})"
        expect(isinstance(made, torch.Tensor), f"{call} is a {type(made).__name__}", why="expected a tensor")
        expect_equal(made.dtype, dtype, f"dtype of {call}")
        expect_equal(made.device, place, f"device of {call}")
        expect_equal(made.cpu().tolist(), given, f"values of {call}")


@check(
    "runtime.dtypes.loss_scaling",
    Clause(
        "R6.6",
        "Where float16 is declared, overflow is seen: an infinite gradient makes `isfinite` and the norm say so.",
        reason="DeepSpeed's dynamic loss scaling skips a step and halves the scale by it.",
    ),
    needs=lambda target: None if torch.float16 in target.dtypes else "the accelerator does not declare float16",
)
def loss_scaling(target: Target) -> None:
    weight = torch.full((8,), 3e4, dtype=torch.float16, device=target.device, requires_grad=True)
    torch.autograd.backward((weight * 4).sum())
    assert weight.grad is not None
    overflowing = (weight.grad * 3e4).cpu()
    expect(not bool(torch.isfinite(overflowing).any()), f"4 * 30000 in float16 is {overflowing.tolist()}")
    norm = (weight.grad * 3e4).float().norm().item()
    expect_equal(norm, float("inf"), "norm of overflown float16 gradients, accumulated in float32")


@check(
    "runtime.dtypes.not_finite",
    Clause(
        "R6.8",
        "One NaN or infinity among thousands of numbers is seen on the device, wherever it lies: by `isnan`, `isinf`, "
        "`isfinite`, `amax`, `amin` and the norm.",
        reason="DeepSpeed finds an overflow by the largest and the smallest gradient, which must be NaN if one is.",
    ),
    cases=lambda target: (
        {"dtype": str(dtype).removeprefix("torch."), "value": value}
        for dtype in target.dtypes
        for value in ("nan", "inf", "-inf")
    ),
)
def not_finite(target: Target, dtype: str, value: str) -> None:
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "isnan().any()": lambda tensor: tensor.isnan().any(),
        "isinf().any()": lambda tensor: tensor.isinf().any(),
        "isfinite().all()": lambda tensor: tensor.isfinite().all(),
        "amax()": lambda tensor: tensor.amax(),
        "amin()": lambda tensor: tensor.amin(),
        "norm()": torch.linalg.vector_norm,
    }
    count = 5001
    for position in (0, count // 2, count - 1):
        host = torch.linspace(-1, 1, count).to(getattr(torch, dtype))
        host[position] = float(value)
        there = host.to(target.device)
        for name, function in functions.items():
            seen, right = repr(function(there).item()), repr(function(host).item())
            expect_equal(seen, right, f"{name} of {count} numbers of {dtype}, {value} at {position},")


@check(
    "runtime.dtypes.accumulation",
    Clause(
        "R6.7",
        "A sum and a matrix product in bfloat16 or float16 accumulate in float32.",
        reason="Over thousands of terms an accumulation in 8 bits stops growing, and training with it.",
    ),
    cases=lambda target: (
        {"dtype": str(dtype).removeprefix("torch.")} for dtype in target.dtypes if dtype.itemsize == 2
    ),
)
def accumulation(target: Target, dtype: str) -> None:
    count = 4096
    ones = torch.ones(count, dtype=getattr(torch, dtype), device=target.device)
    expect_equal(ones.sum().item(), count, f"the sum of {count} ones in {dtype}")
    product = (ones.view(1, count) @ ones.view(count, 1)).item()
    expect_equal(product, count, f"a matrix product over {count} ones in {dtype}")
