"""A forward on an instance of a module, in the place of its class's."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ds_plugin_sdk.thread_lock import ThreadLock

# Where a module has its replacement.
_REPLACEMENT = "_ds_plugin_replacement"


@contextlib.contextmanager
def forward_in_place(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """A module's forward is another one, whose hooks are called as ever. It then has again what it had."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


class Replacement:
    """A forward on an instance. Copies of the module have their class's: copied, pickled or made by nn.DataParallel.

    Attributes:
        forward: what the instance has.
        is_on: whether it was put on, and not taken off since.
    """

    is_on = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward = types.MethodType(_forward_like(type(module).forward), module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's class does."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def put_on(self) -> None:
        # On the instance: its class stays. copy and pickle ask for the third, nn.DataParallel for the fourth.
        vars(self.module).update(
            {
                "forward": self.forward,
                _REPLACEMENT: self,
                "__getstate__": types.MethodType(_state, self.module),
                "_replicate_for_data_parallel": types.MethodType(_replica, self.module),
            }
        )
        self.is_on = True

    def take_off(self) -> None:
        """Give the module its forward back, unless somebody has given it another one since."""
        if vars(self.module).get(_REPLACEMENT) is self:
            _remove_from(vars(self.module))
        self.is_on = False

    def is_in(self, forward: object) -> bool:
        """Whether a forward is this one's, and nobody's who has wrapped it."""
        return forward == self.forward

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Of who copies what a module has, without asking it for its state, the copy has no replacement."""
        return type(None), ()

    def holds(self) -> bool:
        """Whether the module is still what it was found to be."""
        raise NotImplementedError

    @property
    def why_not(self) -> str:
        """Why it does not hold, or is not its module's forward any more."""
        return "it is in training mode" if self.module.training else "it was changed after accelerate()"


class TrainingReplacement(Replacement):
    """A forward for training alone, and only where ops do what the module's own code does; hooks are called as ever."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._forward = type(module).forward

    def holds(self) -> bool:
        return True

    def trains(self) -> bool:
        """Checkpoints may run it once without gradients, and must get the same then."""
        return (
            self.is_on
            and (torch.is_grad_enabled() or self.module.training)
            and type(self.module).forward is self._forward
            and not torch.compiler.is_compiling()
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.in_training(args[0]) if len(args) == 1 and not kwargs and self.trains() else None
        return self.own(*args, **kwargs) if result is None else result

    def in_training(self, input: Any) -> Any:
        """What it gives; None if its own code is to run."""
        raise NotImplementedError


def _state(module: nn.Module) -> Any:
    """For copy and pickle: what the module's class says, as if nothing had been put on."""
    own = getattr(type(module), "__getstate__", vars)  # Python 3.10 has none for all objects
    state = own(module)
    if isinstance(state, dict):
        state = {**state}
        _remove_from(state)
    return state


def _replica(module: nn.Module) -> nn.Module:
    replica: nn.Module = type(module)._replicate_for_data_parallel(module)  # type: ignore[no-untyped-call]  # torch gives it no type
    _remove_from(vars(replica))
    return replica


def _remove_from(attributes: dict[str, Any]) -> None:
    """Remove what replacements put on a module."""
    attributes.pop(_REPLACEMENT, None)
    for name in ("forward", "__getstate__", "_replicate_for_data_parallel"):
        if getattr(attributes.get(name), "__func__", None) in _methods:
            del attributes[name]


_methods: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet((_state, _replica))
_forwards: weakref.WeakValueDictionary[Callable[..., Any], Callable[..., Any]] = weakref.WeakValueDictionary()


def _forward_like(own: Callable[..., Any]) -> Callable[..., Any]:
    """A method that runs the module's replacement. It is the class's for a module that has none, as copies have, and
    where somebody has wrapped it: what that one does to the module is not known.

    All modules of a class have the same function: Dynamo compiles them once, if each is compiled by itself.
    """
    with _making:
        found = _forwards.get(own)
        if found is None:
            found = _forwards[own] = _new_forward(own)
            _methods.add(found)
    return found


_making = ThreadLock()


def _new_forward(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        replacement = module.__dict__.get(_REPLACEMENT)
        if replacement is None:
            return type(module).forward(module, *args, **kwargs)
        # Dynamo would compile each module for its own forward.
        if not torch.compiler.is_compiling() and not replacement.is_in(module.__dict__.get("forward")):
            return type(module).forward(module, *args, **kwargs)
        return replacement(*args, **kwargs)

    del forward.__wrapped__  # accelerate takes wrappers off until there is none
    with contextlib.suppress(ValueError):  # of a function in C
        forward.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]  # inspect asks for it
    return forward


# What is between a module's call and its replacement: of all modules the same, so that any class's tells it.
FORWARD_CODE = _new_forward(nn.Identity.forward).__code__


def is_own(module: nn.Module, forward: object) -> bool:
    """Whether a forward computes what the class's does: that, or one of ours that runs it."""
    own = type(module).forward
    if not isinstance(forward, types.MethodType) or forward.__self__ is not module:
        return False
    replacement = vars(module).get(_REPLACEMENT)
    runs_it = replacement is None or isinstance(replacement, TrainingReplacement)
    return forward.__func__ is own or (forward.__func__ is _forwards.get(own) and runs_it)


def is_replaced(module: nn.Module) -> bool:
    """Whether its forward is one of ours."""
    replacement = vars(module).get(_REPLACEMENT)
    return replacement is not None and replacement.is_on and replacement.is_in(vars(module).get("forward"))


__all__ = ["FORWARD_CODE", "Replacement", "TrainingReplacement", "forward_in_place", "is_own", "is_replaced"]
