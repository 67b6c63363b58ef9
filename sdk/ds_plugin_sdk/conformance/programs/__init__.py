"""Processes that checks start: one program on one or several ranks, each with the target that is under test.

A program is a module of this package, run as ``python -m <package>.<program> TARGET ARGUMENT ...``. It finds its target
by name, and gives a result, or several, with `give`. Importing this package does not import torch, because one program
looks who does.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from ds_plugin_sdk.conformance.patience import allowed
from ds_plugin_sdk.settings import child_environment

if TYPE_CHECKING:
    from ds_plugin_sdk.conformance.check import NonconformanceError
    from ds_plugin_sdk.conformance.target import Target

_MARK = "conformance-result: "
_LAST_LINES = 30

# What came of a rank: its exit status (None: it was killed because it took too long), its results, its last output.
Outcome = tuple[int | None, list[Any], str]

# What an enclosing launcher may have said does not concern these programs.
_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def give(result: Any) -> None:
    """Called by a program: hand a result, anything that JSON has, to the check that started it."""
    sys.stdout.write(f"\n{_MARK}{json.dumps(result)}\n")
    sys.stdout.flush()


def run(
    program: str,
    target: Target,
    *arguments: str,
    timeout: float,
    ranks: int = 1,
    environment: Mapping[str, str] | None = None,
    untouched: bool = False,
) -> list[list[Any]]:
    """Run a program on some ranks of this machine, and wait for all.

    Args:
        program: its module's name.
        target: handed to it by name.
        arguments: further ones.
        timeout: seconds, if the case has its check's own time; then every rank is killed.
        ranks: how many processes.
        environment: variables to set, beside those of a launcher.
        untouched: whether the environment is otherwise that of `remember_environment`.

    Returns:
        Each rank's results.

    Raises:
        NonconformanceError: a rank failed, or took too long; with the end of what it printed.
    """
    outcomes = run_to_the_end(
        program, target, *arguments, timeout=timeout, ranks=ranks, environment=environment, untouched=untouched
    )
    failure = failure_of(outcomes, timeout)
    if failure is not None:
        raise failure
    return [results for _, results, _ in outcomes]


def run_to_the_end(
    program: str,
    target: Target,
    *arguments: str,
    timeout: float,
    ranks: int = 1,
    environment: Mapping[str, str] | None = None,
    until: int | None = None,
    untouched: bool = False,
) -> list[Outcome]:
    """As `run`, but for programs that may fail.

    Args:
        until: the rank with whose end all are ended; None: all are waited for.
    """
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in range(ranks)]
        port = free_port()
        processes = [
            stack.enter_context(
                _process(
                    [sys.executable, "-m", f"{__name__}.{program}", target.name, *arguments],
                    files[rank],
                    _environment(rank, ranks, port, environment or {}, untouched),
                )
            )
            for rank in range(ranks)
        ]
        codes = _wait(processes, processes if until is None else [processes[until]], allowed(timeout))
        return [(code, *_read(file)) for code, file in zip(codes, files, strict=True)]


def remember_environment() -> None:
    """Called before a target is loaded, which may set variables that every child has from then on."""
    _untouched.update(child_environment())


_untouched: dict[str, str] = {}


def _environment(rank: int, ranks: int, port: int, changes: Mapping[str, str], untouched: bool) -> dict[str, str]:
    own = {
        **_ALONE,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_PORT": str(port),
        # What this process can import, its children can.
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONUNBUFFERED": "1",
        **changes,
    }
    return {**_untouched, **own} if untouched and _untouched else child_environment(**own)


@contextlib.contextmanager
def _process(command: Sequence[str], file: IO[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _wait(
    processes: Sequence[subprocess.Popen[str]], awaited: Sequence[subprocess.Popen[str]], timeout: float
) -> list[int | None]:
    """Exit statuses; None for those that were still running in the end. Python prints the stacks of those."""
    end = time.monotonic() + timeout
    while time.monotonic() < end and any(process.poll() is None for process in awaited):
        time.sleep(0.02)
    late = [process for process in processes if process.poll() is None]
    for process in late:
        process.send_signal(signal.SIGABRT)
    for process in late:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    return [None if process in late else process.returncode for process in processes]


def _read(file: IO[str]) -> tuple[list[Any], str]:
    file.seek(0)
    lines = file.read().splitlines()
    results = [json.loads(line[len(_MARK) :]) for line in lines if line.startswith(_MARK)]
    rest = [line for line in lines if line and not line.startswith(_MARK)]
    return results, "\n".join(rest[-_LAST_LINES:])


def failure_of(outcomes: Sequence[Outcome], timeout: float) -> NonconformanceError | None:
    """What went wrong, if anything, in the words of the rank that knows best.

    A rank that failed by itself says more than one that waited for it in vain, or was killed by a signal.
    """
    from ds_plugin_sdk.conformance.check import NonconformanceError

    failed = [rank for rank, (code, _, _) in enumerate(outcomes) if code != 0]
    if not failed:
        return None
    rank = min(failed, key=lambda rank: (outcomes[rank][0] or 0) <= 0)
    code, results, output = outcomes[rank]
    who = f"rank {rank} of {len(outcomes)}" if len(outcomes) > 1 else "the process"
    how = f"did not end within {allowed(timeout):g} s" if code is None else f"ended with status {code}"
    said = [result["failure"] for result in results if isinstance(result, dict) and "failure" in result]
    return NonconformanceError(said[-1] if said else f"{who} {how}", why=f"{who} printed last:\n{output}")


def free_port() -> int:
    """A TCP port of this machine that nobody listens at, for ranks that are yet to start.

    None of those that Linux gives to whoever asks for any (32768 and above, unless set otherwise): until the ranks
    listen, it would give it to other programs too.
    """
    with socket.socket() as server:
        for port in random.SystemRandom().sample(range(10_000, 30_000), 100):
            with contextlib.suppress(OSError):  # somebody listens
                server.bind(("", port))
                return port
    raise OSError("this process can bind none of 100 ports between 10000 and 30000, so its ranks have nowhere to meet")
