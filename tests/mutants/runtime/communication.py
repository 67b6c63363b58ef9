"""Defects of what collectives and compilers are named."""

from __future__ import annotations

from typing import Any

import torch

from ds_plugin_sdk.conformance.target import Target
from mutants.mutant import SIMULATED, mutant, override
from mutants.runtime.support import always, member

member(
    "communication.unknown",
    "R8.1",
    "torch knows no backend of that name.",
    communication_backend_name=always("nobodyccl"),
)
member(
    "communication.cpu_only",
    "R8.2",
    "The backend takes tensors of the host alone.",
    target=SIMULATED,
    communication_backend="gloo",
)
member("communication.triton", "R8.3", "Triton is declared, and is not there.", is_triton_supported=always(True))
member("communication.no_compiler", "R8.4", "The compile backend is unknown.", get_compile_backend=always("nobody"))


def _doubling() -> None:
    def doubling(graph: Any, inputs: Any) -> Any:
        return lambda *arguments: tuple(2 * value for value in graph(*arguments))

    torch._dynamo.register_backend(doubling, name="doubling")


def _compiles_wrongly(target: Target) -> Target:
    """Compiled code computes twice the value."""
    _doubling()
    return override(target, get_compile_backend=always("doubling"))


mutant("communication.wrong_code", "R8.5", "runtime")(_compiles_wrongly)


def _specializing() -> None:
    def specializing(graph: Any, inputs: Any) -> Any:
        first: list[Any] = []

        def run(*arguments: Any) -> Any:
            shapes = [each.shape for each in arguments if isinstance(each, torch.Tensor)]
            first.extend([] if first else [shapes])
            return tuple(value if shapes == first[0] else 2 * value for value in graph(*arguments))

        return run

    torch._dynamo.register_backend(specializing, name="specializing")


def _first_shape(target: Target) -> Target:
    """Compiled code is right of the batch that it was compiled for."""
    _specializing()
    torch._dynamo.config.automatic_dynamic_shapes = True
    torch._dynamo.config.assume_static_by_default = False
    return override(target, get_compile_backend=always("specializing"))


mutant("communication.first_shape", "R8.5", "runtime")(_first_shape)
member(
    "communication.any_compiler",
    "R8.6",
    "`set_compile_backend` takes any name.",
    set_compile_backend=lambda self, name: setattr(self, "_compile_backend", name),
)
