"""Optimizers on DTensors: FSDP2, tensor parallelism, checkpoints. Real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers import launch

WORKER = Path(__file__).with_name("dtensors_worker.py")
CHECKS = {
    "optimizers": 2,
    "two_dimensions": 4,
    "checkpoints": 2,
    "whole_checkpoints": 2,
    "gradients": 2,
    "later": 2,
    "lamb": 2,
    "errors": 2,
    "replicas": 2,
}


@pytest.mark.compiler
@pytest.mark.parametrize(("check", "ranks"), CHECKS.items(), ids=CHECKS)
@pytest.mark.usefixtures("compiled_once")
def test_dtensors(check: str, ranks: int, tmp_path: Path) -> None:
    """What each check asks is said in the worker."""
    assert launch("torchrun", ranks, WORKER, check, str(tmp_path)).count("ok") == ranks
