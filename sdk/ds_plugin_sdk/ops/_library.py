"""How an op of the namespace ``ds_plugin`` comes to be, and how its errors reach Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_plugin_sdk.errors import InvalidTensorError

NAMESPACE = "ds_plugin"
# Every op a second time, by its reference alone: what float64 takes, and what kernels are compared with.
REFERENCE_NAMESPACE = "ds_plugin_reference"

_libraries: dict[str, Any] = {
    namespace: torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch does not say
    for namespace in (NAMESPACE, REFERENCE_NAMESPACE)
}
_defined: set[str] = set()


class Autograd(NamedTuple):
    """An op's derivative, as `torch.library.register_autograd` takes it.

    Attributes:
        backward: ``backward(ctx, *grads)`` -> a gradient or None for each argument of the op.
        setup_context: ``setup_context(ctx, inputs, output)``; saves what `backward` needs.
    """

    backward: Callable[..., Any]
    setup_context: Callable[..., None]


def define(
    schema: str, *, reference: Callable[..., Any] | None, fake: Callable[..., Any], autograd: Autograd | None = None
) -> None:
    """Define an op; again is no error, so that a module may be imported twice.

    Args:
        schema: as `torch.library.Library.define` takes it.
        reference: the op in plain torch; it serves every device that has no kernel of its own. None if plain torch
            cannot do it.
        fake: what tracing sees: the same checks, outputs without data.
        autograd: its derivative, if it has one. `backward` calls ops through `call`, so that float64 stays exact.
    """
    name = schema.partition("(")[0]
    if name in _defined:
        return
    _defined.add(name)
    for namespace, library in _libraries.items():
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        if reference is not None:
            library.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
        if autograd is not None:
            torch.library.register_autograd(
                f"{namespace}::{name}", autograd.backward, setup_context=autograd.setup_context, lib=library
            )


def call(name: str, *args: Any) -> Any:
    """Call an op whose first argument is a tensor or a list of tensors.

    Kernels compute in float32; float64 tensors take the reference. What a kernel refuses is raised as the reference
    raises it.

    Raises:
        InvalidTensorError: the arguments do not fit; nothing was modified.
    """
    first = args[0] if isinstance(args[0], Tensor) else next(iter(args[0]), None)
    exact = first is not None and first.dtype == torch.float64
    op = getattr(torch.ops.ds_plugin_reference if exact else torch.ops.ds_plugin, name).default
    try:
        return op(*args)
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
