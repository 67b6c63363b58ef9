"""Grouped integer quantization: ``ds_plugin::quantize``, ``dequantize`` and the ops that communication needs.

A tensor is cut, in row-major order, into groups of equal size. With b bits, x a group's values, all in float32::

    symmetric   s = 2^b / (2 max|x|),       o = 0                  s = 1 where max|x| = 0
    asymmetric  s = 2^b / (max x - min x),  o = (max x + min x) / 2    s = 1 where they are equal

    q = clamp(round((x - o) s), -2^(b-1), 2^(b-1) - 1)       params = 1 / s, and o if asymmetric
    x' = q * params[0] + o

as DeepSpeed's CUDA source has them. Rounding is to nearest, ties to even. The largest value would need level 2^(b-1)
and gets the one below, so it loses a whole step ``1 / s``; all others are within half of one. Of 4-bit values, an
even element has the upper half of its byte, the odd one behind it the lower.

A NaN or an infinity in a group makes its params NaN or infinite, and all of the group NaN once it is dequantized; its
own level is 0. A group of no elements has s = 1 and o = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._multi_tensor import check_memory, mark_modified

_VALUES = (torch.float32, torch.bfloat16, torch.float16)
# DeepSpeed's: keeps a group of equal values from dividing by zero when quantized in place.
_EPSILON = 1e-5


def quantize(x: Tensor, *, groups: int, bits: int = 8, symmetric: bool = True) -> tuple[Tensor, Tensor]:
    """Quantize a tensor in groups; the formulas are the module's.

    Args:
        x: values, any shape of at least one dimension: float32, bfloat16, float16 (float64 by the reference alone).
        groups: number of groups, a divisor of ``x.numel()``.
        bits: 8 or 4. With 4, groups and the last dimension are of even length.
        symmetric: whether the range is symmetric about 0; otherwise it is that of the values.

    Returns:
        levels: int8, shape of `x`; with 4 bits the last dimension is half as long.
        params: float32 of shape ``(groups, 1)``, or ``(groups, 2)`` if not symmetric.

    Raises:
        InvalidTensorError: dtype or shape do not fit.
    """
    levels, params = _library.call("quantize", x, groups, bits, symmetric)
    return levels, params


def dequantize(
    levels: Tensor, params: Tensor, *, bits: int = 8, symmetric: bool = True, dtype: torch.dtype = torch.float32
) -> Tensor:
    """What `quantize` stored, as floating-point values: computed in float32, rounded once.

    Args:
        levels: int8, as `quantize` gives them.
        params: float32 of shape ``(groups, 1)``, or ``(groups, 2)`` if not symmetric, as `quantize` gives them.
        bits, symmetric: as in `quantize`.
        dtype: of the result: float32, bfloat16 or float16.

    Returns:
        The values: shape of `levels`; with 4 bits the last dimension is twice as long.

    Raises:
        InvalidTensorError: dtype or shape do not fit.
    """
    values: Tensor = _library.call("dequantize", levels, params, bits, symmetric, dtype)
    return values


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


def dequantize_range(levels: Tensor, scale: Tensor, minimum: Tensor, *, group_size: int, bits: int = 8) -> Tensor:
    """Values of DeepSpeed's weight-only quantization: ``level / scale + minimum``, in float32, rounded once.

    There ``scale = (2^bits - 1) / (max - min)`` of each group, and levels are unsigned.

    Args:
        levels: uint8, ``groups * group_size`` levels in order; with 4 bits two in a byte, the first in its upper half.
        scale: one number for each group: float32, bfloat16 or float16, any shape.
        minimum: one number for each group, dtype of `scale`.
        group_size: number of values in a group; even with 4 bits.
        bits: 8 or 4.

    Returns:
        Shape ``(groups, group_size)``, dtype of `scale`.

    Raises:
        InvalidTensorError: dtype or shape do not fit.
    """
    values: Tensor = _library.call("dequantize_range", levels, scale, minimum, group_size, bits)
    return values


def fake_quantize_(
    x: Tensor, *, groups: int, bits: int = 8, symmetric: bool = True, noise: Tensor | None = None
) -> None:
    """Round a tensor, in place, to the values that quantization would leave of it.

    Of each group, in float32, with r rounding to nearest, ties to even::

        symmetric   s = 2^bits / (2 max|x| + 1e-5)       x <- clamp(r(x s), -2^(bits-1), 2^(bits-1) - 1) / s
        asymmetric  s = 2^bits / (max x - min x + 1e-5)  x <- r((x - min x) s) / s + min x

    as the fake quantizers of DeepSpeed up to 0.18 have it, whose float32 form rounds its result to a whole number and
    is not followed there. With `noise`, r(v) is ``floor(v + noise)``: uniform noise makes the rounding stochastic, its
    mean v. Autograd does not record the step.

    Args:
        x: float32, bfloat16 or float16 (float64 by the reference alone), any shape.
        groups: number of groups, a divisor of ``x.numel()``.
        bits: 2 to 16.
        symmetric: whether the range is symmetric about 0; otherwise it is that of the values.
        noise: float32 in [0, 1), shape of `x`; none for rounding to nearest.

    Raises:
        InvalidTensorError: dtype, shape or memory do not fit; nothing was modified.
    """
    _library.call("fake_quantize_", x, noise, groups, bits, symmetric)
    mark_modified([x])


# ---- references ------------------------------------------------------------------------------------------------------
def quantize_reference(x: Tensor, groups: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """``ds_plugin::quantize`` in plain torch, on any device."""
    _check_quantize("quantize", x, groups, bits)
    levels, params = _quantize_groups(_working(x).reshape(groups, -1), bits, symmetric)
    return _pack(levels, bits).reshape(_packed_shape(x.shape, bits)), params


def dequantize_reference(levels: Tensor, params: Tensor, bits: int, symmetric: bool, dtype: torch.dtype) -> Tensor:
    """``ds_plugin::dequantize`` in plain torch, on any device."""
    groups = _check_dequantize(levels, params, bits, symmetric, dtype)
    values = _dequantize_groups(_unpack(levels.reshape(groups, -1), bits), params, symmetric)
    return values.to(dtype).reshape(_unpacked_shape(levels.shape, bits))


def swizzle_quantize_reference(
    x: Tensor, groups: int, bits: int, symmetric: bool, pipeline: int, nodes: int, devices_per_node: int
) -> tuple[Tensor, Tensor]:
    """``ds_plugin::swizzle_quantize`` in plain torch, on any device."""
    _check_swizzle(x, groups, bits, pipeline, nodes, devices_per_node)
    parts = (nodes, devices_per_node, pipeline, groups // (nodes * devices_per_node * pipeline))
    # From node, device, slice to slice, device, node.
    ordered = _working(x).reshape(*parts, x.numel() // groups).permute(2, 1, 0, 3, 4)
    levels, params = _quantize_groups(ordered.reshape(groups, -1), bits, symmetric)
    return _pack(levels, bits).reshape(-1), params


def quantized_reduce_reference(
    levels: Tensor, params: Tensor, out_groups: int, devices: int, bits: int, symmetric: bool
) -> tuple[Tensor, Tensor]:
    """``ds_plugin::quantized_reduce`` in plain torch, on any device."""
    in_groups = _check_reduce(levels, params, out_groups, devices, bits, symmetric)
    values = _dequantize_groups(_unpack(levels.reshape(in_groups, -1), bits), params, symmetric)
    total = values.reshape(devices, -1).sum(dim=0)
    out_levels, out_params = _quantize_groups(total.reshape(out_groups, -1), bits, symmetric)
    return _pack(out_levels, bits).reshape(_reduced_shape(levels.shape, devices)), out_params


def dequantize_range_reference(levels: Tensor, scale: Tensor, minimum: Tensor, group_size: int, bits: int) -> Tensor:
    """``ds_plugin::dequantize_range`` in plain torch, on any device."""
    groups = _check_range(levels, scale, minimum, group_size, bits)
    flat = levels.reshape(-1)
    if bits == 4:
        flat = torch.stack((flat >> 4, flat & 15), dim=-1)
    values = flat.reshape(groups, group_size) / _working(scale).reshape(groups, 1)
    return (values + _working(minimum).reshape(groups, 1)).to(scale.dtype)


@torch.no_grad()
def fake_quantize_reference(x: Tensor, noise: Tensor | None, groups: int, bits: int, symmetric: bool) -> None:
    """``ds_plugin::fake_quantize_`` in plain torch, on any device."""
    _check_fake_quantize(x, noise, groups, bits)
    check_memory("fake_quantize_", {"x": [x], **({} if noise is None else {"noise": [noise]})}, ("x",))
    if x.numel() == 0:
        return
    values = _working(x).reshape(groups, -1)
    least = torch.zeros_like(values[:, :1]) if symmetric else values.amin(dim=1, keepdim=True)
    span = 2 * values.abs().amax(dim=1, keepdim=True) if symmetric else values.amax(dim=1, keepdim=True) - least
    scale = 2**bits / (span + _EPSILON)
    levels = (values - least) * scale
    levels = levels.round() if noise is None else (levels + noise.reshape(groups, -1)).floor()
    if symmetric:
        levels = levels.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    x.copy_((levels * (1 / scale) + least).reshape(x.shape))


def _working(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _quantize_groups(x: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Levels, int8, and params of the rows of a matrix."""
    if x.shape[1] == 0:
        span = offset = x.new_zeros(x.shape[0], 1)
    elif symmetric:
        span = 2 * x.abs().amax(dim=1, keepdim=True)
        offset = torch.zeros_like(span)
    else:
        low, high = x.amin(dim=1, keepdim=True), x.amax(dim=1, keepdim=True)
        span, offset = high - low, (high + low) / 2
    scale = torch.where(span == 0, 1.0, 2**bits / span)
    levels = ((x - offset) * scale).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).round()
    params = 1 / scale if symmetric else torch.cat((1 / scale, offset), dim=1)
    return levels.nan_to_num(0.0).to(torch.int8), params.float()


def _dequantize_groups(levels: Tensor, params: Tensor, symmetric: bool) -> Tensor:
    """The values, float32, of a matrix of levels whose rows are groups."""
    values = levels.float() * params[:, :1]
    return values if symmetric else values + params[:, 1:]


def _pack(levels: Tensor, bits: int) -> Tensor:
    """Two 4-bit levels of a row to a byte."""
    return levels if bits == 8 else (levels[:, ::2] << 4) | (levels[:, 1::2] & 15)


def _unpack(levels: Tensor, bits: int) -> Tensor:
    """Undoes `_pack`: the sign of 4 bits is bit 3."""
    if bits == 8:
        return levels
    pairs = torch.stack((levels >> 4, levels), dim=-1)
    return (((pairs & 15) ^ 8) - 8).flatten(1)


# ---- checks ----------------------------------------------------------------------------------------------------------
def _fail_unless(condition: bool, op: str, message: str) -> None:
    if not condition:
        raise _library.invalid(op, message)


def _check_bits(op: str, bits: int) -> None:
    _fail_unless(bits in (4, 8), op, f"bits is {bits}; expected 8 or 4")


def _check_groups(op: str, argument: str, numel: int, groups: int, name: str = "groups") -> int:
    """The number of elements in a group."""
    _fail_unless(groups > 0, op, f"{name} is {groups}; expected a positive number")
    _fail_unless(
        numel % groups == 0, op, f"{argument} has {numel} elements; expected a multiple of {name}, which is {groups}"
    )
    return numel // groups


def _check_values(op: str, argument: str, x: Tensor) -> None:
    _fail_unless(
        x.dtype in (*_VALUES, torch.float64),
        op,
        f"{argument} is {_name(x.dtype)}; expected float32, bfloat16 or float16",
    )


def _check_dtype(op: str, argument: str, x: Tensor, dtype: torch.dtype) -> None:
    _fail_unless(x.dtype == dtype, op, f"{argument} is {_name(x.dtype)}; expected {_name(dtype)}")


def _check_devices(op: str, first: Tensor, argument: str, other: Tensor) -> None:
    _fail_unless(
        first.device == other.device, op, f"{argument} is on {other.device}; expected all tensors on {first.device}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_quantize(op: str, x: Tensor, groups: int, bits: int) -> None:
    _check_bits(op, bits)
    _check_values(op, "x", x)
    _fail_unless(x.dim() > 0, op, "x has no dimension; expected at least one")
    size = _check_groups(op, "x", x.numel(), groups)
    even = bits == 8 or (size % 2 == 0 and x.shape[-1] % 2 == 0)
    _fail_unless(
        even, op, f"groups of {size} elements, a last dimension of {x.shape[-1]}; expected even numbers with 4 bits"
    )


def _check_swizzle(x: Tensor, groups: int, bits: int, pipeline: int, nodes: int, devices_per_node: int) -> None:
    op = "swizzle_quantize"
    _check_quantize(op, x, groups, bits)
    parts = pipeline * nodes * devices_per_node
    _fail_unless(
        min(pipeline, nodes, devices_per_node) > 0 and groups % parts == 0,
        op,
        f"groups is {groups}; expected a multiple of pipeline * nodes * devices_per_node, which is {parts}",
    )


def _check_params(op: str, levels: Tensor, params: Tensor, bits: int, symmetric: bool) -> int:
    """The number of groups."""
    _check_bits(op, bits)
    _check_dtype(op, "levels", levels, torch.int8)
    _check_dtype(op, "params", params, torch.float32)
    _check_devices(op, levels, "params", params)
    _fail_unless(levels.dim() > 0, op, "levels has no dimension; expected at least one")
    columns = 1 if symmetric else 2
    _fail_unless(
        params.dim() == 2 and params.shape[0] > 0 and params.shape[1] == columns,
        op,
        f"params has shape {list(params.shape)}; expected [groups, {columns}]",
    )
    _check_groups(op, "levels", levels.numel(), params.shape[0])
    return params.shape[0]


def _check_dequantize(levels: Tensor, params: Tensor, bits: int, symmetric: bool, dtype: torch.dtype) -> int:
    op = "dequantize"
    _fail_unless(dtype in _VALUES, op, f"dtype is {_name(dtype)}; expected float32, bfloat16 or float16")
    return _check_params(op, levels, params, bits, symmetric)


def _check_reduce(levels: Tensor, params: Tensor, out_groups: int, devices: int, bits: int, symmetric: bool) -> int:
    op = "quantized_reduce"
    groups = _check_params(op, levels, params, bits, symmetric)
    _fail_unless(devices > 0, op, f"devices is {devices}; expected a positive number")
    _fail_unless(
        groups % devices == 0 and levels.shape[-1] % devices == 0,
        op,
        f"params has {groups} groups, the last dimension of levels {levels.shape[-1]} elements; "
        f"expected multiples of devices, which is {devices}",
    )
    _check_groups(op, "the sum", levels.numel() // devices, out_groups, "out_groups")
    return groups


def _check_range(levels: Tensor, scale: Tensor, minimum: Tensor, group_size: int, bits: int) -> int:
    """The number of groups."""
    op = "dequantize_range"
    _check_bits(op, bits)
    _check_dtype(op, "levels", levels, torch.uint8)
    _check_values(op, "scale", scale)
    _check_dtype(op, "minimum", minimum, scale.dtype)
    _check_devices(op, levels, "scale", scale)
    _check_devices(op, levels, "minimum", minimum)
    groups = scale.numel()
    _fail_unless(
        minimum.numel() == groups, op, f"minimum has {minimum.numel()} elements; expected {groups}, as many as scale"
    )
    values = levels.numel() * (8 // bits)
    _fail_unless(
        group_size > 0 and group_size % (8 // bits) == 0 and values == groups * group_size,
        op,
        f"levels has {values} values; expected {groups} groups of {group_size}",
    )
    return groups


def _check_fake_quantize(x: Tensor, noise: Tensor | None, groups: int, bits: int) -> None:
    op = "fake_quantize_"
    _check_values(op, "x", x)
    _fail_unless(2 <= bits <= 16, op, f"bits is {bits}; expected 2 to 16")
    _check_groups(op, "x", x.numel(), groups)
    if noise is not None:
        _check_dtype(op, "noise", noise, torch.float32)
        _check_devices(op, x, "noise", noise)
        _fail_unless(
            noise.shape == x.shape, op, f"noise has shape {list(noise.shape)}; expected {list(x.shape)}, that of x"
        )


# ---- shapes and fake kernels -----------------------------------------------------------------------------------------
def _packed_shape(shape: torch.Size, bits: int) -> list[int]:
    return [*shape[:-1], shape[-1] * bits // 8]


def _unpacked_shape(shape: torch.Size, bits: int) -> list[int]:
    return [*shape[:-1], shape[-1] * 8 // bits]


def _reduced_shape(shape: torch.Size, devices: int) -> list[int]:
    return [*shape[:-1], shape[-1] // devices]


def _new_params(x: Tensor, groups: int, symmetric: bool) -> Tensor:
    return x.new_empty(groups, 1 if symmetric else 2, dtype=torch.float32)


def _quantize_fake(x: Tensor, groups: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    _check_quantize("quantize", x, groups, bits)
    return x.new_empty(_packed_shape(x.shape, bits), dtype=torch.int8), _new_params(x, groups, symmetric)


def _dequantize_fake(levels: Tensor, params: Tensor, bits: int, symmetric: bool, dtype: torch.dtype) -> Tensor:
    _check_dequantize(levels, params, bits, symmetric, dtype)
    return levels.new_empty(_unpacked_shape(levels.shape, bits), dtype=dtype)


def _swizzle_quantize_fake(
    x: Tensor, groups: int, bits: int, symmetric: bool, pipeline: int, nodes: int, devices_per_node: int
) -> tuple[Tensor, Tensor]:
    _check_swizzle(x, groups, bits, pipeline, nodes, devices_per_node)
    return x.new_empty(x.numel() * bits // 8, dtype=torch.int8), _new_params(x, groups, symmetric)


def _quantized_reduce_fake(
    levels: Tensor, params: Tensor, out_groups: int, devices: int, bits: int, symmetric: bool
) -> tuple[Tensor, Tensor]:
    _check_reduce(levels, params, out_groups, devices, bits, symmetric)
    return levels.new_empty(_reduced_shape(levels.shape, devices)), _new_params(levels, out_groups, symmetric)


def _dequantize_range_fake(levels: Tensor, scale: Tensor, minimum: Tensor, group_size: int, bits: int) -> Tensor:
    groups = _check_range(levels, scale, minimum, group_size, bits)
    return scale.new_empty(groups, group_size)


def _fake_quantize_fake(x: Tensor, noise: Tensor | None, groups: int, bits: int, symmetric: bool) -> None:
    _check_fake_quantize(x, noise, groups, bits)


_library.define(
    "quantize(Tensor x, int groups, int bits, bool symmetric) -> (Tensor, Tensor)",
    reference=quantize_reference,
    fake=_quantize_fake,
)
_library.define(
    "dequantize(Tensor levels, Tensor params, int bits, bool symmetric, ScalarType dtype) -> Tensor",
    reference=dequantize_reference,
    fake=_dequantize_fake,
)
_library.define(
    "swizzle_quantize(Tensor x, int groups, int bits, bool symmetric, int pipeline, int nodes, "
    "int devices_per_node) -> (Tensor, Tensor)",
    reference=swizzle_quantize_reference,
    fake=_swizzle_quantize_fake,
)
_library.define(
    "quantized_reduce(Tensor levels, Tensor params, int out_groups, int devices, int bits, bool symmetric) "
    "-> (Tensor, Tensor)",
    reference=quantized_reduce_reference,
    fake=_quantized_reduce_fake,
)
_library.define(
    "dequantize_range(Tensor levels, Tensor scale, Tensor minimum, int group_size, int bits) -> Tensor",
    reference=dequantize_range_reference,
    fake=_dequantize_range_fake,
)
_library.define(
    "fake_quantize_(Tensor(a!) x, Tensor? noise, int groups, int bits, bool symmetric) -> ()",
    reference=fake_quantize_reference,
    fake=_fake_quantize_fake,
)

__all__ = [
    "dequantize",
    "dequantize_range",
    "dequantize_range_reference",
    "dequantize_reference",
    "fake_quantize_",
    "fake_quantize_reference",
    "quantize",
    "quantize_reference",
    "quantized_reduce",
    "quantized_reduce_reference",
    "swizzle_quantize",
    "swizzle_quantize_reference",
]
