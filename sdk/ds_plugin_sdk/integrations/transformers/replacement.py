"""A forward on an instance of a module, in the place of its class's."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import nn


class Replacement:
    """A forward on an instance. A copy of the module, or one that was pickled, has its class's again."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's class does."""
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __func__(self) -> Callable[..., Any]:
        """What a bound method has here, for code that wraps forwards by their functions, as compressed-tensors does."""
        return type(self.module).forward

    def put_on(self) -> None:
        self.module.forward = self  # type: ignore[assignment]  # on the instance: its class stays

    def take_off(self) -> None:
        """Give the module its forward back, unless somebody has given it another one since."""
        if vars(self.module).get("forward") is self:
            del self.module.forward

    def holds(self) -> bool:
        """Whether the module is still what it was found to be."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module]]:
        return _own_forward, (self.module,)


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(module).forward, module)


def is_replaced(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), Replacement)


__all__ = ["Replacement", "is_replaced"]
