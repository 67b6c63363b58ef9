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
        name: as given by the user: an installed plugin's name, or ``module:Class``.
        accelerator: the object DeepSpeed would use.
        plugin: the manifest, or None for a class that was named.
    """

    name: str
    accelerator: Any
    plugin: registry.Plugin | None = None

    @staticmethod
    def find(name: str) -> Target:
        """The target of a name, made the process's accelerator; with a deliberate defect if named ``<name>@<mutant>``.

        Raises:
            UnknownAcceleratorError: no such plugin is installed, or there is no such mutant.
            PluginError: it cannot be used.
        """
        name, _, mutant = name.partition("@")
        target = Target._sound(name)
        return _with_defect(target, mutant) if mutant else target

    @staticmethod
    def _sound(name: str) -> Target:
        if ":" in name:
            accelerator, plugin = _class_of(name)(), None
        else:
            candidate = _installed(name)
            _expect_available(candidate)
            accelerator, plugin = registry.load(candidate), candidate.manifest
        if isinstance(accelerator, DeepSpeedAccelerator):
            registry.set_accelerator(accelerator)
        return Target(name, accelerator, plugin)

    @property
    def device_type(self) -> str:
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


def _with_defect(target: Target, name: str) -> Target:
    from ds_plugin_sdk.conformance import mutants

    return dataclasses.replace(mutants.find(name).install(target), name=f"{target.name}@{name}")


def _expect_available(candidate: registry.Candidate) -> None:
    probe = candidate.probe()
    if probe.state != "available":
        raise PluginError(
            "the plugin's device cannot be used here",
            plugin=candidate.name,
            why=f"its probe says: {probe}",
            hint="run this where the device is; `sdk list --explain` says what is found",
        )


def _class_of(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UnknownAcceleratorError(
            "there is no such class", plugin=name, why=str(error), hint="name it as package.module:Class"
        ) from error


def _installed(name: str) -> registry.Candidate:
    installed = registry.scan()
    if name not in installed:
        raise UnknownAcceleratorError(
            "there is no such plugin",
            plugin=name,
            why=f"installed: {', '.join(installed) or 'none'}",
            hint=f"pip install ds-plugin-{name}",
        )
    return registry.only(installed[name])
