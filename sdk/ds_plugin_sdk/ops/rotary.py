"""Rotary position embedding: ``ds_plugin::rotary`` and, in place, ``rotary_``.

A backward pass through them raises `SdkError`: the functions of `ds_plugin_sdk.nn` have derivatives.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import CheckError, check_first, check_written, text
from ds_plugin_sdk.ops._references import working


def rotary(input: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn pairs of elements of each head by the angles of their token (Su et al. 2021)::

        (a, b) -> (a cos - b sin, b cos + a sin)

    Args:
        input: queries or keys, ``[batch, heads, tokens, head_dim]``, in any memory layout: float32, bfloat16, float16
            (float64: reference only).
        cos, sin: ``[batch or 1, tokens, rotary_dim / 2]``, float32, such as `angles` gives (float64 for float64).
            Elements of a head beyond rotary_dim stay.
        interleaved: pair element 2i with element 2i + 1 (GPT-J); else element i with i + rotary_dim / 2 (LLaMA,
            GPT-NeoX).

    Returns:
        A new tensor of input's shape and dtype, and of its layout where that has no gaps; contiguous otherwise.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit.
    """
    result: Tensor = _library.call("rotary", input, cos, sin, interleaved)
    return result


def rotary_(input: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """`rotary` in place; returns `input`. A backward pass through it raises `SdkError`.

    Raises:
        InvalidTensorError: as `rotary`, or elements of input share memory; nothing was modified.
    """
    _library.call("rotary_", input, cos, sin, interleaved)
    _library.mark_modified([input])
    return input


def angles(positions: Tensor, rotary_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of ``position / theta^(2 i / rotary_dim)`` for i below rotary_dim / 2, as `rotary` takes them.

    Args:
        positions: of the tokens, whole numbers, ``[tokens]`` or ``[batch, tokens]``.
        rotary_dim: how many elements of a head are turned; even.
        theta: base of the angles.

    Neither is checked: an odd `rotary_dim` gives a column more than it has pairs, and other shapes of `positions` give
    tables that `rotary` rejects.

    Returns:
        ``[1 or batch, tokens, rotary_dim / 2]`` each, float32; computed in float64 where the device has it, for float32
        knows positions beyond 2,000 or so only to three digits of an angle. Elsewhere the host computes them, and waits
        for the device.
    """
    if positions.dim() == 1:
        positions = positions.unsqueeze(0)
    where = positions.device if _has_float64(positions.device.type) else torch.device("cpu")
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=where) / rotary_dim
    table = positions.to(where).to(torch.float64).unsqueeze(-1) * theta**-exponents
    return tuple(part.to(torch.float32).to(positions.device) for part in (table.cos(), table.sin()))  # type: ignore[return-value]  # of two tables: two


@functools.cache
def _has_float64(device_type: str) -> bool:
    try:
        torch.ones(1, dtype=torch.float64, device=device_type).cos()
    except (RuntimeError, TypeError):
        return False
    return True


def check_rotary(input: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Check the arguments of `rotary`; raises `CheckError`."""
    check_first("input", input)
    if input.dim() != 4:
        raise CheckError(f"input has shape {list(input.shape)}; expected [batch, heads, tokens, head_dim]")
    batch, _, tokens, head_dim = input.shape
    for name, table in (("cos", cos), ("sin", sin)):
        if table.device != input.device:
            raise CheckError(f"{name} is on {table.device}; expected {input.device}, where input is")
        if table.dtype not in (torch.float32, working(input)):
            raise CheckError(f"{name} is {text(table.dtype)}; expected float32")
        fits = table.dim() == 3 and table.shape[0] in (1, batch) and table.shape[1] == tokens
        if not fits or 2 * table.shape[2] > head_dim or table.shape != cos.shape:
            raise CheckError(
                f"{name} has shape {list(table.shape)}; expected [{batch} or 1, {tokens}, rotary_dim / 2], "
                f"rotary_dim up to {head_dim}, the same for cos and sin"
            )


def _like(input: Tensor) -> Tensor:
    return torch.empty_like(input)


@_library.op(
    "rotary(Tensor input, Tensor cos, Tensor sin, bool interleaved) -> Tensor",
    check=check_rotary,
    outputs=_like,
)
def rotary_reference(input: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """``ds_plugin::rotary`` in plain torch, on any device."""
    return _rotary(input, cos, sin, interleaved)


@_library.op("rotary_(Tensor(a!) input, Tensor cos, Tensor sin, bool interleaved) -> ()", check=check_rotary)
def rotary_in_place_reference(input: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """``ds_plugin::rotary_`` in plain torch, on any device."""
    check_written("input", input)
    input.copy_(_rotary(input, cos, sin, interleaved))


def _rotary(input: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    output = input.clone()
    half = cos.shape[-1]
    if half == 0:
        return output
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    dtype = working(input)
    first, second = (input[..., part].to(dtype) for part in pairs)
    c, s = (table.to(dtype).unsqueeze(1) for table in (cos, sin))
    output[..., pairs[0]] = first * c - second * s
    output[..., pairs[1]] = second * c + first * s
    return output


__all__ = ["angles", "rotary", "rotary_"]
