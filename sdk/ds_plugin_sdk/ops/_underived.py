"""Ops without derivatives, where gradients are wanted."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ds_plugin_sdk.errors import SdkError


def refuse_gradients(op: str, written: Iterable[Any]) -> None:
    """Let a backward pass through what an op has made or written in place raise.

    torch records that such a tensor depends on the op's arguments, and goes past the op with one warning: gradients of
    what is before it would be wrong.
    """
    # Compiled, a hook on what is written would end the graph; TorchScript would record the hook.
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return
    for tensor in written:
        # A leaf that was written has another value from then on, of which its gradient is the right one.
        if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(functools.partial(_refuse, op))  # type: ignore[no-untyped-call]  # torch gives it no type
            if (base := tensor._base) is not None and not base.is_leaf:
                base.register_hook(functools.partial(_refuse, op))  # type: ignore[no-untyped-call]  # torch gives it no type


def _refuse(op: str, *_: Tensor) -> NoReturn:
    raise SdkError(
        "no derivative",
        op=op,
        why="it is for inference, and something before it requires gradients",
        hint="ds_plugin_sdk.nn has functions with derivatives; without them, torch.no_grad()",
    )
