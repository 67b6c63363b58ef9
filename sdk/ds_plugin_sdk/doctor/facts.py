"""What a run will find on this machine. Compiles nothing, writes nothing."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ds_plugin_sdk import jit, op_builder, registry, report
from ds_plugin_sdk.accelerator import installed
from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.integrations.deepspeed import autoload
from ds_plugin_sdk.integrations.deepspeed.builtin_names import builtin_names
from ds_plugin_sdk.op_builder import SourcelessOpBuilder
from ds_plugin_sdk.settings import child_environment, settings

_SHARED_MEMORY = Path("/dev/shm")
_LOOPBACK_SECONDS = 5
_IMPORT_SECONDS = 300  # a cold file system over the network takes a minute


@dataclass(frozen=True)
class Facts:
    """A machine, as one of its processes sees it. Plain values: it travels as JSON.

    Attributes:
        versions: of Python and of the packages that matter, ``not installed`` among them.
        plugin: name of the plugin that DeepSpeed would use; empty if none.
        plugin_why: the last step of that choice, or the error.
        plugin_hint: what the error says is to be done; empty if there is none.
        autoload_why: why torch does not call the SDK, so that DeepSpeed finds no plugin by itself; empty if it does.
        deepspeeds_own: whether no plugin is to be used: DeepSpeed has an accelerator of its own for this machine, or
            was told to use it.
        deepspeed_why: why ``import deepspeed`` fails; empty if it does not, or if there is no DeepSpeed, or nothing for
            it to use.
        kernels: names of the plugin's native ops by where each would come from, as `report.OpStatus.origin` has it.
        kernels_why: of each origin the first op's reason.
        fallback: whether an op without native kernel may use its reference implementation.
        cache: the folder of compiled kernels.
        cache_why: why nothing can be built into it; empty if it can.
        port: the port at which the ranks are to meet.
        port_why: why nothing can listen there; empty if it can.
        loopback_why: why a process cannot reach another of the machine by ``127.0.0.1``; empty if it can.
        open_files: how many files a process may open; None without limit.
        locked_memory: bytes that a process may lock; None without limit.
        memory: bytes of the machine.
        shared_memory: bytes of ``/dev/shm``, and those that are free; None if it is not there or cannot be written.
        clock: seconds since the epoch, at the beginning and at the end of the examination, which may take a while.
    """

    versions: dict[str, str]
    plugin: str
    plugin_why: str
    plugin_hint: str
    autoload_why: str
    deepspeeds_own: bool
    deepspeed_why: str
    kernels: dict[str, list[str]]
    kernels_why: dict[str, str]
    fallback: bool
    cache: str
    cache_why: str
    port: int
    port_why: str
    loopback_why: str
    open_files: int | None
    locked_memory: int | None
    memory: int
    shared_memory: tuple[int, int] | None
    clock: tuple[float, float]


def examine(port: int) -> Facts:
    """This machine's facts; `port` is where the ranks of the run are to meet."""
    began = time.time()
    decision, why = _chosen()
    hint = ""
    plugin = decision.chosen
    try:
        native = list(_native(plugin)) if plugin is not None else []
    except SdkError as error:  # it was chosen by its manifest alone
        plugin, native = None, []
        why, hint = f"'{error.plugin}': {error.what}: {error.why}", error.hint
    kernels: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for status in native:
        kernels.setdefault(status.origin, []).append(status.name)
        reasons.setdefault(status.origin, status.reason)
    return Facts(
        versions=report.versions(),
        plugin=plugin.name if plugin is not None else "",
        plugin_why=why,
        plugin_hint=hint,
        autoload_why=autoload.why_not_called(),
        deepspeeds_own=decision.is_deepspeeds,
        deepspeed_why=_deepspeed_why() if (plugin or decision.is_deepspeeds) and installed("deepspeed") else "",
        kernels=kernels,
        kernels_why=reasons,
        fallback=settings.fallback,
        cache=str(jit.cache.root()),
        cache_why=jit.cache.unusable(),
        port=port,
        port_why=_port_why(port),
        loopback_why=_loopback_why(),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        shared_memory=_shared_memory(),
        clock=(began, time.time()),
    )


def _chosen() -> tuple[registry.Decision, str]:
    try:
        decision = registry.preview(builtin_names())
    except SdkError as error:
        return registry.Decision(), str(error)
    return decision, str(decision.steps[-1]) if decision.steps else "no plugin is installed"


def _deepspeed_why() -> str:
    """Releases of DeepSpeed, torch and numpy that do not fit each other show at the import, whatever pip said."""
    command = [sys.executable, "-W", "ignore", "-c", "import deepspeed"]
    try:
        done = subprocess.run(
            command,
            env=child_environment(DS_PLUGIN_PROVENANCE=""),  # this is no part of a run
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {_IMPORT_SECONDS} s"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return (lines[-1] if lines else f"exit status {done.returncode}") if done.returncode else ""


def _native(plugin: registry.Candidate) -> Iterator[report.OpStatus]:
    """The plugin's ops that have native code, each with its source."""
    accelerator = registry.load(plugin)
    for builder in op_builder.builders(accelerator.op_builders, accelerator.device_name()).values():
        if not issubclass(builder, SourcelessOpBuilder):
            yield report.status(builder)


def _port_why(port: int) -> str:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        try:
            listener.bind(("", port))
        except OSError as error:
            return str(error.strerror)
    return ""


def _loopback_why() -> str:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_LOOPBACK_SECONDS).close()
    except OSError as error:
        return str(error.strerror or error)
    return ""


def _limit(kind: int) -> int | None:
    limit = resource.getrlimit(kind)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _shared_memory() -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        if os.access(_SHARED_MEMORY, os.W_OK | os.X_OK):
            usage = shutil.disk_usage(_SHARED_MEMORY)
            return usage.total, usage.free
    return None
