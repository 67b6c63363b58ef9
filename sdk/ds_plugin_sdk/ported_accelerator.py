"""`PortedAccelerator`: for an accelerator class that was written against DeepSpeed's abstract class of any release.

    - from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
    - class XPU_Accelerator(DeepSpeedAccelerator):
    + from ds_plugin_sdk import PortedAccelerator
    + class XPU_Accelerator(PortedAccelerator):

What the class lacks, the SDK's defaults answer. Methods whose arguments changed between releases are made to take what
any release passes. `docs/porting.md` says what can then be deleted.

An instance of such a class whose base nobody has changed is given the same by `port`, when it is set.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

from ds_plugin_sdk.accelerator import DeepSpeedAccelerator
from ds_plugin_sdk.errors import InvalidAcceleratorError

_MORE, _NAMED = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD

# Members whose arguments changed: initial_seed lost one in 0.14.3, range_push and range_pop gained some in 0.19.0,
# pin_memory had align_bytes and has make_copy and match_shape since 0.19.6.
_CHANGED = ("initial_seed", "pin_memory", "range_pop", "range_push")


class PortedAccelerator(DeepSpeedAccelerator):
    """An accelerator class of DeepSpeed's own kind, made to fit every release of DeepSpeed."""

    def __init__(self) -> None:
        # Methods may read what the class's own __init__ sets after this one: `port` asks them again.
        with contextlib.suppress(AttributeError):
            _name(self)
        self._compile_backend = type(self)._compile_backend
        self._check_flags()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in _CHANGED:
            method = cls.__dict__.get(name)
            if method is not None:
                setattr(cls, name, _pin_memory(method) if name == "pin_memory" else _tolerant(method))


def port(accelerator: Any) -> DeepSpeedAccelerator:
    """An accelerator as the SDK serves it.

    One of DeepSpeed's own abstract class becomes, in place, an instance of a class derived from its own and
    `PortedAccelerator`: it stays the object that the program has.

    The class's builders stay where it offers the op; the SDK's serve where it raises, or gives
    DeepSpeed's ``NotImplementedBuilder`` or a builder that cannot be made here.

    Raises:
        InvalidAcceleratorError: it is no accelerator, or names neither its device nor, if it has any, its op builders,
            or has a text where a tuple of names is meant.
    """
    if isinstance(accelerator, DeepSpeedAccelerator):
        if isinstance(accelerator, PortedAccelerator):
            _name(accelerator)
        _check(accelerator)
        return accelerator
    if not written_for_deepspeed(accelerator):
        raise InvalidAcceleratorError(
            "this is no accelerator",
            why=f"{accelerator!r} is not an instance of ds_plugin_sdk.DeepSpeedAccelerator, nor of DeepSpeed's own",
            hint="pass an instance (not the class) of a subclass of TorchAccelerator, or of PortedAccelerator for a "
            "class that was written for DeepSpeed's tree",
        )
    cls: type[Any] = type(accelerator)
    accelerator.__class__ = _ported(cls)  # type: ignore[arg-type]  # mypy takes a class for unhashable
    ported: DeepSpeedAccelerator = accelerator
    _name(ported)
    _check(ported)
    return ported


def _name(accelerator: DeepSpeedAccelerator) -> None:
    """Set the attributes that DeepSpeed reads directly, where they are not."""
    for name, value in (
        ("_name", accelerator.device_name),
        ("_communication_backend_name", accelerator.communication_backend_name),
    ):
        if not hasattr(accelerator, name):
            setattr(accelerator, name, value())


def _check(accelerator: DeepSpeedAccelerator) -> None:
    """Raise where a name in it is none: DeepSpeed would fail at it later, and name nobody."""
    _check_name(accelerator)
    exported: object = accelerator.exported_envs
    if isinstance(exported, str):
        raise InvalidAcceleratorError(
            f"{type(accelerator).__name__} does not say which variables other nodes get",
            plugin=accelerator._name,
            why=f"exported_envs is the text {exported!r}, and each letter of it would be a prefix",
            hint=f"write a tuple: ({exported!r},)",
        )
    package: object = accelerator.op_builders
    if package is not None and not (isinstance(package, str) and package):
        raise InvalidAcceleratorError(
            f"{type(accelerator).__name__} does not say where its op builders are",
            plugin=accelerator._name,
            why=f"op_builders is {package!r}",
            hint="write the dotted name of the package as a text, such as 'ds_plugin_zap.op_builder'",
        )


def _check_name(accelerator: DeepSpeedAccelerator) -> None:
    name = getattr(accelerator, "_name", None)
    if isinstance(name, str) and name:
        return
    unset = not hasattr(accelerator, "_name")
    raise InvalidAcceleratorError(
        f"{type(accelerator).__name__} does not say which device it is",
        why="its __init__ has not called super().__init__()" if unset else f"device_name() gives {name!r}",
        hint="begin __init__ with super().__init__()" if unset else "return torch's name of the device, such as 'zap'",
    )


def written_for_deepspeed(accelerator: object) -> bool:
    """Whether it is an instance of a class on DeepSpeed's abstract class, in whichever of its modules that is."""
    return any(base.__name__ == "DeepSpeedAccelerator" for base in type(accelerator).__mro__)


@functools.cache
def _ported(cls: type[Any]) -> type[Any]:
    def get_op_builder(self: Any, class_name: str) -> type[Any]:
        own = _offered(lambda: cls.get_op_builder(self, class_name))
        return DeepSpeedAccelerator.get_op_builder(self, class_name) if own is None else own

    members: dict[str, Any] = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__qualname__": cls.__qualname__,
        "get_op_builder": get_op_builder,
        "create_op_builder": DeepSpeedAccelerator.create_op_builder,
    }
    for name in _CHANGED:
        method = getattr(cls, name, None)
        if inspect.isfunction(method):
            members[name] = _pin_memory(method) if name == "pin_memory" else _tolerant(method)
    return type(cls.__name__, (cls, PortedAccelerator), members)


def _offered(builder: Callable[[], Any]) -> type[Any] | None:
    """The builder class that a class written for DeepSpeed gives, if it builds an op."""
    try:
        own = builder()
    except Exception:  # DeepSpeed's own accelerators ask for the vendor's toolchain here
        return None
    builds = isinstance(own, type) and getattr(own, "NAME", "") not in ("", "deepspeed_not_implemented")
    return own if builds and _can_be_made(own) else None


@functools.cache
def _can_be_made(builder: Callable[[], Any]) -> bool:
    try:
        builder()
    except Exception:
        return False
    return True


def _tolerant(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, called with those arguments only that it knows; one that it needs and does not get is None."""
    given = list(inspect.signature(method).parameters.values())[1:]
    any_more, any_named = (any(each.kind == kind for each in given) for kind in (_MORE, _NAMED))  # *args, **kwargs
    parameters = [each for each in given if each.kind not in (_MORE, _NAMED)]
    names = {parameter.name for parameter in parameters}
    needed = [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty]

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = {name: value for name, value in kwargs.items() if any_named or name in names}
        missing = {name: None for name in needed[len(args) :] if name not in known}
        return method(self, *(args if any_more else args[: len(parameters)]), **known, **missing)

    return call


def _pin_memory(method: Callable[..., Any]) -> Callable[..., Any]:
    """An old `pin_memory` always copies and keeps the shape; without ``match_shape`` the result has one dimension."""
    if "make_copy" in inspect.signature(method).parameters:
        return method

    @functools.wraps(method)
    def pin_memory(self: Any, tensor: Any, make_copy: bool = True, match_shape: bool = True, **_: Any) -> Any:
        pinned = method(self, tensor)
        return pinned if match_shape else pinned.reshape(-1)

    return pin_memory
