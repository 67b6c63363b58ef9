"""How a defect of the runtime is put in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_plugin_sdk.conformance.target import Target
from mutants.mutant import SIMULATED, mutant, override

DEVICE = "simulated"


def member(name: str, clause: str, description: str, *, target: str = "cpu", only: str = "", **members: Any) -> None:
    """Declare a mutant in which members of the accelerator are replaced."""

    def install(original: Target) -> Target:
        return override(original, **members)

    install.__doc__ = description
    mutant(name, clause, "runtime", target=target, only=only)(install)


def below(
    name: str, clause: str, description: str, patch: Callable[[], None], *, target: str = SIMULATED, only: str = ""
) -> None:
    """Declare a mutant in which something of torch's is replaced, for the process."""

    def install(original: Target) -> Target:
        patch()
        return original

    install.__doc__ = description
    mutant(name, clause, "runtime", target=target, only=only)(install)


def original(accelerator: Any) -> Any:
    """The accelerator's members as they were before they were replaced."""
    return super(type(accelerator), accelerator)


def nothing(*arguments: Any, **keywords: Any) -> None:
    """A function that does nothing."""


def always(value: Any) -> Callable[..., Any]:
    """A function that gives this."""
    return lambda *arguments, **keywords: value


def side_stream() -> Any:
    """A stream of the simulated device beside its current one."""
    return torch.Stream(device=DEVICE)
