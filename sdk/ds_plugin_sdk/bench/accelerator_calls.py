"""A rank of one side of `ds_plugin_sdk.bench.accelerator`: ``python -m ... TARGET FD``, TARGET is not read.

It says which accelerator DeepSpeed uses and what it can call; then each request ``{"call": ..., "number": ...}`` is
answered by ``{"seconds": ...}`` of one call, null where it fails.
"""

from __future__ import annotations

import importlib
import json
import operator
import sys
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ds_plugin_sdk.conformance.process import pipe_to_parent

# Members without arguments.
_MEMBERS = (
    "device_name",
    "device",
    "device_count",
    "current_device",
    "current_device_name",
    "is_available",
    "synchronize",
    "is_synchronized_device",
    "resolves_data_dependency",
    "handles_memory_backpressure",
    "use_host_timers",
    "current_stream",
    "default_stream",
    "communication_backend_name",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "memory_stats",
    "available_memory",
    "total_memory",
    "empty_cache",
    "is_bf16_supported",
    "is_fp16_supported",
    "supported_dtypes",
    "get_rng_state",
    "random",
    "initial_seed",
    "range_pop",
    "is_triton_supported",
    "get_compile_backend",
    "op_builder_dir",
)
_TENSOR = ("on_accelerator", "is_pinned", "pin_memory")
_BUILDERS = ("FusedAdamBuilder", "CPUAdamBuilder", "InferenceBuilder", "AsyncIOBuilder")
_OPTIMIZERS = (
    ("deepspeed.ops.adam", "FusedAdam"),
    ("deepspeed.ops.adam", "DeepSpeedCPUAdam"),
    ("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad"),
    ("deepspeed.ops.lion", "DeepSpeedCPULion"),
    ("deepspeed.ops.lamb", "FusedLamb"),
)
_SIZES = (1_000, 4_000_000)  # elements
_MESSAGES = (1_024, 1 << 20)
_COLLECTIVES = ("all_reduce", "inference_all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")

Step = Callable[[], object]


def calls(accelerator: Any) -> Iterator[tuple[str, Callable[[], Step]]]:
    """What is called, each with what prepares it: that may fail where an op is not offered."""
    tensor = torch.ones(4)
    yield "get_accelerator()", lambda: importlib.import_module("deepspeed.accelerator").get_accelerator
    for name in _MEMBERS:
        yield f"{name}()", partial(partial, operator.methodcaller(name), accelerator)
    for name in _TENSOR:
        yield f"{name}(tensor)", partial(partial, operator.methodcaller(name, tensor), accelerator)
    for name in _BUILDERS:
        yield f"get_op_builder({name})", partial(partial, operator.methodcaller("get_op_builder", name), accelerator)
        yield f"{name}().load()", partial(_load, accelerator, name)
    yield "FloatTensor([1.0])", partial(partial, operator.methodcaller("FloatTensor", [1.0]), accelerator)
    for module, name in _OPTIMIZERS:
        for size in _SIZES:
            yield f"{name}.step(), {size} elements", partial(_optimizer, module, name, size, accelerator)
    for size in _MESSAGES:
        for name in _COLLECTIVES:
            yield f"{name}, {size} elements", partial(_collective, name, size, accelerator)
    yield "barrier()", lambda: importlib.import_module("deepspeed.comm").barrier


def _load(accelerator: Any, builder: str) -> Step:
    made = accelerator.create_op_builder(builder)
    made.load(verbose=False)  # compiled, if it must be
    return lambda: accelerator.create_op_builder(builder).load(verbose=False)


def _optimizer(module: str, name: str, size: int, accelerator: Any) -> Step:
    host = name.startswith("DeepSpeedCPU")
    parameter = torch.nn.Parameter(torch.ones(size, device="cpu" if host else accelerator.current_device_name()))
    parameter.grad = torch.full_like(parameter, 1e-3)
    step: Step = getattr(importlib.import_module(module), name)([parameter], lr=1e-6).step
    return step


def _collective(name: str, size: int, accelerator: Any) -> Step:
    comm = importlib.import_module("deepspeed.comm")
    if not comm.is_initialized():
        comm.init_distributed(accelerator.communication_backend_name(), verbose=False)
    whole = torch.zeros(size, device=accelerator.current_device_name())
    part = torch.zeros(size // comm.get_world_size(), device=accelerator.current_device_name())
    arguments: dict[str, tuple[Any, ...]] = {
        "broadcast": (whole, 0),
        "all_gather_into_tensor": (whole, part),
        "reduce_scatter_tensor": (part, whole),
    }
    return partial(getattr(comm, name), *arguments.get(name, (whole,)))


def _seconds(step: Step, number: int, accelerator: Any) -> float:
    def wait() -> None:
        if not accelerator.is_synchronized_device():
            accelerator.synchronize()

    wait()
    start = timeit.default_timer()
    for _ in range(number):
        step()
    wait()
    return (timeit.default_timer() - start) / number


def main() -> None:
    connection = pipe_to_parent()
    importlib.import_module("deepspeed")
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    makers, steps = dict(calls(accelerator)), {}
    kind = type(accelerator)
    connection.send_bytes(
        json.dumps({"accelerator": f"{kind.__module__}.{kind.__qualname__}", "calls": list(makers)}).encode()
    )
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        name = request["call"]
        try:
            if name not in steps:
                steps[name] = makers[name]()
            seconds = _seconds(steps[name], request["number"], accelerator)
        except Exception as error:
            sys.stderr.write(f"{name}: {error}\n")
            seconds = None
        connection.send_bytes(json.dumps({"seconds": seconds}).encode())


if __name__ == "__main__":
    main()
