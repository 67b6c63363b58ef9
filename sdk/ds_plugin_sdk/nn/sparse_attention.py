"""Block-sparse self-attention: blocks that the layout leaves out are neither computed nor stored.

Neighbouring block rows are joined to tiles as long as that saves more gathering than it computes in vain. For each tile
the keys and values that its rows attend to are gathered, and torch's `scaled_dot_product_attention` computes it. The
backward pass computes each tile once more, so that nothing is kept but inputs: memory grows with the length of the
sequence and with the largest tile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.nn.linear import check_untransformed
from ds_plugin_sdk.nn.sparsity import SparsityConfig
from ds_plugin_sdk.ops._derived_once import derived_once

MaskMode = Literal["add", "mul"]

# What gathering a key costs, in queries attended to: the sum of tiles' (queries + this) * keys is kept small. At 4096
# tokens 16 takes many small steps in some patterns, 64 computes three times what the layout has in others.
_GATHER_COST = 32


class SparseSelfAttention(nn.Module):
    """Self-attention on the blocks of a sparsity pattern, as DeepSpeed up to 0.18 had it::

        softmax(q k^T / sqrt(head_dim) + rpe + masks) v

    over the keys that the layout has for a query. Where masks leave a query no key, its result is 0.

    The layout is a buffer, ``master_layout``: it is saved with the model, and when torch.distributed is initialised,
    all ranks take that of rank 0, for it may be random.

    Args:
        sparsity_config: the pattern.
        key_padding_mask_mode: ``add`` for a mask that is added to the scores; ``mul`` for one whose zeros hide a key.
        attn_mask_mode: the same for `attn_mask`.
        max_seq_length: longest sequence, a multiple of the block; shorter ones use the layout's upper left part.
    """

    master_layout: Tensor

    def __init__(
        self,
        sparsity_config: SparsityConfig,
        key_padding_mask_mode: MaskMode = "add",
        attn_mask_mode: MaskMode = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if mode not in ("add", "mul"):
                raise ValueError(f"{name} is {mode!r}; expected 'add' or 'mul'")
        self.sparsity_config = sparsity_config
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        self.register_buffer("master_layout", sparsity_config.make_layout(max_seq_length))
        self._synchronized = False
        self._plans: dict[tuple[int, torch.device], list[_Part]] = {}  # by length, and by where they are used
        self._planned: tuple[Tensor, int] | None = None  # the layout that they are of, and its version then

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: ``[batch, num_heads, length, head_dim]``, any floating-point dtype; length a multiple of the block.
            key: shape and dtype of `query`, or with the last two dimensions swapped.
            value: shape and dtype of `query`.
            rpe: added to the scores: ``[length, length]``, or with heads and batch before; has no gradient.
            key_padding_mask: ``[batch, length]``, or with dimensions of one element between; has no gradient.
            attn_mask: ``[length, length]``; has no gradient.

        Returns:
            ``[batch, num_heads, length, head_dim]``.

        Raises:
            InvalidTensorError: shapes or dtypes do not fit, or a mask requires a gradient.
            SdkError: under `torch.func`.
        """
        check_untransformed("sparse_attention")
        if key.shape != query.shape and key.dim() == 4:
            key = key.transpose(2, 3)
        self._check(query, key, value)
        masks = self._masks(query, rpe, key_padding_mask, attn_mask)
        self._synchronize()
        if query.numel() == 0 or query.is_meta:
            return torch.empty_like(query, memory_format=torch.contiguous_format)
        plan = self._plan(query.shape[2], query.device)
        output: Tensor = _BlockSparseAttention.apply(query, key, value, masks, plan)  # type: ignore[no-untyped-call, unused-ignore]  # before 2.15 torch gives it no type
        return output

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Make the layout anew, which a module that ``to_empty`` moved from the meta device lacks; all ranks take that
        of rank 0 again.
        """
        tokens = self.master_layout.shape[1] * self.sparsity_config.block
        self.master_layout.copy_(self.sparsity_config.make_layout(tokens))
        self._synchronized = False

    def extra_repr(self) -> str:
        """What `print` shows of the module."""
        blocks = "some" if self.master_layout.is_meta else int(self.master_layout.sum())
        return f"{type(self.sparsity_config).__name__}, {blocks} of {self.master_layout.numel()} blocks"

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        config, longest = self.sparsity_config, self.master_layout.shape[1] * self.sparsity_config.block
        if query.dim() != 4 or query.shape[1] != config.num_heads:
            raise _invalid(
                f"query has shape {list(query.shape)}", f"expected [batch, {config.num_heads}, length, head_dim]"
            )
        for name, tensor in (("key", key), ("value", value)):
            if tensor.shape != query.shape or tensor.dtype != query.dtype or tensor.device != query.device:
                raise _invalid(
                    f"{name} has shape {list(tensor.shape)}, {tensor.dtype}, {tensor.device}",
                    f"expected that of query: {list(query.shape)}, {query.dtype}, {query.device}",
                )
        if query.shape[2] % config.block or query.shape[2] > longest:
            raise _invalid(
                f"the sequence has {query.shape[2]} tokens",
                f"expected a multiple of the block, {config.block}, and at most max_seq_length, {longest}",
            )

    def _masks(
        self, query: Tensor, rpe: Tensor | None, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> list[Tensor]:
        """What is to be added to the scores: tensors that broadcast to ``[batch, heads, length, length]``."""
        batch, heads, length, _ = query.shape
        masks = []
        if rpe is not None:
            masks.append(_expect("rpe", rpe, (batch, heads, length, length)))
        if key_padding_mask is not None:
            flat = key_padding_mask.reshape(key_padding_mask.shape[0], -1)
            if flat.shape != (batch, length):
                raise _invalid(
                    f"key_padding_mask has shape {list(key_padding_mask.shape)}", f"expected [{batch}, {length}]"
                )
            masks.append(_added(flat, self.key_padding_mask_mode)[:, None, None, :])
        if attn_mask is not None:
            squeezed = attn_mask.reshape(attn_mask.shape[-2:]) if attn_mask.numel() == length * length else attn_mask
            if squeezed.shape != (length, length):
                raise _invalid(f"attn_mask has shape {list(attn_mask.shape)}", f"expected [{length}, {length}]")
            masks.append(_added(squeezed, self.attn_mask_mode)[None, None])
        if any(mask.requires_grad for mask in masks):
            raise _invalid("a mask or rpe requires a gradient", "expected constants; detach() makes one")
        return masks

    def _synchronize(self) -> None:
        if not self._synchronized and dist.is_available() and dist.is_initialized():
            dist.broadcast(self.master_layout, src=0)
            self._planned = None
            self._synchronized = True

    def _plan(self, length: int, device: torch.device) -> list[_Part]:
        """The parts in which a sequence is computed, renewed when the layout was written or replaced."""
        whole = self.master_layout
        version = (
            -1 if whole.is_inference() else whole._version
        )  # such tensors have none: they are planned for each time
        if self._planned is None or self._planned[0] is not whole or version < 0 or self._planned[1] != version:
            self._plans, self._planned = {}, (whole, version)
        if (length, device) not in self._plans:
            blocks = length // self.sparsity_config.block
            layout = whole[:, :blocks, :blocks].bool().cpu()
            with torch.inference_mode(False), torch.device("cpu"):  # training will use these parts, too
                parts = _parts(layout, self.sparsity_config.block)
                self._plans[length, device] = [part.on(device) for part in parts]
        return self._plans[length, device]

    def __getstate__(self) -> dict[str, Any]:
        # The layout of a copy counts its versions anew.
        return {**self.__dict__, "_plans": {}, "_planned": None}


def sparse_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, layout: Tensor, block: int, mask: Tensor | None = None
) -> Tensor:
    """The same on the whole matrix of scores, in plain torch.

    Args:
        query, key, value: ``[batch, heads, length, head_dim]``.
        layout: ``[heads, blocks, blocks]``.
        block: tokens in a block.
        mask: added to the scores; broadcasts to ``[batch, heads, length, length]``.

    Returns:
        ``[batch, heads, length, head_dim]``.
    """
    seen = _tokens(layout.to(query.device).bool(), block)
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask
    scores = scores.masked_fill(~seen, float("-inf"))
    # A query without keys: the softmax of nothing is not a number, nor is its gradient; its result here is 0.
    nothing = (scores == float("-inf")).all(dim=-1, keepdim=True)
    weights = scores.masked_fill(nothing, 0.0).softmax(dim=-1).masked_fill(nothing, 0.0)
    result: Tensor = weights @ value
    return result


# ---- parts -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Part:
    """What is computed at once.

    Attributes:
        heads: neighbouring heads of one layout.
        queries: a slice of the sequence.
        keys: a slice, or indices, of the sequence.
        seen: bool ``[queries, keys]``, false where the layout has no block; None if it has all.
    """

    heads: slice
    queries: slice
    keys: slice | Tensor
    seen: Tensor | None

    def on(self, device: torch.device) -> _Part:
        """The same with its tensors on a device, which would be waited for if each step copied them there."""
        keys = self.keys if isinstance(self.keys, slice) else self.keys.to(device)
        return _Part(self.heads, self.queries, keys, None if self.seen is None else self.seen.to(device))


def _parts(layout: Tensor, block: int) -> Iterator[_Part]:
    """The parts of a layout ``[heads, blocks, blocks]``, bool."""
    for heads, head_layout in _runs_of_heads(layout):
        for rows in _tiles(head_layout, block):
            tile = head_layout[rows]
            columns = tile.any(dim=0)
            seen = tile[:, columns]
            yield _Part(
                heads,
                slice(rows.start * block, rows.stop * block),
                _keys(columns, block),
                None if seen.all() else _tokens(seen, block),
            )


def _runs_of_heads(layout: Tensor) -> Iterator[tuple[slice, Tensor]]:
    first = 0
    for head in range(1, len(layout) + 1):
        if head == len(layout) or not torch.equal(layout[head], layout[first]):
            yield slice(first, head), layout[first]
            first = head


def _tiles(layout: Tensor, block: int) -> Iterator[slice]:
    """Slices of the rows of a layout ``[blocks, blocks]``; they leave out rows without a block.

    A row joins those before it if (queries + gathering) * keys of them all is no more than that of both.
    """

    def cost(rows: int, columns: Tensor) -> float:
        return (rows + _GATHER_COST / block) * float(columns.sum())

    first, joined = 0, torch.zeros_like(layout[0])
    for row, columns in enumerate(layout):
        union = joined | columns
        if not joined.any():  # nothing but empty rows so far
            first = row
        elif cost(row + 1 - first, union) > cost(row - first, joined) + cost(1, columns):
            yield slice(first, row)
            first, union = row, columns
        joined = union
    if joined.any():
        yield slice(first, len(layout))


def _keys(columns: Tensor, block: int) -> slice | Tensor:
    """The tokens of block columns, given as a mask: a slice if they are neighbours."""
    numbers = columns.nonzero().flatten()
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first + 1 == numbers.numel():
        return slice(first * block, (last + 1) * block)
    return (numbers.unsqueeze(1) * block + torch.arange(block)).flatten()


def _tokens(blocks: Tensor, block: int) -> Tensor:
    return blocks.repeat_interleave(block, dim=-2).repeat_interleave(block, dim=-1)


# ---- computation -----------------------------------------------------------------------------------------------------
class _BlockSparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, masks: list[Tensor], parts: list[_Part]) -> Tensor:
        ctx.save_for_backward(query, key, value, *masks)
        ctx.parts = parts
        output = torch.zeros_like(query, memory_format=torch.contiguous_format)
        for part in parts:
            output[:, part.heads, part.queries] = _attend(part, *_gather(part, query, key, value), masks)
        return output

    @staticmethod
    @functools.partial(derived_once, "sparse attention", nonlinear=True)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_untransformed("sparse_attention", grad)
        query, key, value, *masks = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(each, memory_format=torch.contiguous_format) for each in (query, key, value))
        for part in ctx.parts:
            with torch.enable_grad():
                q, k, v = (each.detach().requires_grad_() for each in _gather(part, query, key, value))
                output = _attend(part, q, k, v, masks)
            partial = torch.autograd.grad(output, (q, k, v), grad[:, part.heads, part.queries])
            dq[:, part.heads, part.queries] = partial[0]
            dk[:, part.heads, part.keys] += partial[1]
            dv[:, part.heads, part.keys] += partial[2]
        return dq, dk, dv, None, None


def _gather(part: _Part, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return query[:, part.heads, part.queries], key[:, part.heads, part.keys], value[:, part.heads, part.keys]


def _attend(part: _Part, query: Tensor, key: Tensor, value: Tensor, masks: list[Tensor]) -> Tensor:
    seen = part.seen
    if not masks:
        return scaled_dot_product_attention(query, key, value, attn_mask=seen)
    bias = sum(_piece(mask, part).to(torch.promote_types(query.dtype, torch.float32)) for mask in masks)
    assert isinstance(bias, Tensor)
    if seen is not None:
        bias = bias.masked_fill(~seen, float("-inf"))
    return scaled_dot_product_attention(query, key, value, attn_mask=bias.to(query.dtype))


def _piece(mask: Tensor, part: _Part) -> Tensor:
    """The elements of a mask that belong to a part; dimensions that broadcast are left as they are."""
    if mask.shape[1] > 1:
        mask = mask[:, part.heads]
    if mask.shape[2] > 1:
        mask = mask[:, :, part.queries]
    return mask[..., part.keys]


# ---- masks -----------------------------------------------------------------------------------------------------------
def _added(mask: Tensor, mode: MaskMode) -> Tensor:
    """A mask as what is added to the scores."""
    if mode == "add":
        if not mask.is_floating_point():
            why = "expected floating point, which is added to the scores; mode 'mul' hides the keys that are 0"
            raise _invalid(f"a mask of mode 'add' is {str(mask.dtype).removeprefix('torch.')}", why)
        return mask
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(mask == 0, -torch.inf)


def _expect(name: str, mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`mask` with four dimensions, the last two those of `shape`, the others of that size or 1."""
    whole = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape)) if mask.dim() < 4 else mask
    fits = whole.dim() == 4 and whole.shape[2:] == shape[2:]
    if not fits or any(size not in (1, wanted) for size, wanted in zip(whole.shape[:2], shape[:2], strict=True)):
        raise _invalid(f"{name} has shape {list(mask.shape)}", f"expected {list(shape)}, or what broadcasts to it")
    return whole


def _invalid(what: str, expected: str) -> InvalidTensorError:
    return InvalidTensorError(what, op="sparse attention", why=expected)


__all__ = ["SparseSelfAttention", "sparse_attention_reference"]
