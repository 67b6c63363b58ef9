"""What DeepSpeed asks of an accelerator in a step: DeepSpeed's own for the device beside the plugin's."""

from __future__ import annotations

import importlib
import operator
import statistics
import timeit
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ds_plugin_sdk.bench.timing import Spread, in_turns, spread
from ds_plugin_sdk.errors import SdkError

# Members without arguments; those that a device lacks, or that fail without hardware, are left out.
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
_TURN = 1e-3  # seconds

Step = Callable[[Any], object]


@dataclass(frozen=True)
class Row:
    """One call.

    Attributes:
        call: the member, with what it is called with.
        deepspeed_us: median microseconds of DeepSpeed's own accelerator.
        plugin_us: the same of the plugin's.
        times: plugin_us / deepspeed_us.
        spread: of plugin_us.
    """

    call: str
    deepspeed_us: float
    plugin_us: float
    times: float
    spread: dict[str, Spread] = field(default_factory=dict)


def run(turns: int = 15) -> list[Row]:
    """Every call on both accelerators of the current device, in turns.

    Raises:
        SdkError: no plugin is used, or DeepSpeed has no accelerator for its device.
    """
    ours = importlib.import_module("deepspeed.accelerator").get_accelerator()
    device = ours.device_name()
    try:
        module = importlib.import_module(f"deepspeed.accelerator.{device}_accelerator")
        theirs = getattr(module, f"{device.upper()}_Accelerator")()
    except (ImportError, AttributeError) as error:
        raise SdkError(
            "this benchmark cannot run", plugin=device, why=f"DeepSpeed has no accelerator of its own: {error}"
        ) from error
    found = (_row(call, step, theirs, ours, turns) for call, step in _calls().items())
    return [row for row in found if row is not None]


def _calls() -> dict[str, Step]:
    tensor = torch.ones(4)
    return {
        **{f"{name}()": operator.methodcaller(name) for name in _MEMBERS},
        **{f"{name}(tensor)": operator.methodcaller(name, tensor) for name in _TENSOR},
        **{f"get_op_builder({name})": operator.methodcaller("get_op_builder", name) for name in _BUILDERS},
        "FloatTensor([1.0])": operator.methodcaller("FloatTensor", [1.0]),
    }


def _row(call: str, step: Step, theirs: Any, ours: Any, turns: int) -> Row | None:
    try:
        measures = {which: _measure(partial(step, which)) for which in (theirs, ours)}
    except (AttributeError, AssertionError, NotImplementedError, RuntimeError):
        return None
    times = {which: [1e6 * each for each in found] for which, found in in_turns(measures, turns).items()}
    own, plugin = (statistics.median(times[which]) for which in (theirs, ours))
    return Row(call, own, plugin, plugin / own, {"plugin_us": spread(times[ours])})


def _measure(step: Callable[[], object]) -> Callable[[], float]:
    """Seconds of a call, of as many as a turn takes."""
    step()
    number = max(1, int(_TURN / max(min(timeit.repeat(step, number=1, repeat=5)), 1e-7)))
    return lambda: timeit.timeit(step, number=number) / number
