"""Runs features of DeepSpeed on a target, each on ranks of its own: ``... TARGET FD``.

It imports torch and DeepSpeed once and forks the ranks of each feature, so that one neither waits for imports nor sees
what another has left behind, and a crash or a hang is its own. A request is ``{"task": ..., "options": ..., "ranks": N,
"seconds": ...}``; the answer is a list, for each rank one of

    {"result": {name: [number, ...]}, "ops": [[name, origin], ...]}
    {"failure": ..., "trace": ..., "limit": "file:line: text"}     the limit: where DeepSpeed asks for CUDA
    {"ended": how, "output": ...}
"""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import json
import linecache
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from ds_plugin_sdk import provenance
from ds_plugin_sdk.accelerator import DeepSpeedAccelerator
from ds_plugin_sdk.conformance.process import pipe_to_parent
from ds_plugin_sdk.conformance.programs import ahead, feature_tasks, free_port
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.errors import OpError
from ds_plugin_sdk.settings import become

_LAST_LINES = 30

# Seconds for which the other ranks may go on when one has ended in failure.
_GRACE = 10.0

# Code that asks for CUDA, or for torch's compiler of CUDA and CPUs, by its name.
_CUDA = re.compile(r"torch\.cuda\b|['\"](?:cuda|inductor)['\"]|\bis_cuda\b|ATen/cuda|\bcuda\.h\b")

# Where a compiler stopped in DeepSpeed's sources.
_SOURCE = re.compile(r"(/\S+/deepspeed/ops/csrc/\S+?):(\d+)")


def main() -> None:
    connection, target = pipe_to_parent(), Target.find(sys.argv[1])
    torch.set_num_threads(1)
    import deepspeed

    ahead.load()
    if not isinstance(target.accelerator, DeepSpeedAccelerator):  # one of DeepSpeed's own
        deepspeed.accelerator.set_accelerator(target.accelerator)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has gone
        while True:
            request = json.loads(connection.recv_bytes())
            connection.send_bytes(json.dumps(_on_ranks(target, **request)).encode())


def _on_ranks(
    target: Target, task: str, options: Mapping[str, Any], ranks: int, seconds: float
) -> list[dict[str, Any]]:
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                _rank(target, task, options, folder, rank, ranks, port)
            children.append(child)
        statuses = _wait(children, seconds)
        return [_answer(folder, rank, statuses[rank], seconds) for rank in range(ranks)]


def _wait(children: Sequence[int], seconds: float) -> list[int | None]:
    """Each child's exit status; None for those that had to be killed, of which Python prints the stacks."""
    statuses: dict[int, int | None] = {}
    end = time.monotonic() + seconds
    while len(statuses) < len(children) and time.monotonic() < end:
        for child in set(children) - set(statuses):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                statuses[child] = os.waitstatus_to_exitcode(status)
                if statuses[child] != 0:
                    end = min(end, time.monotonic() + _GRACE)
        time.sleep(0.02)
    for child in set(children) - set(statuses):
        os.kill(child, signal.SIGABRT)
        time.sleep(0.5)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        statuses[child] = None
    for child in children:  # what they have started and left
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    return [statuses[child] for child in children]


def _answer(folder: Path, rank: int, status: int | None, seconds: float) -> dict[str, Any]:
    given = folder / f"{rank}.json"
    if given.exists():
        answer: dict[str, Any] = json.loads(given.read_text(encoding="utf-8"))
        return answer
    ended = f"it took longer than {seconds:g} s" if status is None else f"with status {status}"
    if status is not None and status < 0:
        ended = f"by signal {signal.Signals(-status).name}"
    lines = (folder / f"{rank}.log").read_text(encoding="utf-8", errors="replace").splitlines()
    return {"ended": ended, "output": "\n".join(lines[-_LAST_LINES:])}


def _rank(
    target: Target, task: str, options: Mapping[str, Any], folder: Path, rank: int, ranks: int, port: int
) -> None:
    """What a forked child does; it never returns."""
    status = 1
    try:
        os.setpgid(0, 0)
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable(2)
        become(rank, ranks, port)
        answer = _tried(target, task, options)
        kept = folder / f"{rank}.part"
        kept.write_text(json.dumps(answer), encoding="utf-8")
        kept.rename(folder / f"{rank}.json")
        status = 0 if "result" in answer else 1
    finally:
        os._exit(status)  # threads of a backend may wait for another rank for ever


def _tried(target: Target, task: str, options: Mapping[str, Any]) -> dict[str, Any]:
    import deepspeed

    try:
        deepspeed.init_distributed()
        torch.manual_seed(0)
        result = feature_tasks.TASKS[task](target, **options)
        return {"result": result, "ops": [[each.name, each.origin] for each in provenance.records()]}
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"
        return {
            "failure": failure,
            "trace": traceback.format_exc(),
            "limit": _limit(error, target.accelerator.get_compile_backend()),
        }


def _limit(error: BaseException, compile_backend: str = "inductor") -> str:
    """The place where DeepSpeed asks for CUDA, or injects layers that do not fit the model, if that is what raised.

    So too where it compiles by inductor, as `deepspeed.runtime.compiler.compile` does, for a device whose accelerator
    names another backend.
    """
    import deepspeed

    root = Path(deepspeed.__file__).parent
    misfit = isinstance(error, OpError) and error.op == "transformer_inference"
    misfit |= type(error).__name__ == "InductorError" and compile_backend != "inductor"
    for cause in _causes(error):
        for name, number in _SOURCE.findall(str(cause)):
            if _CUDA.search(linecache.getline(name, int(number))):
                return _place(Path(name), int(number), root)
        for frame, line in reversed(list(_frames(cause.__traceback__))):
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(root):
                if misfit or _CUDA.search(_statement(file, line)):
                    return _place(file, line, root)
                break
    return ""


def _place(file: Path, line: int, root: Path) -> str:
    return f"{file.relative_to(root.parent)}:{line}: {linecache.getline(str(file), line).strip()}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _frames(entry: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while entry is not None:
        yield entry.tb_frame, entry.tb_lineno
        entry = entry.tb_next


def _statement(file: Path, line: int) -> str:
    """The statement at a line, with the condition under which it is run if it raises."""
    source = file.read_text(encoding="utf-8")
    found = ""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
            if isinstance(node, ast.If) and any(isinstance(part, ast.Raise) for part in node.body):
                found += ast.get_source_segment(source, node.test) or ""
            elif not hasattr(node, "body"):
                found += ast.get_source_segment(source, node) or ""
    return found


if __name__ == "__main__":
    main()
