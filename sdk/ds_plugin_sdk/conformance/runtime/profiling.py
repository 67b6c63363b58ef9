"""R9: ranges for profilers, and graphs."""

from __future__ import annotations

from typing import Any

import torch

from ds_plugin_sdk.conformance.check import Clause, ExcusedError, check, expect_equal
from ds_plugin_sdk.conformance.runtime.support import MIB, expect_type
from ds_plugin_sdk.conformance.target import Target


@check(
    "runtime.profiling.ranges",
    Clause(
        "R9.1",
        "`range_push(message)` and `range_pop()` nest; where the attribute `supports_nvtx_domain` is True they take "
        "`domain=`, and the former `category=`.",
        reason="DeepSpeed puts them around every function that it instruments.",
    ),
)
def ranges(target: Target) -> None:
    domains = getattr(target.accelerator, "supports_nvtx_domain", False)
    expect_type(domains, bool, "supports_nvtx_domain")
    for message in ("outer", "inner", "", "step: 1"):
        target.accelerator.range_push(message)
    for _ in range(4):
        target.accelerator.range_pop()
    if domains:
        target.accelerator.range_push("outer", domain="deepspeed", category="step")
        target.accelerator.range_pop(domain="deepspeed")


def _graphs(target: Target) -> bool:
    return target.accelerator.create_graph() is not None


@check(
    "runtime.profiling.no_graphs",
    Clause(
        "R9.2",
        "Where `create_graph()` is None, `capture_to_graph(None)` is a context in which work is done as ever, and "
        "`replay_graph(None)` returns.",
        reason="Inference wrappers go through them without asking.",
    ),
    needs=lambda target: "the accelerator declares graphs" if _graphs(target) else None,
)
def no_graphs(target: Target) -> None:
    with target.accelerator.capture_to_graph(None):
        made = torch.ones(4, device=target.device) * 2
    expect_equal(made.cpu().tolist(), [2.0] * 4, "values computed inside capture_to_graph(None)")
    target.accelerator.replay_graph(None)
    expect_equal(made.cpu().tolist(), [2.0] * 4, "values after replay_graph(None)")


@check(
    "runtime.profiling.graphs",
    Clause(
        "R9.3",
        "Work submitted inside `capture_to_graph(graph)` is done again, on the same memory, by each "
        "`replay_graph(graph)`. Memory that was allocated inside is the graph's alone, or, where graphs have a "
        "`pool()`, also that graph's whose pool is handed over as `pool=`.",
        reason="Decoding with CUDA-graph style capture: the inputs are written in place, then replayed; the hybrid "
        "engine keeps outputs, and captures further graphs in the pool of the first.",
    ),
    needs=lambda target: None if _graphs(target) else "the accelerator declares no graphs (create_graph() is None)",
    cases=lambda target: [{}, {"memory": "own memory"}, {"memory": "a pool"}],
)
def graphs(target: Target, memory: str = "") -> None:
    if memory:
        _expect_memory_kept(target, pooled=memory == "a pool")
        return
    accelerator = target.accelerator
    source, result = (torch.zeros(4, device=target.device) for _ in range(2))
    result.copy_(source * 2)  # what runs for the first time may allocate, which a capture forbids
    accelerator.synchronize()
    graph = accelerator.create_graph()
    with accelerator.capture_to_graph(graph):
        capturing = getattr(accelerator, "is_current_stream_capturing", lambda: True)()
        result.copy_(source * 2)
    expect_equal(bool(capturing), True, "is_current_stream_capturing() inside capture_to_graph()")
    for value in (3.0, 4.0):
        source.fill_(value)
        accelerator.replay_graph(graph)
        accelerator.synchronize()
        expect_equal(result.cpu().tolist(), [2 * value] * 4, f"values that a replay computed from {value}")


def _expect_memory_kept(target: Target, *, pooled: bool) -> None:
    """Replays write what they have made, which is still there, and nothing that was allocated after the capture."""
    accelerator, elements = target.accelerator, 4 * MIB  # each an allocation of the driver's of its own
    source = torch.zeros(elements, device=target.device)
    _doubled_and_one(source)  # what runs for the first time may allocate, which a capture forbids
    accelerator.synchronize()
    captured: list[tuple[Any, torch.Tensor]] = []
    for _ in range(2 if pooled else 1):
        graph = accelerator.create_graph()
        if pooled and not hasattr(graph, "pool"):
            raise ExcusedError("skipped", "the accelerator's graphs have no pool()")
        with accelerator.capture_to_graph(graph, **({"pool": captured[0][0].pool()} if captured else {})):
            output = _doubled_and_one(source)
        captured.append((graph, output))
    accelerator.empty_cache()
    others = [torch.full((elements,), -1.0, device=target.device) for _ in range(4)]
    for value in (3.0, 4.0):
        source.fill_(value)
        for graph, output in captured:  # in the order of their captures, as graphs of one pool must be
            accelerator.replay_graph(graph)
            accelerator.synchronize()
            expect_equal(_seen(output), {2 * value + 1}, f"an output, made inside a capture, replayed from {value}")
    expect_equal([_seen(other) for other in others], [{-1.0}] * 4, "what was allocated between capture and replay")


def _doubled_and_one(source: torch.Tensor) -> torch.Tensor:
    """Twice the numbers and one, by way of memory that is free again when it returns."""
    doubled = source * 2
    return doubled + 1


def _seen(values: torch.Tensor) -> set[float]:
    """The smallest and the largest number."""
    return {float(each) for each in values.cpu().aminmax()}


@check(
    "runtime.profiling.capturing",
    Clause(
        "R9.4",
        "`is_current_stream_capturing()` is False outside a capture.",
        reason="Caches check their bounds on the host only where nothing is captured.",
    ),
    needs=lambda target: (
        None
        if hasattr(target.accelerator, "is_current_stream_capturing")
        else "the accelerator has no is_current_stream_capturing() of its own"
    ),
)
def capturing(target: Target) -> None:
    given = target.accelerator.is_current_stream_capturing()
    expect_type(given, bool, "is_current_stream_capturing()")
    expect_equal(given, False, "is_current_stream_capturing() outside a capture")
