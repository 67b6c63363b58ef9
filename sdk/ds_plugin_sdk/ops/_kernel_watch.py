"""Which kernels ops have on the CPU, and whether others were registered since."""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Loaded libraries and kernels that Python registered: who has another kernel for an op is among them.
_LIBRARIES, _IMPLEMENTATIONS = torch.ops.loaded_libraries, torch.library._impls


class KernelWatch:
    """Kernels for CPU tensors as they are now.

    Args:
        ops: names of ops of ``ds_plugin``.
    """

    def __init__(self, ops: Iterable[str]) -> None:
        self._ops = tuple(ops)
        self._kernels = self._kernels_now()
        self._registered = len(_LIBRARIES) + len(_IMPLEMENTATIONS)
        self._same = True

    def holds(self) -> bool:
        """Whether they are the same still; once they were not, never again."""
        registered = len(_LIBRARIES) + len(_IMPLEMENTATIONS)
        if registered != self._registered:
            self._registered = registered
            self._same = self._same and self._kernels_now() == self._kernels
        return self._same

    def _kernels_now(self) -> list[str]:
        return [_kernel_of(op) for op in self._ops]


def _kernel_of(op: str) -> str:
    lines = torch._C._dispatch_dump(f"ds_plugin::{op}").splitlines()
    return next((line for line in lines if line.startswith("CPU:")), "")


__all__ = ["KernelWatch"]
