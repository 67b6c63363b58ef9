"""Asking the hosts of a hostfile, by ssh, as DeepSpeed's launcher will reach them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ds_plugin_sdk import registry
from ds_plugin_sdk.doctor.facts import Facts
from ds_plugin_sdk.errors import HostfileError
from ds_plugin_sdk.integrations.deepspeed.builtin_names import builtin_names
from ds_plugin_sdk.settings import child_environment, for_other_nodes

_AT_ONCE = 32

# What DeepSpeed's launcher carries to other hosts whatever the accelerator is (deepspeed/launcher/runner.py).
_EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX")


@dataclass(frozen=True)
class Heard:
    """A host's answer, and by how many seconds its clock is ahead of ours at least; negative: behind."""

    facts: Facts
    clock_off: float = 0.0


@dataclass(frozen=True)
class Silent:
    """A host without a usable answer: why, and what to do."""

    why: str
    next: str


def read_hostfile(path: Path) -> dict[str, int]:
    """Ranks of each host of a hostfile, ``name slots=N`` a line, as DeepSpeed reads it.

    Raises:
        HostfileError: there is no such file, a line is something else, a host is there twice, or there is none.
    """
    hint = "a line for each host, such as `worker-1 slots=4`; DeepSpeed's launcher reads no other"
    try:
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError as error:
        raise HostfileError(f"the hostfile {path} cannot be read", why=str(error.strerror), hint=hint) from error
    slots: dict[str, int] = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        found = re.match(r"(\S+)\s+slots=(\d+)", line)
        if found is None or found[1] in slots:
            why = f"'{line}' is no host and its slots" if found is None else f"{found[1]} is there twice"
            raise HostfileError(f"line {number} of {path} cannot be used", why=why, hint=hint)
        slots[found[1]] = int(found[2])
    if not slots:
        raise HostfileError(f"the hostfile {path} has no host", hint=hint)
    return slots


def ask_all(hosts: Iterable[str], port: int, ssh: Sequence[str], timeout: float) -> dict[str, Heard | Silent]:
    """Ask each host, some at once, for no longer than `timeout` seconds each."""
    remote, started = _command(port), _Started()
    names = list(hosts)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            answers = pool.map(lambda host: _ask(host, remote, ssh, timeout, started), names)
            return dict(zip(names, answers, strict=True))
        except BaseException:  # Ctrl-C is not to wait for hosts
            pool.shutdown(wait=False, cancel_futures=True)
            started.end()
            raise


class _Started:
    """The processes that ask, each in a session of its own, so that what ssh has started ends with it."""

    def __init__(self) -> None:
        self._lock, self._running, self._ended = threading.Lock(), set[subprocess.Popen[bytes]](), False

    def wait(self, command: Sequence[str], out: BinaryIO, said: BinaryIO, timeout: float) -> int:
        """The status of a command that is run.

        Raises:
            OSError: it cannot be started.
            subprocess.TimeoutExpired: it took longer, and has been stopped.
        """
        with self._lock:
            if self._ended:
                raise subprocess.TimeoutExpired(command, 0)
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=said, start_new_session=True
            )
            self._running.add(process)
        try:
            # For ssh itself: a helper that it leaves behind may hold what it prints to for longer.
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            _stop(process)
            raise
        finally:
            with self._lock:
                self._running.discard(process)

    def end(self) -> None:
        """Stop all of them, and start no other."""
        with self._lock:
            self._ended = True
            for process in self._running:
                _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _command(port: int) -> str:
    """What a host's shell is to run: this Python, at the same path, with what the launcher would export."""
    of_plugin, stays = _exported_by_plugin()
    environment = {
        name: value
        for name, value in child_environment().items()
        if name.startswith((*_EXPORTED, *of_plugin)) and name not in stays
    }
    words = ["env", *(f"{name}={value}" for name, value in sorted((environment | for_other_nodes()).items()))]
    return shlex.join([*words, sys.executable, "-m", "ds_plugin_sdk.cli", "doctor", "--facts", "--port", str(port)])


def _exported_by_plugin() -> tuple[Sequence[str], Sequence[str]]:
    """Prefixes of what a plugin carries to other nodes, and the names that stay: those of this node's devices."""
    try:
        chosen = registry.preview(builtin_names()).chosen
        accelerator = None if chosen is None else registry.load(chosen)
        return ((), ()) if accelerator is None else (accelerator.export_envs(), accelerator.visible_devices_envs())
    except Exception:  # the vendor's own code; this host's own row says what is wrong
        return (), ()


def _ask(host: str, remote: str, ssh: Sequence[str], timeout: float, started: _Started) -> Heard | Silent:
    command = [*ssh, "-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, int(timeout / 2))}", host, remote]
    began = time.time()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as said:
        try:
            status = started.wait(command, out, said, timeout)
        except OSError as error:
            return Silent(f"{command[0]}: {error.strerror}", "install an ssh client, or name one by --ssh")
        except subprocess.TimeoutExpired:
            return Silent(
                f"no answer in {timeout:g} s", f"is it up? Try `{shlex.join(ssh)} {host} true`, and --timeout"
            )
        ended = time.time()
        return _read(_text(out), ended, began) if status == 0 else _refusal(host, status, _text(said), shlex.join(ssh))


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")  # a host greets in whatever letters it likes


def _read(text: str, ended: float, began: float) -> Heard | Silent:
    line = next((line for line in reversed(text.splitlines()) if line.startswith("{")), "")
    try:
        facts = Facts(**json.loads(line))
    except (TypeError, ValueError):
        return Silent(
            "its answer cannot be read", "the same ds-plugin-sdk on all hosts; a shell that starts up silently"
        )
    # The host looked at its clock twice between the two times.
    first, last = facts.clock
    return Heard(facts, max(last - ended, 0.0) + min(first - began, 0.0))


def _refusal(host: str, status: int, said: str, ssh: str) -> Silent:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    why = lines[-1] if lines else f"exit status {status}"
    if status == 255:  # ssh's own
        return Silent(why, f"`{ssh} {host} true` must work without a password and without a question")
    return Silent(why, f"the same environment on all hosts, at the same path: {sys.executable} with ds-plugin-sdk")
