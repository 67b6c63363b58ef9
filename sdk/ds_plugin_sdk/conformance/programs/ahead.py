"""What DeepSpeed's engine imports when it is made, imported before ranks are forked: most of their time."""

from __future__ import annotations

import contextlib
import importlib

# The engine asks for every optimizer that it knows, one of which is compiled by inductor.
_MODULES = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.hybrid_engine",
)


def load() -> None:
    """Import them; a release of DeepSpeed may lack one."""
    for name in _MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
