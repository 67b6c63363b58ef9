"""Native kernels without being asked for: an op loads those of its family at its first call on a device.

A kernel that is loaded takes over by torch's own rules, so only the first call, and calls that no kernel serves, pass
through here. Tracing does not: fake tensors and the meta device have implementations of their own.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.thread_lock import ThreadLock

# This part is above the registry in the order of imports, so it finds the registry by name, and late.
_REGISTRY = "ds_plugin_sdk.registry"
_FAMILIES = "ds_plugin_sdk.ops."

# The ops of a family that a device may have kernels of.
_ops: defaultdict[str, list[str]] = defaultdict(list)
# The device types whose kernels were asked for, by family.
_asked: defaultdict[str, set[str]] = defaultdict(set)
_loading: set[tuple[str, str]] = set()
_lock = ThreadLock()
os.register_at_fork(after_in_child=_loading.clear)  # what other threads were about: they are not there to end it


def family_of(module: str) -> str | None:
    """The family that a module defines ops of, or None for one that is not the SDK's."""
    return module.removeprefix(_FAMILIES).partition(".")[0] if module.startswith(_FAMILIES) else None


def loading(op: str, family: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """What serves an op where no kernel is loaded: it loads the kernels once, and else is the reference implementation.

    Args:
        op: the op's name with its namespace.
        family: whose kernels to load, a module of `ds_plugin_sdk.ops`.
        reference: the reference implementation.

    Returns:
        A function of the op's arguments. It raises `BuildError` where ``DS_PLUGIN_FALLBACK=0`` forbids the reference.
    """
    asked = _asked[family]
    _ops[family].append(op)
    namespace, _, name = op.partition("::")

    def run(*args: Any) -> Any:
        first = args[0] if isinstance(args[0], Tensor) else next(iter(args[0]), None)
        if first is None or first.device.type in asked or not load(family, first.device.type):
            return reference(*args)
        with torch.no_grad():  # autograd is above this function: it must not come in a second time
            return getattr(getattr(torch.ops, namespace), name).default(*args)

    return run


def has_kernels(family: str, device_type: str) -> bool | None:
    """Whether any op of a family has a kernel for a device in this process; None for a family without ops, or a device
    that torch does not know.
    """
    try:
        key = torch._C._dispatch_key_for_device(device_type)
    except RuntimeError:
        return None
    # A kernel may be registered above autograd, too, or in the place of the reference implementation.
    marks = f"\n{key}: ", f"\nAutograd{key}: ", " (inactive): "
    dumps = map(torch._C._dispatch_dump, _ops[family])
    return any(mark in dump for dump in dumps for mark in marks) if _ops[family] else None


@functools.cache
def is_native(op: str, family: str, device_type: str) -> bool:
    """Whether a device has a kernel of an op; it is loaded, or compiled, when this is first asked.

    Raises:
        BuildError: it cannot be, and ``DS_PLUGIN_FALLBACK=0`` forbids the reference.
    """
    registry = importlib.import_module(_REGISTRY)
    if not registry.has_kernels(family, device_type):
        return False
    registry.load_kernels(family, device_type)
    key = torch._C._dispatch_key_for_device(device_type)
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"ds_plugin::{op}", key))


def ask_again(device_type: str) -> None:
    """Let the next calls on a device ask for its kernels: it has others now."""
    for device_types in list(_asked.values()):  # without the lock: who holds it may wait for who calls this
        device_types.discard(device_type)


def load(family: str, device_type: str) -> bool:
    """Load a family's kernels for a device, once; False within such a load, which needs an answer now."""
    key = family, device_type
    with _lock:  # other threads wait, rather than take the reference implementation
        if key in _loading:
            return False
        if device_type not in _asked[family]:
            _loading.add(key)
            try:
                importlib.import_module(_REGISTRY).load_kernels(family, device_type)
            finally:
                _loading.discard(key)
            _asked[family].add(device_type)
    return True


__all__ = ["ask_again", "family_of", "has_kernels", "is_native", "load", "loading"]
