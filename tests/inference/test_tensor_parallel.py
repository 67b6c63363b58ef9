"""``init_inference(tensor_parallel={"tp_size": 2})`` with kernel injection: two ranks say what one does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("tensor_parallel.py")


@pytest.mark.deepspeed
@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_say_what_one_does(old_transformers: Path, tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(port)]
    variables = {
        "DS_ACCELERATOR": "cpu",
        "DS_PLUGIN_CACHE_DIR": str(tmp_path / "cache"),
        "DS_PLUGIN_FALLBACK": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(old_transformers),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, *torchrun, str(PROGRAM), str(tmp_path / "out")],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=840,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"out.{rank}").read_text(encoding="utf-8"))
        assert sorted(found) == ["gpt2", "opt"]
        for model, result in found.items():
            assert result["tokens"] == result["expected_tokens"], (rank, model)
            assert all(len(row) == 44 for row in result["tokens"])
            assert result["calls"]["cached_attention"] == 3 * 32
            # The layers are divided; the embeddings, a tenth of these small models, are not.
            assert result["held"] < 0.6, (rank, model)
