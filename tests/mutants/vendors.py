"""Defects as vendors make them, written from the contract and without a look at the checks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.target import Target
from mutants.distributed import _function
from mutants.front_ends import module
from mutants.kernels import Kernel, kernel
from mutants.mutant import SIMULATED, mutant
from mutants.runtime.support import DEVICE, below, member, original
from mutants.runtime.support import original as accelerator_of

# torch's stubs lack half of what is there.
dist: Any = torch.distributed


# ---- kernels: where and when they run --------------------------------------------------------------------------------
def _default_stream() -> Any:
    return torch.get_device_module(DEVICE).default_stream()


@mutant("launch.default_stream", "O8.1", "ops", target=SIMULATED, only="rms_norm")
def default_stream(target: Target) -> Target:
    """The kernel runs on the device's default stream, whichever is current."""

    def function(original: Kernel, *arguments: Any) -> Any:
        with _default_stream():
            return original(*arguments)

    return kernel(target, "rms_norm", function)


@mutant("launch.device_zero", "O8.3", "ops", target=SIMULATED, only="layer_norm")
def device_zero(target: Target) -> Target:
    """The result is allocated on the current device, not on that of the arguments."""

    def function(original: Kernel, x: Tensor, *rest: Any) -> Tensor:
        result: Tensor = original(x, *rest)
        return result.to(torch.device(DEVICE, torch.accelerator.current_device_index()))

    return kernel(target, "layer_norm", function)


def flatten_in_order(_: Kernel, tensors: list[Tensor]) -> Tensor:
    """A kernel of `flatten` that is right: copies on the current stream, for which the host does not wait."""
    result = torch.empty(sum(t.numel() for t in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
    at = 0
    for tensor in tensors:
        result[at : at + tensor.numel()].copy_(tensor.reshape(-1))
        at += tensor.numel()
    return result


@mutant("launch.waits", "O8.2", "ops", target=SIMULATED, only="/flatten")
def launch_waits(target: Target) -> Target:
    """Each launch is followed by a wait for the device, left over from debugging."""

    def function(original: Kernel, tensors: list[Tensor]) -> Tensor:
        result = flatten_in_order(original, tensors)
        torch.accelerator.synchronize()
        return result

    return kernel(target, "flatten", function)


@mutant("launch.scratch_result", "O1.6", "ops", only="rms_norm")
def scratch_result(target: Target) -> Target:
    """The result is a workspace, which the next call writes anew."""
    workspaces: dict[Any, Tensor] = {}

    def function(original: Kernel, x: Tensor, *rest: Any) -> Tensor:
        result: Tensor = original(x, *rest)
        return workspaces.setdefault((x.shape, x.dtype), result).copy_(result)

    return kernel(target, "rms_norm", function)


@mutant("launch.shared_workspace", "O8.4", "ops", only="rms_norm")
def shared_workspace(target: Target) -> Target:
    """All threads compute in one workspace; each result is copied out of it."""
    workspaces: dict[Any, Tensor] = {}

    def function(original: Kernel, x: Tensor, *rest: Any) -> Tensor:
        result: Tensor = original(x, *rest)
        workspace = workspaces.setdefault((x.shape, x.dtype), torch.empty_like(result)).copy_(result)
        time.sleep(0.001)  # the rest of the kernel
        return workspace.clone()

    return kernel(target, "rms_norm", function)


# ---- kernels: sizes --------------------------------------------------------------------------------------------------
@mutant("sizes.rows_of_a_grid", "O1.7", "ops", only="rms_norm")
def rows_of_a_grid(target: Target) -> Target:
    """Rows from 65,535 on are beyond the grid's second dimension, and are not computed."""

    def function(original: Kernel, x: Tensor, *rest: Any) -> Tensor:
        result: Tensor = original(x, *rest)
        result.view(-1, x.shape[-1] if x.shape[-1] else 1)[65_535:] = 0
        return result

    return kernel(target, "rms_norm", function)


@mutant("sizes.keys_of_a_block", "O1.7", "ops", only="softmax")
def keys_of_a_block(target: Target) -> Target:
    """A block has 1,024 threads, one for each key; further keys are not seen."""

    def function(original: Kernel, scores: Tensor, *rest: Any) -> Tensor:
        if scores.shape[-1] > 1024:
            scores = scores.clone()
            scores[..., 1024:] = float("-inf")
        result: Tensor = original(scores, *rest)
        return result

    return kernel(target, "softmax", function)


@mutant("sizes.past_in_shared_memory", "O1.7", "ops", only="cached_attention")
def past_in_shared_memory(target: Target) -> Target:
    """Scores of 1,024 past positions fit into shared memory; what is older is forgotten."""

    def function(original: Kernel, *a: Any) -> Tensor:
        window = a[9] if a[9] else 1025
        result: Tensor = original(*a[:9], min(window, 1025), a[10]) if a[5] > 1024 else original(*a)
        return result

    return kernel(target, "cached_attention", function)


@mutant("sizes.tensors_of_a_launch", "O1.7", "ops", only="/adam_")
def tensors_of_a_launch(target: Target) -> Target:
    """A launch takes 110 tensors, and there is one launch."""
    return kernel(target, "adam_", lambda original, *a: original(*(each[:110] for each in a[:5]), *a[5:]))


# ---- kernels: what they touch ----------------------------------------------------------------------------------------
@mutant("stores.past_the_end", "O2.3", "ops", only="lion_")
def past_the_end(target: Target) -> Target:
    """The last vector is stored whole: the elements after a tensor's end are zeroed, where its storage has some."""

    def function(original: Kernel, params: list[Tensor], *rest: Any) -> None:
        original(params, *rest)
        for p in params:
            if not p.is_contiguous() or p.numel() % 8 == 0:
                continue
            room = p.untyped_storage().nbytes() // p.element_size() - p.storage_offset() - p.numel()
            after = min(-p.numel() % 8, room)
            p.as_strided((after,), (1,), p.storage_offset() + p.numel()).zero_()

    return kernel(target, "lion_", function)


@mutant("stores.gaps", "O2.3", "ops", only="adagrad_")
def gaps(target: Target) -> Target:
    """A tensor with gaps is written back gaps and all, as they were when it was made contiguous: zero."""

    def function(original: Kernel, params: list[Tensor], *rest: Any) -> None:
        original(params, *rest)
        for p in params:
            if p.is_contiguous() or not p.numel():
                continue
            kept = p.clone()
            span = 1 + sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
            p.as_strided((span,), (1,)).zero_()
            p.copy_(kept)

    return kernel(target, "adagrad_", function)


@mutant("stores.host_generator", "O2.4", "ops", only="masked_softmax_dropout")
def host_generator(target: Target) -> Target:
    """Dropout seeds the host's generator, and draws its mask there."""

    def function(original: Kernel, scores: Tensor, mask: Any, scale: float, seed: Tensor | None, p: float) -> Any:
        if seed is not None:
            torch.manual_seed(int(seed.flatten()[0]))
        return original(scores, mask, scale, seed, p)

    return kernel(target, "masked_softmax_dropout", function)


@mutant("caches.packed_weights", "O1.6", "ops", only="linear")
def packed_weights(target: Target) -> Target:
    """Weights are packed at the first call, and known again by their address."""
    packed: dict[Any, Tensor] = {}

    def function(original: Kernel, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        key = weight.data_ptr(), weight.shape, weight.stride(), weight.dtype
        result: Tensor = original(x, packed.setdefault(key, weight.clone()), *rest)
        return result

    return kernel(target, "linear", function)


# ---- kernels: values -------------------------------------------------------------------------------------------------
@mutant("adam.step_of_the_first", "O1.7", "ops", only="/adam_")
def step_of_the_first(target: Target) -> Target:
    """All tensors of a list are corrected for the step of the first."""
    return kernel(target, "adam_", lambda original, *a: original(*a[:4], [a[4][0]] * len(a[4]) if a[4] else [], *a[5:]))


@mutant("adam.step_in_a_byte", "O1.7", "ops", only="/adam_")
def step_in_a_byte(target: Target) -> Target:
    """The step is packed into 8 bits of the launch's arguments."""
    return kernel(target, "adam_", lambda original, *a: original(*a[:4], [(step & 255) or 1 for step in a[4]], *a[5:]))


@mutant("adam.eps_before_correction", "O1.7", "ops", only="/adam_")
def eps_before_correction(target: Target) -> Target:
    """Epsilon is added before the bias correction, as in the paper's other form."""

    def function(original: Kernel, *a: Any) -> None:
        for i in range(len(a[0])):
            step = a[4][i if len(a[4]) > 1 else 0]
            eps = a[8] / (1 - a[7] ** step) ** 0.5 if a[11] else a[8]
            original(*(each[i : i + 1] for each in a[:4]), [step], *a[5:8], eps, *a[9:])

    return kernel(target, "adam_", function)


@mutant("activation.relu_by_fmax", "O1.4", "ops", only="/bias_activation/")
def relu_by_fmax(target: Target) -> Target:
    """ReLU is `fmaxf(x, 0)`, which takes the number where the other is NaN."""

    def function(original: Kernel, x: Tensor, bias: Any, code: int) -> Tensor:
        result: Tensor = original(x, bias, code)
        return result.nan_to_num(0.0, float("inf"), float("-inf")) if code == 1 else result

    return kernel(target, "bias_activation", function)


@mutant("softmax.mask_of_the_first_head", "O1.1", "ops", only="/softmax/")
def mask_of_the_first_head(target: Target) -> Target:
    """A mask is read as if all heads shared it."""

    def function(original: Kernel, scores: Tensor, mask: Tensor | None, *rest: Any) -> Tensor:
        if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
            mask = mask[:, :1]
        result: Tensor = original(scores, mask, *rest)
        return result

    return kernel(target, "softmax", function)


@mutant("tokens.index_wraps", "O3.5", "ops", only="token_gather")
def index_wraps(target: Target) -> Target:
    """An index that is out of range reads what lies there."""

    def function(original: Kernel, tokens: Tensor, indices: Tensor, batch_first: bool) -> Tensor:
        length = tokens.shape[1 if batch_first else 0]
        result: Tensor = original(tokens, indices % length if length else indices, batch_first)
        return result

    return kernel(target, "token_gather", function)


# ---- device, streams, events -----------------------------------------------------------------------------------------
member(
    "device.synchronize_one_stream",
    "R1.20",
    "`synchronize()` waits for the current stream alone.",
    target=SIMULATED,
    synchronize=lambda self, index=None: accelerator_of(self).current_stream(index).synchronize(),
)


class _DefaultRecorded(torch.Event):
    """An event that is recorded on the default stream where no stream is named."""

    def record(self, stream: Any = None) -> None:
        super().record(_default_stream() if stream is None else stream)


class _HostTimed(torch.Event):
    """An event whose time is the host's, at the call of `record`."""

    time = 0.0

    def record(self, stream: Any = None) -> None:
        super().record() if stream is None else super().record(stream)
        self.time = time.perf_counter()

    def elapsed_time(self, other: Any) -> float:
        if not (self.time and other.time):
            raise RuntimeError("both events must be recorded")
        return float((other.time - self.time) * 1000)


def _made(cls: type[torch.Event]) -> Any:
    """The member Event, of a class."""
    return property(lambda self: lambda enable_timing=False: cls(DEVICE, enable_timing=enable_timing))


member(
    "streams.event_on_default",
    "R4.10",
    "`record()` records on the default stream.",
    target=SIMULATED,
    Event=_made(_DefaultRecorded),
)
member(
    "streams.submission_times",
    "R4.12",
    "Events have the time at which they were submitted.",
    target=SIMULATED,
    Event=_made(_HostTimed),
)


class _HostWaits(torch.Stream):
    """A stream whose `wait_stream` keeps the host until the other is done."""

    def wait_stream(self, stream: Any) -> None:
        stream.synchronize()


member(
    "streams.wait_holds_host",
    "R4.21",
    "`wait_stream` is a `synchronize` of the other stream by the host.",
    target=SIMULATED,
    Stream=property(lambda self: lambda device=0: _HostWaits(device=torch.device(DEVICE, device))),
)


def _views_not_recorded() -> None:
    record = torch.Tensor.record_stream

    def record_stream(self: Tensor, stream: Any) -> None:
        if self.storage_offset() == 0:
            record(self, stream)

    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign, assignment]  # the defect of this mutant


below(
    "streams.view_not_recorded",
    "R4.20",
    "`record_stream` looks blocks up by the address of a tensor, which a view's is not.",
    _views_not_recorded,
)


# ---- memory ----------------------------------------------------------------------------------------------------------
def _keeping(*counters: str) -> Any:
    """`memory_stats` whose peaks of some counters are the largest ever."""

    def memory_stats(self: Any, index: int | None = None) -> dict[str, Any]:
        stats: dict[str, Any] = accelerator_of(self).memory_stats(index)
        kept = self.__dict__.setdefault("_peaks", {})
        for counter in counters:
            key = f"{counter}_bytes.all.peak"
            place = key, self.current_device() if index is None else index
            kept[place] = stats[key] = max(kept.get(place, 0), stats[key])
        return stats

    return memory_stats


member(
    "memory.reserved_peak_kept",
    "R5.5",
    "A reset restarts the peak of what is allocated, not of what is reserved.",
    target=SIMULATED,
    memory_stats=_keeping("reserved"),
)
member(
    "memory.active_peak_kept",
    "R5.15",
    "A reset restarts two of three peaks.",
    target=SIMULATED,
    memory_stats=_keeping("active"),
)
member(
    "memory.peak_of_the_current",
    "R5.10",
    "`max_memory_allocated(i)` is the current device's.",
    target=SIMULATED,
    max_memory_allocated=lambda self, index=None: original(self).max_memory_allocated(),
)


def _copies_block() -> None:
    copy, to = torch.Tensor.copy_, torch.Tensor.to

    def blocking(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Tensor, *arguments: Any, **keywords: Any) -> Any:
            result = function(self, *arguments, **keywords)
            if DEVICE in (self.device.type, result.device.type) and self.device != result.device:
                torch.accelerator.synchronize()
            if arguments and isinstance(arguments[0], Tensor) and arguments[0].device != self.device:
                torch.accelerator.synchronize()
            return result

        return run

    torch.Tensor.copy_ = blocking(copy)  # type: ignore[method-assign]  # the defect of this mutant
    torch.Tensor.to = blocking(to)  # type: ignore[method-assign]  # the defect of this mutant


below("pinned.copies_block", "R7.10", "Copies from and to pinned memory keep the host waiting.", _copies_block)

# ---- random numbers --------------------------------------------------------------------------------------------------


def _host_bernoulli() -> None:
    draw = torch.Tensor.bernoulli_

    def bernoulli_(self: Tensor, p: Any = 0.5, **options: Any) -> Tensor:
        if self.device.type != DEVICE:
            return draw(self, p, **options)
        return self.copy_(draw(torch.empty(self.shape), p))

    torch.Tensor.bernoulli_ = bernoulli_  # type: ignore[method-assign, assignment]  # the defect of this mutant


below("random.host_bernoulli", "R3.10", "`bernoulli_` draws on the host, and copies.", _host_bernoulli)


def _seed_alone(self: Any, index: int | None = None) -> Tensor:
    generator = torch.Generator()
    device = self.current_device() if index is None else index
    generator.manual_seed(accelerator_of(self).default_generator(device).initial_seed())
    return generator.get_state()


member(
    "random.offset_not_in_state",
    "R3.3",
    "The state holds the seed, and not how much has been drawn.",
    target=SIMULATED,
    get_rng_state=_seed_alone,
)


# ---- builders --------------------------------------------------------------------------------------------------------
def _wrapped(self: Any, name: str, **members: Any) -> Any:
    builder = accelerator_of(self).create_op_builder(name)
    for key, value in members.items():
        setattr(builder, key, value)
    return builder


def _no_compiler(verbose: bool = False) -> bool:
    raise FileNotFoundError("zapcc: not found")


member(
    "builders.compatible_raises",
    "R12.2",
    "`is_compatible()` raises where the vendor's compiler is missing.",
    create_op_builder=lambda self, name: _wrapped(self, name, is_compatible=_no_compiler),
)


def _loads_once(self: Any, name: str) -> Any:
    builder = accelerator_of(self).create_op_builder(name)
    if builder is None:
        return None
    load = builder.load
    seen = self.__dict__.setdefault("_loaded", set())

    def again(verbose: bool = True) -> Any:
        if name in seen:
            return None
        seen.add(name)
        return load(verbose)

    builder.load = again
    return builder


member("builders.loads_once", "R12.3", "A second `load()` gives None.", create_op_builder=_loads_once)


# ---- collectives -----------------------------------------------------------------------------------------------------
def _scatter_average_is_sum(original: Kernel, *tensors: Any, op: Any = dist.ReduceOp.SUM, **more: Any) -> Any:
    return original(*tensors, op=dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, **more)


_function(
    "scatter_average_is_sum",
    "D1.2",
    "AVG of `reduce_scatter_tensor` is the sum.",
    "reduce_scatter_tensor",
    _scatter_average_is_sum,
    target=SIMULATED,
)


class _Done:
    """A handle that says that it is done."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _arrives_later(original: Kernel, output: Tensor, *rest: Any, async_op: bool = False, **more: Any) -> Any:
    if not async_op:
        return original(output, *rest, **more)
    arrived = output.clone()
    original(arrived, *rest, **more)
    threading.Timer(0.5, lambda: output.copy_(arrived)).start()
    return _Done()


_function(
    "gather_arrives_later",
    "D1.6",
    "`wait()` of `all_gather_into_tensor` does not wait.",
    "all_gather_into_tensor",
    _arrives_later,
)
_function(
    "scatter_arrives_later",
    "D1.6",
    "`wait()` of `reduce_scatter_tensor` does not wait.",
    "reduce_scatter_tensor",
    _arrives_later,
)


# ---- front ends ------------------------------------------------------------------------------------------------------
@mutant("module.fused_adam_always_decoupled", "O7.1", "ops", only="/FusedAdam")
def fused_adam_always_decoupled(target: Target) -> Target:
    """multi_tensor_adam is AdamW whatever mode it is asked for."""

    def function(original: Kernel, *a: Any) -> Any:
        return original(*a[:8], 1, *a[9:])

    return module(target, "fused_adam", "multi_tensor_adam", function)


# ---- training --------------------------------------------------------------------------------------------------------
@mutant("training.moments_kept", "T4.1", "training", only="resumed/1")
def moments_kept(target: Target) -> Target:
    """Adam keeps moments of its own by the address of the parameter; what a checkpoint loads is not looked at."""
    kept: dict[int, list[Tensor]] = {}

    def function(original: Kernel, params: Any, grads: Any, first: Any, second: Any, *rest: Any) -> None:
        own = [
            kept.setdefault(p.data_ptr(), [m.clone(), v.clone()]) for p, m, v in zip(params, first, second, strict=True)
        ]
        original(params, grads, [m for m, _ in own], [v for _, v in own], *rest)
        for m, v, (own_m, own_v) in zip(first, second, own, strict=True):
            m.copy_(own_m)
            v.copy_(own_v)

    return kernel(target, "adam_", function)


@mutant("training.captured_rate", "T1.1", "training", only="zero.losses/1")
def captured_rate(target: Target) -> Target:
    """The learning rate is that of the first step, as it was captured."""
    first: list[float] = []

    def function(original: Kernel, *a: Any) -> None:
        first.append(a[5])
        original(*a[:5], first[0], *a[6:])

    return kernel(target, "adam_", function)
