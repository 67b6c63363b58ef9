"""Whether modules are still what they were found to be: their classes, code, hooks, children and numbers."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.pytorch_utils import Conv1D

from ds_plugin_sdk.integrations.transformers.as_found import AsFound
from ds_plugin_sdk.integrations.transformers.replacement import is_own
from ds_plugin_sdk.integrations.transformers.understood import (
    ACTIVATIONS,
    GLOBAL_HOOKS,
    RMS_NORMS,
    Called,
    are_idle,
    called_functions,
    has_code,
    hooks_of,
    torch_has_its_functions,
)

_is_training = operator.itemgetter("training")
_code_of = operator.attrgetter("forward", "__call__", "_call_impl")  # of a class


class Watch:
    """Tells whether modules are still what they were found to be."""

    def __init__(
        self, replaced: Sequence[nn.Module], inner: Sequence[nn.Module] = (), hooked: Sequence[nn.Module] = ()
    ) -> None:
        """
        Args:
            replaced: modules with another forward, which must keep their class.
            inner: modules in them, which are not called any more: they must keep all that their calls depend on.
            hooked: modules that must have no hooks, as those in `inner`.
        """
        self._hooked = [*hooked, *inner]
        self._everywhere = GLOBAL_HOOKS if inner else ()
        self._find_hooks()
        self._modules = [*replaced, *inner]
        self._kinds = [*map(type, self._modules)]
        self._inner = [vars(module) for module in inner]
        self._forwards: list[object] = [None] * len(inner)  # on the instances, as they were when last looked at
        asked = self._modules if inner else []
        self._not_training = [vars(module) for module in asked if not _ignores_training(module)]
        self._children = [module._modules for module in self._modules if module._modules]
        self._known_children = [dict(each) for each in self._children]
        self._distinct: list[type[Any]] = [*dict.fromkeys(self._kinds)]
        self._code = [*map(_code_of, self._distinct)]
        self._called = [each for kind in self._distinct for each in called_functions(kind.forward)] if inner else []
        methods = [each for kind in self._distinct for each in kind.__mro__ if "_norm" in vars(each)]
        self._called += [Called(vars(each), "_norm", vars(each)["_norm"]) for each in methods]  # Gemma's
        # Eps, scales, choices and functions, which a module's own code reads at each call.
        attributes = [(vars(module), *item) for module in self._modules for item in vars(module).items()]
        read = [each for each in attributes if _is_read(*each[1:])]
        read += [(vars(module), "_norm", None) for module in self._modules if hasattr(type(module), "_norm")]
        read += [(vars(module), "_call_impl", None) for module in inner]
        configs = {id(config): config for config in map(_options_of, inner)}  # most share one
        read += [(config, *each) for config in configs.values() for each in _dropping(config)]
        self._owners: list[dict[str, Any]] = [owner for owner, _, _ in read]
        self._names, self._values = [name for _, name, _ in read], [value for _, _, value in read]
        self._gather()

    @classmethod
    def alone(cls, module: nn.Module) -> Watch:
        """A module without others in it: its hooks are still called, but may be there to change its parameters."""
        return cls([module], hooked=[module])

    @classmethod
    def over(cls, *layers: nn.Module, hooked: Sequence[nn.Module] = ()) -> Watch:
        """Layers with all modules in them; `hooked` as above."""
        return cls(layers, [m for layer in layers for m in list(layer.modules())[1:]], hooked)

    def _find_hooks(self) -> None:
        # torch counts the hooks that are registered anywhere.
        self._registered = RemovableHandle.next_id
        self._hooks = (*self._everywhere, *(found for module in self._hooked for found in hooks_of(module)))

    def _gather(self) -> None:
        """What `_are_as_found` asks, as one call takes it."""
        forwards = zip(self._inner, repeat("forward"), self._forwards, strict=False)
        found = [*forwards, *((owner, "training", False) for owner in self._not_training)]
        found += zip(self._owners, self._names, self._values, strict=True)
        self._found = AsFound(self._modules, self._kinds, self._hooks, found)

    def holds(self) -> bool:
        """No hooks, no other forward, class or code, no other children or numbers, no training mode that matters."""
        if RemovableHandle.next_id != self._registered:
            self._find_hooks()  # a module may have got other dictionaries before
            self._gather()
        return (
            (self._found.holds() or self._are_as_found())
            and self._children == self._known_children
            and [*map(_code_of, self._distinct)] == self._code
            and all(names.get(name) is value for names, name, value in self._called)
            and torch_has_its_functions()
        )

    def _are_as_found(self) -> bool:
        return (
            are_idle(self._hooks)
            and [*map(type, self._modules)] == self._kinds
            and not any(map(_is_training, self._not_training))
            and (
                all(map(operator.is_, map(dict.get, self._inner, repeat("forward")), self._forwards))
                or self._have_their_forwards()
            )
            and [*map(dict.get, self._owners, self._names)] == self._values
        )

    def _have_their_forwards(self) -> bool:
        inner = self._modules[-len(self._inner) :]
        forwards = [vars(module).get("forward") for module in inner]
        found = zip(inner, forwards, strict=True)
        if any(forward is not None and not is_own(module, forward) for module, forward in found):
            return False
        self._forwards = forwards
        self._gather()
        return True


# What is asked elsewhere, does not matter without gradients, or is no part of what a forward computes.
_NOT_READ = (
    *("forward", "training", "gradient_checkpointing", "_gradient_checkpointing_func"),
    *("layer_idx", "in_features", "out_features"),
)


def _is_read(name: str, value: object) -> bool:
    return name not in _NOT_READ and (isinstance(value, int | float) or callable(value) or name == "sliding_window")


def _ignores_training(module: nn.Module) -> bool:
    """Whether the module does the same in training."""
    kind = type(module)
    if kind in (nn.Linear, nn.LayerNorm, Conv1D, *ACTIVATIONS) or has_code(module, *RMS_NORMS, GemmaRMSNorm):
        return True
    if kind is nn.Dropout:
        return bool(module.p == 0)
    options = [value for owner in (vars(module), _options_of(module)) for _, value in _dropping(owner)]
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    asks = code is None or "training" in code.co_names
    return not any(options) and (bool(options) or not asks)


def _options_of(module: nn.Module) -> dict[str, Any]:
    """Those of its configuration."""
    return getattr(getattr(module, "config", None), "__dict__", {})


def _dropping(options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Those of a module or its configuration that say how much its code drops, or changes at random, in training."""
    return ((name, value) for name, value in options.items() if "drop" in name or "jitter" in name)


__all__ = ["Watch"]
