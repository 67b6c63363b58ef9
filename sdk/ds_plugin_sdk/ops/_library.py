"""How an op of the namespace ``ds_plugin`` comes to be, and how its errors reach Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.errors import InvalidTensorError

NAMESPACE = "ds_plugin"

_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch does not say
_references: dict[str, Callable[..., Any]] = {}


def define(schema: str, *, reference: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an op; again is no error, so that a module may be imported twice.

    Args:
        schema: as `torch.library.Library.define` takes it.
        reference: the op in plain torch; it serves every device that has no kernel of its own.
        fake: what tracing sees: the same checks, outputs without data.
    """
    name = schema.partition("(")[0]
    if name in _references:
        return
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    _references[name] = reference


def call(name: str, tensors: Sequence[Tensor], *args: Any) -> Any:
    """Call an op whose first argument is a list of tensors.

    Kernels compute in float32; float64 tensors take the reference. What a kernel refuses is raised as the reference
    raises it.

    Raises:
        InvalidTensorError: the arguments do not fit; nothing was modified.
    """
    if tensors and tensors[0].dtype == torch.float64:
        return _references[name](tensors, *args)
    try:
        return getattr(torch.ops.ds_plugin, name).default(tensors, *args)
    except RuntimeError as error:
        prefix = f"{NAMESPACE}::{name}: "
        message = str(error).partition("\n")[0]
        if not message.startswith(prefix):
            raise
        raise invalid(name, message.removeprefix(prefix)) from error


def invalid(op: str, message: str) -> InvalidTensorError:
    """The error for ``"<what is wrong>; <what was expected>"``, the form in which kernels state it."""
    what, _, expected = message.partition("; ")
    return InvalidTensorError(what, op=op, why=expected)
