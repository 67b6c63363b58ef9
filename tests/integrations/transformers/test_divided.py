"""Models that DeepSpeed's AutoTP divides among two ranks mean the same when they are accelerated, after or before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launchers import launch

PROGRAM = Path(__file__).with_name("divided_model.py")


@pytest.mark.deepspeed
@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_of_autotp(kernel_cache: Path, tmp_path: Path) -> None:
    variables = {"PYTHONPATH": str(PROGRAM.parents[2]), "PYTHONWARNINGS": "ignore"}
    launch("torchrun", 2, PROGRAM, str(tmp_path / "out"), DS_PLUGIN_CACHE_DIR=str(kernel_cache), **variables)
    for rank in range(2):
        found = json.loads((tmp_path / f"out.{rank}").read_text(encoding="utf-8"))
        assert sorted(found) == ["llama", "opt"]
        for name, result in found.items():
            where = f"{name} on rank {rank}: {result}"
            assert result["held"] < 0.8, where
            assert result["plain"] < 1e-3, where
            assert result["accelerated after"] < 1e-3, where
            assert result["accelerated before"] < 1e-3, where
            assert result["calls"]["cached_attention"] > 0, where
            assert result["layers"] == [], where
            assert any("deepspeed.module_inject.layers" in why for why in result["left"]), where
