"""Which kernels an op has for tensors in host memory, and whether somebody has registered others since."""

from __future__ import annotations

import sys

import torch

# Loaded libraries, and kernels that Python registered.
_LIBRARIES, _IMPLEMENTATIONS = torch.ops.loaded_libraries, torch.library._impls

# What torch's dispatcher may call for tensors in host memory. Kernels of other devices may come and go.
_KEYS = (
    *("CPU", "AutogradCPU", "AutocastCPU", "Autograd", "ADInplaceOrView", "BackendSelect", "Functionalize", "Tracer"),
    *("Python", "PythonTLSSnapshot", "PythonDispatcher"),
)


def registrations() -> tuple[int, ...]:
    """Numbers that change where it is likely that a kernel was registered: of libraries, modules, and in Python."""
    return len(_LIBRARIES), len(_IMPLEMENTATIONS), len(sys.modules)


class CPUKernels:
    """Those of an op as they are now.

    Args:
        op: its name in ``ds_plugin``.
    """

    def __init__(self, op: str) -> None:
        self._op = f"ds_plugin::{op}"
        self._text = torch._C._dispatch_dump(self._op)
        self._kernels = _kernels_in(self._text)
        self._hold = True

    def hold(self) -> bool:
        """Whether they are the op's still, which torch takes some us to tell; once others were, never again."""
        text = torch._C._dispatch_dump(self._op)
        if text != self._text:
            self._text = text
            self._hold = self._hold and _kernels_in(text) == self._kernels
        return self._hold


def _kernels_in(text: str) -> list[str]:
    """The lines of a dump that tensors in host memory depend on."""
    return [line for line in text.splitlines() if line.partition(":")[0].removesuffix("[alias]") in _KEYS]


__all__ = ["CPUKernels", "registrations"]
