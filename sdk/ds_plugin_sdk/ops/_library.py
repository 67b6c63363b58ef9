"""How an op of the namespace ``ds_plugin`` comes to be, and how its errors reach Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_plugin_sdk.errors import InvalidTensorError

NAMESPACE = "ds_plugin"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_defined: set[str] = set()


def define(schema: str, *, reference: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an op; again is no error, so that a module may be imported twice.

    Args:
        schema: as `torch.library.Library.define` takes it.
        reference: the op in plain torch; it serves every device that has no kernel of its own.
        fake: what tracing sees: the same checks, outputs without data.
    """
    name = schema.partition("(")[0]
    if name in _defined:
        return
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    _defined.add(name)


def call(name: str, *args: Any) -> Any:
    """Call an op; what a native kernel refuses is raised as the reference raises it.

    Raises:
        InvalidTensorError: the arguments do not fit; nothing was modified.
    """
    try:
        return getattr(torch.ops.ds_plugin, name).default(*args)
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
