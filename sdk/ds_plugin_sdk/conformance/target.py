"""What is checked: an accelerator, and what it says of itself."""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from typing import Any

import torch

from ds_plugin_sdk import op_builder, registry
from ds_plugin_sdk.accelerator import DeepSpeedAccelerator
from ds_plugin_sdk.errors import PluginError, UnknownAcceleratorError


@dataclass(frozen=True)
class Target:
    """An accelerator under test.

    Attributes:
        name: finds it again in another process: an installed plugin's name, or ``module:attribute``.
        accelerator: the object DeepSpeed would use.
        plugin: the manifest, or None if the target is no installed plugin.
        one_task_a_run: a program that does many tasks in turn is started for one of them alone. For a target that is
            expected to fail, where the other tasks' results are not wanted.
    """

    name: str
    accelerator: Any
    plugin: registry.Plugin | None = None
    one_task_a_run: bool = False

    @staticmethod
    def find(name: str) -> Target:
        """The target of a name, made the process's accelerator.

        Args:
            name: an installed plugin, or ``module:attribute``. The attribute is called without arguments and gives an
                accelerator or a `Target`: an accelerator class, or a function that prepares one.

        Raises:
            UnknownAcceleratorError: no such plugin is installed, or the module has no such attribute.
            PluginError: it cannot be used.
        """
        if ":" in name:
            made = _attribute(name)()
            target = dataclasses.replace(made, name=name) if isinstance(made, Target) else Target(name, made)
        else:
            candidate = _installed(name)
            _expect_available(candidate)
            target = Target(name, registry.load(candidate), candidate.manifest)
        if isinstance(target.accelerator, DeepSpeedAccelerator):
            registry.set_accelerator(target.accelerator)
        return target

    @property
    def device_type(self) -> str:
        """torch's name of the device."""
        return str(self.accelerator.device_name())

    @property
    def device(self) -> torch.device:
        """The current device."""
        return torch.device(self.accelerator.current_device_name())

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The dtypes that the accelerator declares."""
        return list(self.accelerator.supported_dtypes())

    @property
    def synchronous(self) -> bool:
        """Whether it declares that it has no streams."""
        return self.accelerator.Stream is None

    def builders(self) -> dict[str, type[Any]]:
        """The op builders that the device has, by class name."""
        return op_builder.builders(self.accelerator.op_builders, self.device_type)


def _expect_available(candidate: registry.Candidate) -> None:
    probe = candidate.probe()
    if probe.state != "available":
        raise PluginError(
            "the plugin's device cannot be used here",
            plugin=candidate.name,
            why=f"its probe says: {probe}",
            hint="run this where the device is; `sdk list --explain` says what is found",
        )


def _attribute(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        absent = isinstance(error, AttributeError) or f"{module}.".startswith(f"{error.name}.")
        # A traceback tells where in the module it is that an import fails, and nothing of a module that is not there.
        raise UnknownAcceleratorError(
            "the target cannot be imported",
            plugin=name,
            why=str(error),
            hint="name it as package.module:Class; the module must be importable, by PYTHONPATH if need be",
        ) from (None if absent else error)


def _installed(name: str) -> registry.Candidate:
    installed = registry.scan()
    if name not in installed:
        raise UnknownAcceleratorError(
            "there is no such plugin",
            plugin=name,
            why=f"installed: {', '.join(installed) or 'none'}",
            hint=registry.how_to_have(name),
        )
    return registry.only(installed[name])
