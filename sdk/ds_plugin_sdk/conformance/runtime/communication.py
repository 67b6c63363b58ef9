"""R8: the collective backend, the compile backend, Triton."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from ds_plugin_sdk.conformance.check import Clause, check, expect, expect_equal
from ds_plugin_sdk.conformance.runtime.support import expect_raises, expect_type
from ds_plugin_sdk.conformance.target import Target


@check(
    "runtime.communication.backend",
    Clause(
        "R8.1",
        "`communication_backend_name()` is the name of a backend that torch.distributed has.",
        reason="`deepspeed.initialize` hands it to `init_process_group`.",
    ),
)
def backend(target: Target) -> None:
    name = target.accelerator.communication_backend_name()
    expect_type(name, str, "communication_backend_name()")
    expect(
        torch.distributed.is_backend_available(name),
        f"torch.distributed has no backend '{name}'",
        why=f"it has {', '.join(torch.distributed.Backend.backend_list)}",
        hint="register it with torch.distributed.Backend.register_backend where the accelerator's module is imported",
    )


@check(
    "runtime.communication.collective",
    Clause(
        "R8.2",
        "A process group of that backend takes tensors of the device.",
        reason="Gradients lie there; DeepSpeed stages nothing on the host.",
    ),
    isolated=True,
)
def collective(target: Target) -> None:
    dist: Any = torch.distributed  # torch's stubs lack half of what is there
    name = target.accelerator.communication_backend_name()
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    try:
        values = torch.full((4,), 3.0, device=target.device)
        dist.all_reduce(values)
        target.accelerator.synchronize()
        expect_equal(values.cpu().tolist(), [3.0] * 4, "values after all_reduce of one rank")
    finally:
        dist.destroy_process_group()


@check(
    "runtime.communication.triton",
    Clause(
        "R8.3",
        "`is_triton_supported()` and `prefer_triton_grouped_mm()` are bools; where the former is True, Triton is "
        "installed and has a driver for this machine; the latter is True only where the former is.",
        reason="DeepSpeed takes Triton kernels by it: FP8 products, attention, cross entropy, experts.",
    ),
)
def triton(target: Target) -> None:
    given = target.accelerator.is_triton_supported()
    expect_type(given, bool, "is_triton_supported()")
    prefers = getattr(target.accelerator, "prefer_triton_grouped_mm", lambda: False)()
    expect_type(prefers, bool, "prefer_triton_grouped_mm()")
    expect(given or not prefers, "prefer_triton_grouped_mm() is True", why="is_triton_supported() is False")
    if given:
        installed = importlib.util.find_spec("triton") is not None
        expect(installed, "is_triton_supported() is True", why="the package triton is not installed")
        from torch.utils._triton import has_triton

        expect(has_triton(), "is_triton_supported() is True", why="Triton has no driver for this machine")


@check(
    "runtime.communication.compile_backend",
    Clause(
        "R8.4",
        "`get_compile_backend()` is the name of a torch.compile backend.",
        reason="The default argument of `engine.compile`, evaluated while DeepSpeed is imported.",
    ),
)
def compile_backend(target: Target) -> None:
    name = target.accelerator.get_compile_backend()
    expect_type(name, str, "get_compile_backend()")
    known = torch._dynamo.list_backends(exclude_tags=())
    expect(name in known, f"get_compile_backend() is {name!r}", why=f"torch.compile has {known}")


@check(
    "runtime.communication.compile",
    Clause(
        "R8.5",
        "torch.compile with that backend compiles a forward and a backward pass of the device, with the eager values, "
        "for batches of any size.",
        reason="`engine.compile()` does so without asking, and the last batch is smaller.",
    ),
    timeout=300.0,
)
def compile_runs(target: Target) -> None:
    layer = torch.nn.Linear(8, 4).to(target.device)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(layer(x)).square().sum()

    torch.compiler.reset()
    compiled = torch.compile(function, backend=target.accelerator.get_compile_backend())
    for rows in (3, 5, 7, 3):
        x = torch.randn(rows, 8).to(target.device)
        results = []
        for call in (function, compiled):
            layer.zero_grad()
            value = call(x)
            torch.autograd.backward(value)
            assert layer.weight.grad is not None
            results.append((value.detach().cpu(), layer.weight.grad.cpu()))
        for what, eager, made in zip(("value", "gradient"), *results, strict=True):
            worst = float((eager - made).abs().max())
            wrong = f"the {what} of a compiled layer is off by {worst:g} for {rows} rows"
            expect(worst <= 1e-5, wrong, why="expected the eager one")


@check(
    "runtime.communication.set_compile_backend",
    Clause(
        "R8.6",
        "After `set_compile_backend(name)`, `get_compile_backend()` gives it; a name that torch.compile does not have "
        "raises ValueError and changes nothing.",
        reason="Users choose their compiler this way.",
    ),
)
def set_compile_backend(target: Target) -> None:
    before = target.accelerator.get_compile_backend()
    try:
        target.accelerator.set_compile_backend("eager")
        expect_equal(target.accelerator.get_compile_backend(), "eager", "get_compile_backend() after 'eager' was set")
        call = "set_compile_backend('no such backend')"
        expect_raises(lambda: target.accelerator.set_compile_backend("no such backend"), ValueError, call)
        expect_equal(target.accelerator.get_compile_backend(), "eager", "get_compile_backend() after a rejected one")
    finally:
        target.accelerator.set_compile_backend(before)
