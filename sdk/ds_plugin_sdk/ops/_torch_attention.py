"""torch's own attention kernels, forward and backward, with what they keep between as plain tensors.

`torch.nn.functional.scaled_dot_product_attention` chooses among the same kernels. But what it keeps lies in autograd's
graph, where neither DeepSpeed's layer, which keeps tensors itself, nor the checkpointing of activations gets at it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_LONG = 256  # tokens from which on torch's kernel for CPUs is faster than plain products in 16 bits, see decision 0038
_PACK = 8  # elements of 16 bits that torch's CUDA kernels take at once


class Saved(NamedTuple):
    """What the backward pass wants. Seed and offset have no elements where the kernel cannot drop anything."""

    sums: Tensor  # float32 [B, heads, S or more]: logarithms of the sums that the softmax divides by
    seed: Tensor
    offset: Tensor


def is_best(q: Tensor, mask: Tensor | None, p: float) -> bool:
    """Whether there is a kernel for these queries, and it is faster than plain products around a fused softmax.

    Args:
        q: ``[B, heads, S, head_dim]``.
        mask: added to the scores, or None.
        p: share of the weights that is dropped.
    """
    if q.numel() == 0:  # which ends the process on CPUs
        return False
    if _is_on_cpu(q):
        return p == 0 and (q.element_size() > 2 or q.shape[2] >= _LONG)
    fits = q.device.type == "cuda" and q.element_size() == 2 and q.shape[3] % _PACK == 0 and q.shape[3] <= 256
    if not fits or not _has_kernel(q.device.index, mask is not None):
        return False
    return mask is not None or _has_derivative(q.shape[3], p) or _has_large_blocks(q.device.index)


def _has_kernel(device: int, masked: bool) -> bool:
    """Whether a GPU has the kernel, flash attention or with a mask the memory-efficient one, and the user allows it."""
    allowed = torch._C._get_mem_efficient_sdp_enabled() if masked else torch._C._get_flash_sdp_enabled()
    return allowed and torch.cuda.get_device_capability(device)[0] >= 8


def _has_derivative(head_dim: int, p: float) -> bool:
    """Whether flash attention's backward pass takes such heads on all GPUs; it raises where it does not."""
    return head_dim <= 192 or (head_dim > 224 and p == 0)


def _has_large_blocks(device: int) -> bool:
    """Whether it takes all heads on a GPU: those of 8.6 to 8.9 and of 12.x have too little shared memory for some."""
    capability = torch.cuda.get_device_capability(device)
    return not (8, 6) <= capability <= (8, 9) and capability[0] != 12


# What torch.compiler.assume_constant_result does, which imports the compiler: 1.5 s.
_has_kernel._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile asks for this
_has_large_blocks._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile asks for this


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float) -> tuple[Tensor, Saved]:
    """``dropout(softmax(q k^T / sqrt(head_dim) + mask)) v``, where `is_best`.

    Args:
        q, k, v: ``[B, heads, S, head_dim]``.
        mask: broadcasts to ``[B, heads, S, S]``, with four dimensions; the dtype of q.
        p: share of the weights that is dropped, by random numbers of torch's generator of the device.

    Returns:
        ``[B, heads, S, head_dim]``, and what `backward` wants.
    """
    aten = torch.ops.aten
    if _is_on_cpu(q):
        context, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)
        return context, Saved(sums, q.new_empty(0), q.new_empty(0))
    if mask is None:
        context, sums, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v, p)
    else:
        bias = _aligned(mask, q)
        context, sums, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, p)
    return context, Saved(sums, seed, offset)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, context: Tensor, kept: Saved, p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v.

    Args:
        grad: of `context`, the result of `forward`; the others as `forward` had and gave them.
    """
    aten = torch.ops.aten
    if _is_on_cpu(q):
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, context, kept.sums, 0.0, False, attn_mask=mask
        )
    elif mask is None:
        length = q.shape[2]
        grads = aten._scaled_dot_product_flash_attention_backward(
            *(grad, q, k, v, context, kept.sums, None, None, length, length, p, False, kept.seed, kept.offset)
        )
    else:
        *grads, _ = aten._scaled_dot_product_efficient_attention_backward(
            *(grad, q, k, v, _aligned(mask, q), context, kept.sums, kept.seed, kept.offset, p),
            [True, True, True, False],
        )
    grad_q, grad_k, grad_v = grads
    return grad_q, grad_k, grad_v


def _is_on_cpu(q: Tensor) -> bool:
    return q.device.type == "cpu"


def _aligned(mask: Tensor, q: Tensor) -> Tensor:
    """The mask for all heads, its rows at addresses that the kernel can read in packs."""
    mask = mask.expand(*mask.shape[:-1], q.shape[2])
    length = mask.shape[-1]
    if length % _PACK or mask.storage_offset() % _PACK or not mask.is_contiguous():
        room = mask.new_empty(*mask.shape[:-1], length + -length % _PACK)
        mask = room[..., :length].copy_(mask)
    return mask.expand(*q.shape[:3], length)
