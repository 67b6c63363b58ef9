"""How an op of the namespace ``ds_plugin`` is defined and called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from ds_plugin_sdk.errors import InvalidTensorError, SdkError
from ds_plugin_sdk.ops import _first_call
from ds_plugin_sdk.ops._checks import CheckError
from ds_plugin_sdk.ops._derived_once import derived_once
from ds_plugin_sdk.ops._underived import refuse_gradients

Reference = TypeVar("Reference", bound=Callable[..., Any])

NAMESPACE = "ds_plugin"
# Every op a second time, with its reference implementation only: for float64, and to compare kernels with.
REFERENCE_NAMESPACE = "ds_plugin_reference"

_libraries: dict[str, Any] = {
    namespace: torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch gives it no type
    for namespace in (NAMESPACE, REFERENCE_NAMESPACE)
}
_defined: set[str] = set()
_passed: set[str] = set()  # that a backward pass may meet: they have derivatives, or gradients are to pass by them

# Within an op torch's autocast is off, or the matrix products of kernels and references would give other dtypes than
# they expect.
_AUTOCAST = [key for name, key in torch._C.DispatchKey.__members__.items() if name.startswith("Autocast")]


class Autograd(NamedTuple):
    """An op's derivative, as `torch.library.register_autograd` takes it.

    Attributes:
        backward: ``backward(ctx, *grads)`` -> a gradient or None for each argument of the op. Gradients of these
            gradients are an error.
        setup_context: ``setup_context(ctx, inputs, output)``; saves what `backward` needs.
        raises: `backward` raises that error itself, as it must where it does not save what gradients depend on.
    """

    backward: Callable[..., Any]
    setup_context: Callable[..., None]
    raises: bool = False


def op(
    schema: str,
    *,
    check: Callable[..., None],
    outputs: Callable[..., Any] | None = None,
    autograd: Autograd | None = None,
    unrecorded: bool = False,
) -> Callable[[Reference], Reference]:
    """Define an op by its reference implementation, the function that follows::

        @op("scale(Tensor input, float by) -> Tensor", check=_check, outputs=lambda input: torch.empty_like(input))
        def scale_reference(input: Tensor, by: float) -> Tensor: ...

    That is the computation in plain torch. It serves every device that has no kernel of its own. It runs after `check`
    and without autograd. What only memory or values tell, it checks itself, since tracing has neither. The kernels of
    an op of the SDK's, whose module says the family, are loaded at its first call on a device.

    Each of the three functions takes the op's arguments that its parameters name. Where a parameter has a default the
    op may be without that argument, so that ops can share a check. Checks raise `CheckError`.

    Args:
        schema: as `torch.library.Library.define` takes it.
        check: checks the arguments, also while tracing.
        outputs: what the op returns, without data, for tracing; None if it returns nothing.
        autograd: the op's derivative, if it has one. `backward` calls ops through `call`, so that float64 stays exact.
        unrecorded: gradients pass by the op, which writes in place; else a backward pass through it raises.

    Returns:
        A decorator. The function that it returns checks and computes; it raises `InvalidTensorError`.
    """

    def decorate(reference: Reference) -> Reference:
        name, arguments = _parsed(schema)
        checks, computes, traces = (
            _selecting(function, name, arguments) for function in (check, reference, outputs or _nothing)
        )
        implementation = torch.no_grad()(_checked(name, checks, computes))
        family = _first_call.family_of(reference.__module__)
        fake = _checked(name, checks, traces)
        register(schema, implementation, fake=fake, autograd=autograd, family=family, unrecorded=unrecorded)
        return cast(Reference, functools.update_wrapper(implementation, reference))

    return decorate


def register(
    schema: str,
    implementation: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    autograd: Autograd | None = None,
    family: str | None = None,
    unrecorded: bool = False,
) -> None:
    """Register an op with torch; again is no error, so that a module may be imported twice.

    Args:
        schema, autograd: as `op` takes them.
        implementation: for every device that has no kernel of its own.
        fake: for tracing.
        family: module of `ds_plugin_sdk.ops` whose kernels are loaded at the first call on a device; None loads none.
        unrecorded: as `op` takes it.
    """
    name, _ = _parsed(schema)
    if name in _defined:
        return
    _defined.add(name)
    if autograd is not None or unrecorded:
        _passed.add(name)
    for namespace, library in _libraries.items():
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        serves = implementation
        if family is not None and namespace != REFERENCE_NAMESPACE:
            serves = _first_call.loading(f"{namespace}::{name}", family, implementation)
        library.impl(name, serves, "CompositeExplicitAutograd")
        for key in _AUTOCAST:
            library.impl(name, _without_autocast(namespace, name, key), key.name)
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
        if autograd is not None:
            torch.library.register_autograd(
                f"{namespace}::{name}",
                autograd.backward if autograd.raises else derived_once(name, autograd.backward),
                setup_context=autograd.setup_context,
                lib=library,
            )


def _without_autocast(namespace: str, name: str, key: torch._C.DispatchKey) -> Callable[..., Any]:
    """What serves an op under autocast: the op as it is elsewhere."""
    keys = torch._C.DispatchKeySet(key)

    def run(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return getattr(getattr(torch.ops, namespace), name).default(*args)

    return run


def _parsed(schema: str) -> tuple[str, tuple[str, ...]]:
    """The name of an op and those of its arguments."""
    name, _, rest = schema.partition("(")
    arguments = rest.rpartition(") -> ")[0].split(", ")
    return name, tuple(argument.split()[1].partition("=")[0] for argument in arguments)


def _selecting(function: Callable[..., Any], op: str, arguments: tuple[str, ...]) -> Callable[..., Any]:
    """A function of all of an op's arguments, which hands `function` those that its parameters name."""
    code, defaults = cast(FunctionType, function).__code__, cast(FunctionType, function).__defaults__ or ()
    parameters = code.co_varnames[: code.co_argcount]  # inspect.signature says the same, but takes 20 microseconds
    for name in parameters[: len(parameters) - len(defaults)]:
        if name not in arguments:
            raise TypeError(f"{function.__qualname__} has a parameter {name}, and {op} no such argument")
    if parameters == arguments:
        return function
    selected = [(name, arguments.index(name)) for name in parameters if name in arguments]
    return lambda *args: function(**{name: args[i] for name, i in selected})


def _checked(name: str, check: Callable[..., None], compute: Callable[..., Any]) -> Callable[..., Any]:
    """The check, then `compute`; an error has the op's name."""

    def run(*args: Any) -> Any:
        try:
            check(*args)
            return compute(*args)
        except CheckError as error:
            raise invalid(name, str(error)) from None

    return run


def _nothing() -> None:
    """What an op returns that works in place."""


def call(name: str, *args: Any) -> Any:
    """Call an op whose first argument is a tensor or a list of tensors.

    Kernels compute in float32; float64 tensors take the reference implementation. What a kernel rejects is raised as
    the reference implementation raises it. A backward pass through the result of an op without derivatives raises
    `SdkError`.

    Raises:
        InvalidTensorError: the arguments do not fit; nothing was modified.
        SdkError: an argument has a tangent, which torch would drop.
    """
    if forward_ad._current_level >= 0:
        _check_no_tangents(name, args)
    first = args[0] if isinstance(args[0], Tensor) else next(iter(args[0]), None)
    exact = first is not None and first.dtype == torch.float64
    op = getattr(torch.ops.ds_plugin_reference if exact else torch.ops.ds_plugin, name).default
    try:
        result = op(*args)
    except RuntimeError as error:
        prefix = f"{NAMESPACE}::{name}: "
        message = str(error).partition("\n")[0]
        if not message.startswith(prefix):
            raise
        raise invalid(name, message.removeprefix(prefix)) from error
    if torch.is_grad_enabled() and name not in _passed:
        refuse_gradients(name, (args[0], result) if name.endswith("_") else result)
    return result


def _check_no_tangents(name: str, args: tuple[Any, ...]) -> None:
    flat = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else (arg,))]
    tensors = [_one_of_batch(each) for each in flat if isinstance(each, Tensor)]
    unpacked = [forward_ad.unpack_dual(each) for each in tensors]  # type: ignore[no-untyped-call]  # torch gives it no type
    if any(each.tangent is not None for each in unpacked):
        raise SdkError(
            "no forward-mode derivative",
            op=name,
            why="an argument has a tangent (torch.func.jvp, or torch.autograd.forward_ad)",
            hint="torch's own functions have forward-mode derivatives, and so have the functions of ds_plugin_sdk.nn",
        )


def _one_of_batch(tensor: Tensor) -> Tensor:
    """What `torch.vmap` hides, which knows of no tangents."""
    while torch._C._functorch.is_batchedtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def mark_modified(*lists: Sequence[Tensor]) -> None:
    """Let autograd notice what a kernel wrote behind its back."""
    if not torch.compiler.is_compiling():  # there the op's schema says it
        increment_version([tensor for tensors in lists for tensor in tensors])


def invalid(op: str, message: str) -> InvalidTensorError:
    """The error for ``"<what is wrong>; <what was expected>"``, the form in which kernels state it."""
    what, _, expected = message.partition("; ")
    return InvalidTensorError(what, op=op, why=expected)
