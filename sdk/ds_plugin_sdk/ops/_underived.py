"""Ops without derivatives, where gradients are wanted."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
from torch import Tensor

from ds_plugin_sdk.errors import SdkError


def refuse_gradients(op: str, written: Any) -> None:
    """Let a backward pass through the tensor, or tuple of them, that an op has made or written in place raise.

    torch records that such a tensor depends on the op's arguments, and goes past the op with one warning: gradients of
    what is before it would be wrong.
    """
    for tensor in written if isinstance(written, tuple) else (written,):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            _hook(op, tensor)


def _hook(op: str, tensor: Tensor) -> None:
    # Compiled, a hook on what is written would end the graph; TorchScript would record the hook.
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return
    for each in (tensor, tensor._base):
        # A leaf that was written has another value from then on, of which its gradient is the right one.
        if each is not None and (node := each.grad_fn) is not None:
            node.register_prehook(functools.partial(_refuse, op))


def _refuse(op: str, *_: Any) -> NoReturn:
    raise SdkError(
        "no derivative",
        op=op,
        why="it is for inference, and something before it requires gradients",
        hint="ds_plugin_sdk.nn has functions with derivatives; without them, torch.no_grad()",
    )
