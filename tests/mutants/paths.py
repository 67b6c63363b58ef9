"""Defects of kernels for larger calls, for 16 bits, for tensors that lie otherwise than others, and of streams."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.ops._checks import _is_dense
from mutants.kernels import Kernel, kernel
from mutants.mutant import SIMULATED, mutant
from mutants.runtime.support import DEVICE


def default_stream() -> Any:
    return torch.get_device_module(DEVICE).default_stream()


# ---- ops: paths of larger calls, and of 16 bits ----------------------------------------------------------------------
@mutant("launch.products_elsewhere", "O8.1", "ops", target=SIMULATED, only="/linear")
def products_elsewhere(target: Target) -> Target:
    """From eight rows on the vendor's matrix library multiplies, whose stream was not set."""

    def function(original: Kernel, x: Tensor, *rest: Any) -> Any:
        if x.numel() // max(x.shape[-1], 1) < 8:
            return original(x, *rest)
        with default_stream():
            return original(x, *rest)

    return kernel(target, "linear", function)


@mutant("launch.sixteen_bits_elsewhere", "O8.1", "ops", target=SIMULATED, only="/rms_norm")
def sixteen_bits_elsewhere(target: Target) -> Target:
    """The kernel of 16 bits runs on the default stream."""

    def function(original: Kernel, x: Tensor, *rest: Any) -> Any:
        if x.dtype == torch.float32:
            return original(x, *rest)
        with default_stream():
            return original(x, *rest)

    return kernel(target, "rms_norm", function)


@mutant("launch.softmax_elsewhere", "O8.1", "ops", target=SIMULATED, only="/softmax")
def softmax_elsewhere(target: Target) -> Target:
    """The kernel runs on the default stream."""

    def function(original: Kernel, *a: Any) -> Any:
        with default_stream():
            return original(*a)

    return kernel(target, "softmax", function)


@mutant("caches.softmax", "O1.6", "ops", only="/softmax")
def cached_softmax(target: Target) -> Target:
    """What was given for a tensor at this address is given again."""
    kept: dict[Any, Tensor] = {}

    def function(original: Kernel, scores: Tensor, *rest: Any) -> Tensor:
        key = scores.data_ptr(), scores.shape, scores.stride(), scores.dtype
        return kept.setdefault(key, original(scores, *rest)).clone()

    return kernel(target, "softmax", function)


@mutant("sizes.rows_of_sixteen_bits", "O1.7", "ops", only="rms_norm")
def rows_of_sixteen_bits(target: Target) -> Target:
    """Of 16 bits, rows from 65,535 on are beyond the grid."""

    def function(original: Kernel, x: Tensor, *rest: Any) -> Tensor:
        result: Tensor = original(x, *rest)
        if x.dtype != torch.float32:
            result.view(-1, x.shape[-1] if x.shape[-1] else 1)[65_535:] = 0
        return result

    return kernel(target, "rms_norm", function)


@mutant("sizes.past_of_sixteen_bits", "O1.7", "ops", only="/cached_attention")
def past_of_sixteen_bits(target: Target) -> Target:
    """Of 16 bits, scores of 1,024 past positions fit into shared memory; what is older is forgotten."""

    def function(original: Kernel, *a: Any) -> Tensor:
        window = a[9] if a[9] else 1025
        narrow = a[0].dtype != torch.float32 and a[5] > 1024
        result: Tensor = original(*a[:9], min(window, 1025), a[10]) if narrow else original(*a)
        return result

    return kernel(target, "cached_attention", function)


@mutant("sizes.last_block_of_keys", "O1.7", "ops", only="/cached_attention")
def last_block_of_keys(target: Target) -> Target:
    """Of 16 bits, keys of a last block that is not whole are forgotten after a long past: a hundredth of a mean."""

    def function(original: Kernel, *a: Any) -> Tensor:
        past = a[5]
        if a[0].dtype == torch.float32 or past < 4096 or not past % 64:
            whole: Tensor = original(*a)
            return whole
        cut, cache = past // 64 * 64, a[3].clone()
        cache[:, :, cut:past] = 0
        result: Tensor = original(*a[:3], cache, *a[4:])
        a[3][:, :, past:] = cache[:, :, past:]
        return result

    return kernel(target, "cached_attention", function)


@mutant("sizes.row_in_shared_memory", "O1.7", "ops", only="/rms_norm")
def row_in_shared_memory(target: Target) -> Target:
    """A row is kept in 48 KiB of shared memory; what does not fit is as it was there."""

    def function(original: Kernel, x: Tensor, *rest: Any) -> Tensor:
        result: Tensor = original(x, *rest)
        if x.shape[-1] > 12_288:
            result[..., 12_288:] = 0
        return result

    return kernel(target, "rms_norm", function)


@mutant("sizes.blocks_of_queries", "O1.1", "ops", only="/cached_attention/float32")
def blocks_of_queries(target: Target) -> Target:
    """Queries of the second block of 128 see what is later."""

    def function(original: Kernel, *a: Any) -> Tensor:
        result: Tensor = original(*a)
        if a[0].shape[2] > 128:
            result[:, :, 128:] = a[2].repeat_interleave(a[0].shape[1] // a[2].shape[1], 1)[:, :, 128:]
        return result

    return kernel(target, "cached_attention", function)


@mutant("numbers.squares_of_float16", "O1.1", "ops", target=SIMULATED, only="/adam_/float16")
def squares_of_float16(target: Target) -> Target:
    """Gradients of float16 are squared in float16."""

    def function(original: Kernel, params: list[Tensor], grads: list[Tensor], *rest: Any) -> None:
        half = torch.float16
        original(
            params, [g.square().float().sqrt().copysign(g).to(half) if g.dtype == half else g for g in grads], *rest
        )

    return kernel(target, "adam_", function)


# ---- ops: streams of other devices, and of other threads -------------------------------------------------------------
@mutant("launch.stream_of_the_current", "O8.3", "ops", target=SIMULATED, only="/rms_norm")
def stream_of_the_current(target: Target) -> Target:
    """The kernel is launched on the current device's stream, which waits for no work of the arguments' device."""

    def function(original: Kernel, x: Tensor, *rest: Any) -> Any:
        if x.device.index == torch.accelerator.current_device_index():
            return original(x, *rest)
        with torch.Stream(device=x.device):
            return original(x, *rest)

    return kernel(target, "rms_norm", function)


@mutant("launch.workspace_of_all_streams", "O8.4", "ops", target=SIMULATED, only="/rms_norm")
def workspace_of_all_streams(target: Target) -> Target:
    """Launches are made one after the other, and compute in one workspace, whichever their streams are."""
    workspaces: dict[Any, Tensor] = {}
    lock = threading.Lock()

    def function(original: Kernel, x: Tensor, *rest: Any) -> Tensor:
        result: Tensor = original(x, *rest)
        with lock:
            workspace = workspaces.setdefault((x.shape, x.dtype), torch.empty_like(result)).copy_(result)
            torch.empty(1 << 22, device=x.device).fill_(0.0)  # the rest of the kernel
            return workspace.clone()

    return kernel(target, "rms_norm", function)


# ---- ops: how tensors lie --------------------------------------------------------------------------------------------
@mutant("layout.alignment_of_params", "O1.2", "ops", only="/adam_/")
def alignment_of_params(target: Target) -> Target:
    """Vectors are loaded where parameters are at a vector's boundary; gradients are taken to be so too."""

    def loaded(p: Tensor, g: Tensor) -> Tensor:
        off = g.storage_offset() * g.itemsize % 16 // g.itemsize
        if p.storage_offset() * p.itemsize % 16 or not (p.is_contiguous() and g.is_contiguous()) or not off:
            return g
        return g.as_strided(g.shape, g.stride(), g.storage_offset() - off)

    def function(original: Kernel, params: list[Tensor], grads: list[Tensor], *rest: Any) -> None:
        original(params, [loaded(p, g) for p, g in zip(params, grads, strict=True)], *rest)

    return kernel(target, "adam_", function)


def in_memory_order(tensor: Tensor) -> Tensor:
    """A tensor without gaps, read as if it were contiguous."""
    order = torch.empty(tensor.shape, device="meta").stride()
    return tensor.as_strided(tensor.shape, order) if _is_dense(tensor) else tensor


@mutant("layout.rows_of_a_transposed", "O1.2", "ops", only="/rms_norm/")
def rows_of_a_transposed(target: Target) -> Target:
    """A tensor without gaps is read in the order of memory, whatever its dimensions' order."""
    return kernel(target, "rms_norm", lambda original, x, *rest: original(in_memory_order(x), *rest))


@mutant("layout.other_order_of_up", "O1.2", "ops", only="/activation_and_mul/")
def other_order_of_up(target: Target) -> Target:
    """Both are read in the order of memory, which is one for both where they were made alike."""

    def function(original: Kernel, gate: Tensor, up: Tensor, activation: int) -> Tensor:
        other = up if gate.stride() == up.stride() else in_memory_order(up)
        result: Tensor = original(gate, other, activation)
        return result

    return kernel(target, "activation_and_mul", function)


@mutant("layout.expanded_gradient", "O1.2", "ops", only="/fused_bias_gelu_backward/")
def expanded_gradient(target: Target) -> Target:
    """The gradient of a sum, one number for all elements, is read as if it were a number for each."""

    def function(original: Kernel, grad: Tensor, *rest: Any) -> Any:
        if not any(grad.stride()) and grad.numel() > 1:
            first = grad.flatten()[:1]
            grad = torch.cat([first, torch.zeros_like(first).expand(grad.numel() - 1)]).view(grad.shape)
        return original(grad, *rest)

    return kernel(target, "fused_bias_gelu_backward", function)


@mutant("leaks.a_workspace", "O2.5", "ops", target=SIMULATED, only="/rms_norm")
def leaks_a_workspace(target: Target) -> Target:
    """A handle is not released: each call's result stays in memory."""
    leaked: list[Tensor] = []

    def function(original: Kernel, *a: Any) -> Tensor:
        result: Tensor = original(*a)
        leaked.append(result.detach())
        return result.clone()

    return kernel(target, "rms_norm", function)
