"""A forward on an instance of a module, in the place of its class's."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

# An attribute of a function that runs a replacement: which one.
REPLACEMENT = "ds_plugin_replacement"


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
        is_on: whether it was put on, and not taken off since. Who wrapped it meanwhile may call it later all the same:
            it is the module's own code then.
    """

    is_on = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's class does."""
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __func__(self) -> Callable[..., Any]:
        """What a bound method has here, for code that wraps forwards by their functions, as compressed-tensors does."""
        return type(self.module).forward

    @property
    def __code__(self) -> Any:
        """For torch.export, which asks for arguments."""
        return getattr(type(self.module).forward, "__code__", None)

    @functools.cached_property
    def __signature__(self) -> inspect.Signature:
        """transformers asks which arguments a model takes."""
        return inspect.signature(types.MethodType(type(self.module).forward, self.module))

    def put_on(self) -> None:
        # On the instance: its class stays. copy and pickle ask for the second, nn.DataParallel for the third.
        vars(self.module).update(forward=self, __getstate__=self._state, _replicate_for_data_parallel=self._replica)
        self.is_on = True

    def take_off(self) -> None:
        """Give the module its forward back, unless somebody has given it another one since."""
        self._remove_from(vars(self.module))
        self.is_on = False

    def _remove_from(self, attributes: dict[str, Any]) -> None:
        for name in ("forward", "__getstate__", "_replicate_for_data_parallel"):
            if name in attributes and self._is_own(attributes[name]):
                del attributes[name]

    def _is_own(self, attribute: object) -> bool:
        return attribute is self or getattr(attribute, "__self__", None) is self

    def _state(self) -> Any:
        own = getattr(type(self.module), "__getstate__", vars)  # Python 3.10 has none for all objects
        state = own(self.module)
        if isinstance(state, dict):
            state = {**state}
            self._remove_from(state)
        return state

    def _replica(self) -> nn.Module:
        replica: nn.Module = type(self.module)._replicate_for_data_parallel(self.module)  # type: ignore[no-untyped-call]  # torch gives it no type
        self._remove_from(vars(replica))
        return replica

    def holds(self) -> bool:
        """Whether the module is still what it was found to be."""
        raise NotImplementedError

    @property
    def why_not(self) -> str:
        """Why it does not hold, or is not its module's forward any more."""
        return "it is in training mode" if self.module.training else "it was changed after accelerate()"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module]]:
        """Where a wrapper of it is copied, what its class does."""
        return _own_forward, (self.module,)


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


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(module).forward, module)


def is_replaced(module: nn.Module) -> bool:
    """Whether its forward is one of ours, or a wrapper around the function of one."""
    forward = vars(module).get("forward")
    if callable(forward) and not isinstance(forward, Replacement):
        forward = getattr(inspect.unwrap(forward), REPLACEMENT, None)
    return isinstance(forward, Replacement) and forward.is_on and forward.module is module


__all__ = ["REPLACEMENT", "Replacement", "TrainingReplacement", "forward_in_place", "is_replaced"]
