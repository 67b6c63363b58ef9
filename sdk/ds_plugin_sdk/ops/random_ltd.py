"""Random layerwise token dropping (Yao et al. 2022): which tokens a layer sees, and their way there and back.

``ds_plugin::token_sort_``, ``token_gather``, ``token_scatter_``, ``mask_gather_bert`` and ``mask_gather_gpt``. Elements
are moved, not computed with: results are exact, and data may be of any dtype.

An index that is out of range raises `InvalidTensorError`, except by kernels that would have to wait for their device to
know: CUDA's assert it there, as torch's own indexing does, and the process cannot use its GPU any more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import CheckError, check_memory


def token_sort_(indices: Tensor, seq_len: int) -> Tensor:
    """Sort every row of token indices, in place.

    Args:
        indices: int32 ``[layers, batch, reserved]`` (or any number of dimensions), each in ``[0, seq_len)``; they may
            repeat.
        seq_len: tokens of the whole sequence.

    Returns:
        `indices`, ascending along the last dimension.

    Raises:
        InvalidTensorError: dtype or shape does not fit, or an index is out of range; nothing was modified.
    """
    _library.call("token_sort_", indices, seq_len)
    _library.mark_modified([indices])
    return indices


def token_gather(activations: Tensor, indices: Tensor, batch_first: bool = True) -> Tensor:
    """The chosen tokens of each sequence: ``output[b, i] = activations[b, indices[b, i]]``. Differentiable.

    Args:
        activations: ``[batch, sequence, channels]``, or ``[sequence, batch, channels]`` if not `batch_first`.
        indices: int32 ``[batch, reserved]``, each in ``[0, sequence)``.
        batch_first: the order of the first two dimensions.

    Returns:
        A new contiguous tensor, ``[batch, reserved, channels]`` or ``[reserved, batch, channels]``.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit, or an index is out of range.
    """
    result: Tensor = _library.call("token_gather", activations, indices, batch_first)
    return result


def token_scatter_(
    all_activations: Tensor, layer_activations: Tensor, indices: Tensor, batch_first: bool = True
) -> Tensor:
    """Put tokens back: ``all_activations[b, indices[b, i]] = layer_activations[b, i]``, in place; the rest stays.

    Tokens are overwritten, not added to. A backward pass through it raises `SdkError`.

    Args:
        all_activations: ``[batch, sequence, channels]``, or ``[sequence, batch, channels]`` if not `batch_first`.
        layer_activations: the same with ``reserved`` instead of ``sequence``, of the same dtype.
        indices: int32 ``[batch, reserved]``, each in ``[0, sequence)``. Of a row's equal indices the last wins.
        batch_first: the order of the first two dimensions.

    Returns:
        `all_activations`.

    Raises:
        InvalidTensorError: shapes, dtypes, devices or memory do not fit, or an index is out of range; nothing was
            modified.
    """
    _library.call("token_scatter_", all_activations, layer_activations, indices, batch_first)
    _library.mark_modified([all_activations])
    return all_activations


def mask_gather_bert(mask: Tensor, indices: Tensor) -> Tensor:
    """Attention masks of the chosen tokens: ``output[l, b, 0, i, j] = mask[b, 0, indices[l, b, i], indices[l, b, j]]``.

    Args:
        mask: ``[batch, 1, sequence, sequence]``.
        indices: int32 ``[layers, batch, reserved]``, each in ``[0, sequence)``.

    Returns:
        A new contiguous tensor, ``[layers, batch, 1, reserved, reserved]``.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit, or an index is out of range.
    """
    result: Tensor = _library.call("mask_gather_bert", mask, indices)
    return result


def mask_gather_gpt(mask: Tensor, reserved: int) -> Tensor:
    """The causal mask of a shorter sequence: the upper left corner, ``mask[:, :, :reserved, :reserved]``.

    Args:
        mask: ``[batch, 1, sequence, sequence]``.
        reserved: length of the shorter sequence, at most ``sequence``.

    Returns:
        A new contiguous tensor, ``[batch, 1, reserved, reserved]``.

    Raises:
        InvalidTensorError: shapes do not fit.
    """
    result: Tensor = _library.call("mask_gather_gpt", mask, reserved)
    return result


# ---- checks ----------------------------------------------------------------------------------------------------------
def _check_indices(indices: Tensor, dimensions: int) -> None:
    if indices.dtype != torch.int32:
        raise CheckError("indices have another dtype; expected int32")
    if indices.dim() != dimensions:
        raise CheckError(f"indices has {indices.dim()} dimensions; expected {dimensions}")


def _check_range(indices: Tensor, seq_len: int) -> None:
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < seq_len:
        raise CheckError(f"indices has an entry that is no token; expected at least 0 and less than {seq_len}")


def _check_tokens(name: str, activations: Tensor, indices: Tensor, batch_first: bool) -> None:
    _check_indices(indices, 2)
    if activations.device != indices.device:
        raise CheckError(f"indices is on another device than {name}; expected all tensors on one")
    if activations.dim() != 3:
        raise CheckError(f"{name} has {activations.dim()} dimensions; expected 3")
    batch = activations.shape[0 if batch_first else 1]
    if indices.shape[0] != batch:
        raise CheckError(f"indices has {indices.shape[0]} rows; expected {batch}, one for each sequence of {name}")


def _check_mask(mask: Tensor) -> None:
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != mask.shape[3]:
        raise CheckError(f"mask has shape {list(mask.shape)}; expected [batch, 1, sequence, sequence]")


# ---- token_sort_ -----------------------------------------------------------------------------------------------------
def _check_sort(indices: Tensor) -> None:
    if indices.dtype != torch.int32:
        raise CheckError("indices have another dtype; expected int32")
    if indices.dim() == 0:
        raise CheckError("indices has no dimensions; expected [..., reserved]")


@_library.op("token_sort_(Tensor(a!) indices, int seq_len) -> ()", check=_check_sort)
def token_sort_reference(indices: Tensor, seq_len: int) -> None:
    """``ds_plugin::token_sort_`` in plain torch, on any device."""
    check_memory({"indices": [indices]}, ("indices",))
    _check_range(indices, seq_len)
    indices.copy_(indices.sort(dim=-1).values)


# ---- token_gather ----------------------------------------------------------------------------------------------------
def _check_gather(activations: Tensor, indices: Tensor, batch_first: bool) -> None:
    _check_tokens("activations", activations, indices, batch_first)


def _new_gathered(activations: Tensor, indices: Tensor, batch_first: bool) -> Tensor:
    return activations.new_empty(_gathered_shape(activations, indices, batch_first))


def _gathered_shape(activations: Tensor, indices: Tensor, batch_first: bool) -> torch.Size:
    batch, reserved = indices.shape
    channels = activations.shape[2]
    return torch.Size((batch, reserved, channels) if batch_first else (reserved, batch, channels))


def _places(indices: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Where tokens lie among the first two dimensions of activations."""
    batch = torch.arange(indices.shape[0], device=indices.device)
    tokens = indices.long()
    return (batch[:, None], tokens) if batch_first else (tokens.t(), batch)


def _setup_gather(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    activations, indices, ctx.batch_first = inputs
    ctx.shape = activations.shape
    ctx.save_for_backward(indices)


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    """Each token's gradient goes back to its place; those of a token that was taken twice are added."""
    (indices,) = ctx.saved_tensors
    result = grad.new_zeros(ctx.shape)
    return result.index_put_(_places(indices, ctx.batch_first), grad, accumulate=True), None, None


@_library.op(
    "token_gather(Tensor activations, Tensor indices, bool batch_first) -> Tensor",
    check=_check_gather,
    outputs=_new_gathered,
    autograd=_library.Autograd(_gather_backward, _setup_gather),
)
def token_gather_reference(activations: Tensor, indices: Tensor, batch_first: bool) -> Tensor:
    """``ds_plugin::token_gather`` in plain torch, on any device."""
    _check_range(indices, activations.shape[1 if batch_first else 0])
    return activations[_places(indices, batch_first)].contiguous()


# ---- token_scatter_ --------------------------------------------------------------------------------------------------
def _check_scatter(all_activations: Tensor, layer_activations: Tensor, indices: Tensor, batch_first: bool) -> None:
    _check_tokens("all_activations", all_activations, indices, batch_first)
    if layer_activations.device != indices.device:
        raise CheckError("layer_activations is on another device than all_activations; expected all tensors on one")
    if layer_activations.dtype != all_activations.dtype:
        raise CheckError("layer_activations have another dtype; expected that of all_activations")
    expected = _gathered_shape(all_activations, indices, batch_first)
    if layer_activations.shape != expected:
        raise CheckError(f"layer_activations has shape {list(layer_activations.shape)}; expected {list(expected)}")


@_library.op(
    "token_scatter_(Tensor(a!) all_activations, Tensor layer_activations, Tensor indices, bool batch_first) -> ()",
    check=_check_scatter,
)
def token_scatter_reference(
    all_activations: Tensor, layer_activations: Tensor, indices: Tensor, batch_first: bool
) -> None:
    """``ds_plugin::token_scatter_`` in plain torch, on any device."""
    tensors = {"all_activations": [all_activations], "layer_activations": [layer_activations]}
    check_memory(tensors, ("all_activations",))
    _check_range(indices, all_activations.shape[1 if batch_first else 0])
    # torch's threads share the rows below: only rows that hold the same may have the same place.
    last = _places(_last_equal(indices, all_activations.shape[1 if batch_first else 0]), batch_first)
    all_activations[_places(indices, batch_first)] = layer_activations[last]


def _last_equal(indices: Tensor, seq_len: int) -> Tensor:
    """For each of a row's indices the position of the last one that is equal: ``[5, 2, 5]`` gives ``[2, 1, 2]``."""
    tokens = indices.long()
    positions = torch.arange(indices.shape[1], device=indices.device).expand_as(tokens)
    last = torch.zeros(indices.shape[0], seq_len, dtype=torch.int64, device=indices.device)
    return last.scatter_reduce_(1, tokens, positions, "amax").gather(1, tokens)


# ---- masks -----------------------------------------------------------------------------------------------------------
def _check_bert(mask: Tensor, indices: Tensor) -> None:
    _check_mask(mask)
    _check_indices(indices, 3)
    if mask.device != indices.device:
        raise CheckError("indices is on another device than mask; expected all tensors on one")
    if indices.shape[1] != mask.shape[0]:
        raise CheckError(
            f"indices has shape {list(indices.shape)}; expected [layers, {mask.shape[0]}, reserved], as mask"
        )


def _new_bert(mask: Tensor, indices: Tensor) -> Tensor:
    layers, batch, reserved = indices.shape
    return mask.new_empty(layers, batch, 1, reserved, reserved)


@_library.op("mask_gather_bert(Tensor mask, Tensor indices) -> Tensor", check=_check_bert, outputs=_new_bert)
def mask_gather_bert_reference(mask: Tensor, indices: Tensor) -> Tensor:
    """``ds_plugin::mask_gather_bert`` in plain torch, on any device."""
    _check_range(indices, mask.shape[-1])
    long = indices.long()
    batch = torch.arange(mask.shape[0], device=mask.device).view(1, -1, 1, 1)
    return mask[batch, 0, long[..., :, None], long[..., None, :]].unsqueeze(2).contiguous()


def _check_gpt(mask: Tensor, reserved: int) -> None:
    _check_mask(mask)
    if not 0 <= reserved <= mask.shape[3]:
        raise CheckError(f"reserved is {reserved}; expected at least 0 and at most {mask.shape[3]}, as mask")


@_library.op(
    "mask_gather_gpt(Tensor mask, int reserved) -> Tensor",
    check=_check_gpt,
    outputs=lambda mask, reserved: mask.new_empty(mask.shape[0], 1, reserved, reserved),
)
def mask_gather_gpt_reference(mask: Tensor, reserved: int) -> Tensor:
    """``ds_plugin::mask_gather_gpt`` in plain torch, on any device."""
    return mask[:, :, :reserved, :reserved].clone(memory_format=torch.contiguous_format)


__all__ = ["mask_gather_bert", "mask_gather_gpt", "token_gather", "token_scatter_", "token_sort_"]
