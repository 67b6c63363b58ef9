"""Products of matrices in float32, added to others: ``ds_plugin::addmm_``.

For CPUs on which torch's product leaves half of the arithmetic units' rate unused. It has no derivatives: it is what
`ds_plugin_sdk.nn.linear` and `ds_plugin_sdk.nn.linear_cross_entropy` are made of there.
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor

from ds_plugin_sdk.errors import BuildError, SdkError
from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import CheckError, check_other, check_written, text
from ds_plugin_sdk.ops._first_call import is_native


def addmm_(sums: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0) -> Tensor:
    """``sums = beta * sums + a @ b``, as `torch.Tensor.addmm_`.

    Args:
        sums: ``[rows, columns]``, float32 (float64: reference only); not read where `beta` is 0.
        a: ``[rows, depth]``, the dtype of sums, in any layout; as fast as can be where rows or columns are contiguous.
        b: ``[depth, columns]``, likewise.
        beta: what the sums are multiplied by before.

    Returns:
        `sums`.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit; nothing was modified.
        SdkError: gradients are recorded, and `a` or `b` wants one.
    """
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        raise SdkError(
            "no derivative",
            op="addmm_",
            why="a or b requires a gradient",
            hint="call it within torch.no_grad(), or take ds_plugin_sdk.nn.linear",
        )
    _library.call("addmm_", sums, a, b, beta)
    _library.mark_modified([sums])
    return sums


@functools.cache
def has_kernel() -> bool:
    """Whether the CPU has a kernel for the op; it is loaded, or compiled, when this is first asked."""
    with contextlib.suppress(BuildError):  # torch's product is as right
        return is_native("addmm_", "matmul", "cpu")
    return False


def _check(sums: Tensor, a: Tensor, b: Tensor) -> None:
    if sums.dtype not in (torch.float32, torch.float64):
        raise CheckError(f"sums is {text(sums.dtype)}; expected float32")
    if sums.dim() != 2:
        raise CheckError(f"sums has shape {list(sums.shape)}; expected [rows, columns]")
    rows, columns = sums.shape
    if a.dim() != 2:
        raise CheckError(f"a has shape {list(a.shape)}; expected [{rows}, depth]")
    check_other("a", a, sums, (rows, a.shape[1]))
    check_other("b", b, sums, (a.shape[1], columns))


@_library.op("addmm_(Tensor(a!) sums, Tensor a, Tensor b, float beta) -> ()", check=_check)
def addmm_reference(sums: Tensor, a: Tensor, b: Tensor, beta: float) -> None:
    """``ds_plugin::addmm_`` by torch, on any device."""
    check_written("sums", sums)
    sums.addmm_(a, b, beta=beta)


__all__ = ["addmm_", "has_kernel"]
