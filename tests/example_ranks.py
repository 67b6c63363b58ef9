"""The examples' scripts as ranks, forked from a process that has imported DeepSpeed and transformers once."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from pathlib import Path

import pytest

from launchers import free_port

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["deepspeed", "transformers", "matplotlib.figure"])


def run(script: str, *arguments: object, log: Path, ranks: int = 1, timeout: float = 800) -> str:
    """What a script of ``examples`` prints in as many ranks of this machine; the test fails if a rank does."""
    environment = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "MASTER_PORT": free_port()}
    words = [str(EXAMPLES / script), *map(str, arguments)]
    processes = [_forks.Process(target=_rank, args=(rank, environment, words, log)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout)
        process.kill()
        process.join()  # a rank that had to be killed has a status, too
    said = log.read_text(encoding="utf-8")
    if any(process.exitcode for process in processes):
        pytest.fail(f"{script}: exit statuses {[process.exitcode for process in processes]}\n{said}")
    return said


def _rank(rank: int, environment: dict[str, str], words: list[str], log: Path) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))  # as Python does for a script
    with log.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    runpy.run_path(words[0], run_name="__main__")
