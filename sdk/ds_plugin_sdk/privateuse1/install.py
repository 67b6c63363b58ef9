"""Makes the device known to torch: native libraries, name, device module, collectives."""

from __future__ import annotations

import ctypes
import os
import re
from typing import TYPE_CHECKING, Any

from ds_plugin_sdk import torch_threads
from ds_plugin_sdk.errors import DeviceNameError, InvalidAcceleratorError
from ds_plugin_sdk.op_builder import OpBuilder, add_prebuilt
from ds_plugin_sdk.privateuse1 import build
from ds_plugin_sdk.thread_lock import ThreadLock

if TYPE_CHECKING:
    from ds_plugin_sdk.privateuse1.device_module import DeviceModule

# torch's own name of the type, as long as nobody has renamed it.
_UNNAMED = "privateuseone"

_lock = ThreadLock()
_runtime: ctypes.CDLL | None = None
_module: DeviceModule | None = None
_builders: tuple[OpBuilder, ...] = ()


def install(name: str, *, runtime: build.RuntimeBuilder, collectives: str | None = None) -> DeviceModule:
    """Make a torch device of this name, once in a process; a second call with the same name changes nothing.

    Args:
        name: torch's name of the device, lower-case letters and underscores: ``torch.device(name)``, ``torch.<name>``.
        runtime: builds the device runtime, the functions of ``runtime.h``.
        collectives: name under which collectives that are staged on the host are registered with torch.distributed;
            None: ``<name>ccl``; "": none are, because the vendor registers a backend of their own.

    Returns:
        ``torch.<name>``.

    Raises:
        DeviceNameError: the name, or that of the collectives, is malformed or torch's own, or another out-of-tree
            device is installed.
        BuildError: the native code can neither be found nor compiled.
        InvalidAcceleratorError: the runtime lacks functions, or could not be started.
    """
    global _runtime, _module, _builders
    with _lock:
        if _module is not None and installed_name() == name:
            return _module
        _check_name(name)
        collectives = f"{name}ccl" if collectives is None else collectives
        _check_collectives(name, collectives)
        # A program that makes the accelerator itself never asks for the plugin, whose wheel may have the torch backend.
        add_prebuilt(runtime.owner(), runtime.kernel_root() / "prebuilt")
        backend = build.BackendBuilder()
        _runtime = build.load_runtime(runtime)
        _check_functions(build.load_backend(backend), name)
        _builders = (runtime, backend)
        runtime.configure(_runtime)
        _start(_runtime, name)
        torch_threads.wait_at_exit()
        _module = _register(name, collectives)
        return _module


def installed_name() -> str | None:
    """The name that `install` gave to torch's free device type, or None before."""
    return _module.device_type if _module is not None else None


def installed_builders() -> tuple[OpBuilder, ...]:
    """The builders of the device's two libraries, runtime and torch backend; none before `install`."""
    return _builders


def runtime_library() -> ctypes.CDLL | None:
    """The runtime's library, for C functions of its own; None before `install`."""
    return _runtime


def fallback_counts() -> dict[str, int]:
    """How often the CPU computed each op for the device since the start, most frequent first: what to write next.

    Empty before `install`.
    """
    import torch

    if installed_name() is None:
        return {}
    counts: dict[str, int] = dict(torch.ops.ds_device.fallback_counts())
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def reset_fallback_counts() -> None:
    """Restart the counts, if there are any."""
    import torch

    if installed_name() is not None:
        torch.ops.ds_device.reset_fallback_counts()


def _check_name(name: str) -> None:
    import torch

    if not re.fullmatch(r"[a-z_]+", name):
        raise DeviceNameError(
            f"'{name}' cannot be a device's name",
            why="torch accepts letters and underscores, in lower case",
            hint="a device 'mi400' may be called 'mi'; the plugin's own name is free",
        )
    if name == _UNNAMED or hasattr(torch._C._autograd.DeviceType, name.upper()):
        raise DeviceNameError(
            f"'{name}' cannot be the name of a new device",
            why="torch has a device type of that name itself",
            hint=f"choose another, such as '{name}_x'; for torch's own device derive from TorchAccelerator alone",
        )
    taken = torch._C._get_privateuse1_backend_name()
    if taken != _UNNAMED:
        raise DeviceNameError(
            f"device '{name}' cannot be installed",
            why=f"torch has one out-of-tree device in each process, and it is '{taken}'",
            hint=f"use one of the two in a process: uninstall the plugin of '{taken}', or do not install '{name}'",
        )


def _check_collectives(name: str, collectives: str) -> None:
    import torch

    if collectives and torch.distributed.is_available() and collectives in torch.distributed.Backend.backend_list:
        raise DeviceNameError(
            f"'{collectives}' cannot be the name of the collectives of device '{name}'",
            why="torch has collectives of that name itself, and would take those",
            hint=f"choose another: install(..., collectives='{name}_ccl')",
        )


def _check_functions(missing: str, name: str) -> None:
    if missing:
        raise InvalidAcceleratorError(
            "the device runtime lacks functions of runtime.h",
            plugin=name,
            why=f"its library defines none of this name and with these arguments: {missing}",
            hint="define them in namespace runtime, as runtime.h does, in a file of the builder's sources()",
        )


def _start(runtime: ctypes.CDLL, name: str) -> None:
    runtime.runtime_start.restype = ctypes.c_char_p
    runtime.runtime_start.argtypes = [ctypes.c_char_p]
    failure = runtime.runtime_start(name.encode())
    if failure:
        raise InvalidAcceleratorError("the device runtime does not start", plugin=name, why=failure.decode())


def _forked(started_by: int) -> bool:
    """Whether this process is a fork that cannot use the device: any fork, where the runtime does not say more."""
    forked: Any = getattr(_runtime, "runtime_forked", None)
    if forked is None:
        return os.getpid() != started_by
    forked.restype = ctypes.c_bool
    return bool(forked())


def _register(name: str, collectives: str) -> DeviceModule:
    import torch

    from ds_plugin_sdk.privateuse1.device_module import DeviceModule

    backends: Any = torch.utils
    backends.rename_privateuse1_backend(name)
    module = DeviceModule(name, _forked)
    torch._register_device_module(name, module)  # type: ignore[no-untyped-call, unused-ignore]  # before 2.15 torch gives it no type
    backends.generate_methods_for_privateuse1_backend(for_storage=True)
    if collectives and torch.distributed.is_available():
        from ds_plugin_sdk.privateuse1 import process_group

        process_group.register(collectives, name)
    return module
