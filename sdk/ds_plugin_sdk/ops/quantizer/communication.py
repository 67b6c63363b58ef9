"""``ds_plugin::swizzle_quantize`` and ``quantized_reduce``, around the all-to-alls of ZeRO++."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import CheckError
from ds_plugin_sdk.ops._references import working
from ds_plugin_sdk.ops.quantizer._parts import (
    check_groups,
    check_params,
    check_quantize,
    dequantize_groups,
    new_params,
    pack,
    quantize_groups,
    unpack,
)


def swizzle_quantize(
    x: Tensor,
    *,
    groups: int,
    bits: int = 4,
    symmetric: bool = True,
    pipeline: int = 1,
    nodes: int = 1,
    devices_per_node: int = 1,
) -> tuple[Tensor, Tensor]:
    """Quantize a tensor in groups, and put these in the order in which two all-to-alls want them.

    `x` holds one equal part for each rank, rank ``n * devices_per_node + d`` being device d of node n; each part has
    `pipeline` slices. Parts come out ordered by slice, then device, then node: what goes to one device within the node
    is one run of memory.

    Args:
        x: values, as in `quantize`.
        groups: number of groups, a multiple of ``nodes * devices_per_node * pipeline``.
        bits, symmetric: as in `quantize`.
        pipeline: slices that are sent one after the other.
        nodes: number of nodes.
        devices_per_node: number of ranks in each node.

    Returns:
        levels: int8, one dimension: one element for each of `x`, or for two with 4 bits.
        params: as `quantize` gives them, in the order of the groups in `levels`.

    Raises:
        InvalidTensorError: dtype or shape do not fit.
    """
    levels, params = _library.call("swizzle_quantize", x, groups, bits, symmetric, pipeline, nodes, devices_per_node)
    return levels, params


def quantized_reduce(
    levels: Tensor,
    params: Tensor,
    *,
    out_groups: int,
    devices: int,
    bits: int = 4,
    symmetric: bool = True,
) -> tuple[Tensor, Tensor]:
    """Dequantize what each of several devices sent, add it up, and quantize the sum.

    Sums are in float32, where DeepSpeed's CUDA source has float16.

    Args:
        levels: int8, the devices' levels one after the other.
        params: float32, the devices' params one after the other: one or two columns, as in `dequantize`.
        out_groups: number of groups of the sum.
        devices: number of devices.
        bits, symmetric: as in `quantize`, of what is given and of what is returned.

    Returns:
        levels: int8, shape of `levels` with the last dimension divided by `devices`.
        params: float32 of shape ``(out_groups, 1)``, or ``(out_groups, 2)`` if not symmetric.

    Raises:
        InvalidTensorError: dtype or shape do not fit.
    """
    out_levels, out_params = _library.call("quantized_reduce", levels, params, out_groups, devices, bits, symmetric)
    return out_levels, out_params


def _check_swizzle(x: Tensor, groups: int, bits: int, pipeline: int, nodes: int, devices_per_node: int) -> None:
    check_quantize(x, groups, bits)
    parts = pipeline * nodes * devices_per_node
    if min(pipeline, nodes, devices_per_node) <= 0 or groups % parts:
        raise CheckError(
            f"groups is {groups}; expected a multiple of pipeline * nodes * devices_per_node, which is {parts}"
        )


def _new_swizzled(x: Tensor, groups: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.numel() * bits // 8, dtype=torch.int8), new_params(x, groups, symmetric)


@_library.op(
    "swizzle_quantize(Tensor x, int groups, int bits, bool symmetric, int pipeline, int nodes, "
    "int devices_per_node) -> (Tensor, Tensor)",
    check=_check_swizzle,
    outputs=_new_swizzled,
)
def swizzle_quantize_reference(
    x: Tensor, groups: int, bits: int, symmetric: bool, pipeline: int, nodes: int, devices_per_node: int
) -> tuple[Tensor, Tensor]:
    """``ds_plugin::swizzle_quantize`` in plain torch, on any device."""
    parts = (nodes, devices_per_node, pipeline, groups // (nodes * devices_per_node * pipeline))
    # From node, device, slice to slice, device, node.
    ordered = x.to(working(x)).reshape(*parts, x.numel() // groups).permute(2, 1, 0, 3, 4)
    levels, params = quantize_groups(ordered.reshape(groups, -1), bits, symmetric)
    return pack(levels, bits).reshape(-1), params


def _check_reduce(levels: Tensor, params: Tensor, out_groups: int, devices: int, bits: int, symmetric: bool) -> None:
    check_params(levels, params, bits, symmetric)
    groups = params.shape[0]
    if devices <= 0:
        raise CheckError(f"devices is {devices}; expected a positive number")
    if groups % devices or levels.shape[-1] % devices:
        raise CheckError(
            f"params has {groups} groups, the last dimension of levels {levels.shape[-1]} elements; "
            f"expected multiples of devices, which is {devices}"
        )
    check_groups("the sum", levels.numel() // devices, out_groups, "out_groups")


def _new_reduced(levels: Tensor, out_groups: int, devices: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    return levels.new_empty(_reduced_shape(levels.shape, devices)), new_params(levels, out_groups, symmetric)


def _reduced_shape(shape: torch.Size, devices: int) -> list[int]:
    return [*shape[:-1], shape[-1] // devices]


@_library.op(
    "quantized_reduce(Tensor levels, Tensor params, int out_groups, int devices, int bits, bool symmetric) "
    "-> (Tensor, Tensor)",
    check=_check_reduce,
    outputs=_new_reduced,
)
def quantized_reduce_reference(
    levels: Tensor, params: Tensor, out_groups: int, devices: int, bits: int, symmetric: bool
) -> tuple[Tensor, Tensor]:
    """``ds_plugin::quantized_reduce`` in plain torch, on any device."""
    values = dequantize_groups(unpack(levels.reshape(params.shape[0], -1), bits), params, symmetric)
    total = values.reshape(devices, -1).sum(dim=0)
    out_levels, out_params = quantize_groups(total.reshape(out_groups, -1), bits, symmetric)
    return pack(out_levels, bits).reshape(_reduced_shape(levels.shape, devices)), out_params
