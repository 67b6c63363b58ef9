"""The one thing that runs at `import torch`: an import hook that waits for DeepSpeed, and for those who start it.

An error here would break ``import torch`` for everybody on the machine, and so would slowness. So this module imports
nothing but what Python has loaded already, reads no file, and leaves all work to modules that it names as text and
imports when they are needed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

REAL_ACCELERATOR = "deepspeed.accelerator.real_accelerator"

_ACCELERATE = "ds_plugin_sdk.integrations.accelerate"
_LIGHTNING = "ds_plugin_sdk.integrations.lightning"

# Right after the module on the left was executed, the function on the right is called with it.
_AFTER = {
    REAL_ACCELERATOR: "ds_plugin_sdk.integrations.deepspeed.adopt:adopt",
    "deepspeed.comm.torch": "ds_plugin_sdk.integrations.deepspeed.collectives:replace",
    "deepspeed.inference.engine": "ds_plugin_sdk.integrations.deepspeed.injection:explain",
    "deepspeed.launcher.multinode_runner": "ds_plugin_sdk.integrations.deepspeed.launcher:carry_settings",
    "deepspeed.model_implementations.transformers.ds_transformer": (
        "ds_plugin_sdk.integrations.deepspeed.injection:explain_layers"
    ),
    "deepspeed.ops.op_builder.all_ops": "ds_plugin_sdk.integrations.deepspeed.op_table:complete",
    "deepspeed.runtime.hybrid_engine": "ds_plugin_sdk.integrations.deepspeed.injection:explain_hybrid",
    "deepspeed.runtime.zero.utils": "ds_plugin_sdk.integrations.deepspeed.zero:admit_optimizers",
    # Those who start DeepSpeed for the user. Lightning's packages have two names each.
    "accelerate.state": f"{_ACCELERATE}:follow_in_state",
    "accelerate.utils.launch": f"{_ACCELERATE}:follow_in_launch",
    "transformers.training_args": f"{_ACCELERATE}:follow_in_trainer",
    "lightning.fabric.connector": f"{_LIGHTNING}:follow_in_connector",
    "lightning.fabric.strategies.deepspeed": f"{_LIGHTNING}:follow_in_strategy",
    "lightning.pytorch.strategies.deepspeed": f"{_LIGHTNING}:follow_in_strategy",
    "lightning.pytorch.trainer.connectors.accelerator_connector": f"{_LIGHTNING}:follow_in_connector",
    "lightning_fabric.connector": f"{_LIGHTNING}:follow_in_connector",
    "lightning_fabric.strategies.deepspeed": f"{_LIGHTNING}:follow_in_strategy",
    "pytorch_lightning.strategies.deepspeed": f"{_LIGHTNING}:follow_in_strategy",
    "pytorch_lightning.trainer.connectors.accelerator_connector": f"{_LIGHTNING}:follow_in_connector",
}


class _Loader(importlib.abc.Loader):
    """A module's own loader, and a call when the module was executed. It removes itself before that call."""

    def __init__(self, loader: Any, then: str) -> None:
        self._loader = loader
        self._then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        _call(self._then, module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the other finders find, for the modules in `_AFTER` only."""

    def __init__(self) -> None:
        self._sought: set[str] = set()  # modules that the other finders are asked for, some of whom ask all in turn

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        then = _AFTER.get(fullname)
        if then is None or fullname in self._sought:
            return None
        self._sought.add(fullname)
        try:
            spec = self._by_others(fullname, path, target)
        finally:
            self._sought.discard(fullname)
        if spec is not None:
            spec.loader = _Loader(spec.loader, then)
        return spec

    def _by_others(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)  # very old finders have none
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                return spec
        return None


class _SpecInUse(ModuleSpec):
    """The spec of a module that is being executed, and a call when that is done. Python then says so to the spec."""

    @property
    def _initializing(self) -> bool:
        return True

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        if value:
            return
        self.__class__ = ModuleSpec  # type: ignore[assignment]  # mypy wants a subclass; this is the class it had
        self._initializing = False
        module = sys.modules.get(self.name)
        if module is not None:  # else it has failed
            _call(_AFTER[self.name], module)


def install() -> None:
    """Make plugins known to DeepSpeed, now or when it is imported. Idempotent; never raises.

    torch calls this at the end of its import (entry point ``torch.backends``); so does ``import ds_plugin_sdk``.
    """
    try:
        if any(type(finder) is _Finder for finder in sys.meta_path):
            return
        sys.meta_path.insert(0, _Finder())
        late = _AFTER | {REAL_ACCELERATOR: "ds_plugin_sdk.integrations.deepspeed.adopt:adopt_late"}
        for name, then in late.items():
            module = sys.modules.get(name)
            if module is not None:
                _catch_up(module, then)
    except Exception as error:
        _complain(error)


def _catch_up(module: ModuleType, then: str) -> None:
    """Do what is due after a module that came before torch: now, or when it is done, if it is what imports torch."""
    spec = getattr(module, "__spec__", None)  # what a test puts into the place of a module may have none
    if type(spec) is ModuleSpec and getattr(spec, "_initializing", False):
        spec.__class__ = _SpecInUse
    else:
        _call(then, module)


def _call(target: str, module: ModuleType) -> None:
    """Call ``"module:function"`` with a module. An error is only worth a warning, except for what `adopt` raises: that
    the accelerator which the user named cannot be had.
    """
    module_name, _, name = target.partition(":")
    adopts = module.__name__ == REAL_ACCELERATOR
    try:
        function = getattr(importlib.import_module(module_name), name)
    except Exception as error:
        _complain(error, "DeepSpeed will not see any plugin" if adopts else f"{module.__name__} stays as it is")
        return
    try:
        function(module)
    except Exception as error:
        if adopts:
            raise
        _complain(error, f"{target} failed, {module.__name__} stays as it is")


def _complain(error: Exception, consequence: str = "DeepSpeed will not see any plugin") -> None:
    with contextlib.suppress(Warning):  # under -W error it is an exception, and the import must continue
        warnings.warn(f"ds-plugin-sdk: {consequence}: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=3)
