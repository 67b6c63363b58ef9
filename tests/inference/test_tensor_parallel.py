"""``init_inference(tensor_parallel={"tp_size": 2})``, under every launcher: two ranks say what one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launchers import launch

PROGRAM = Path(__file__).with_name("tensor_parallel.py")

LAYERS, STEPS = 3, 32


@pytest.mark.deepspeed
@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("launcher", "ranks"), [("deepspeed", 2), ("torchrun", 4), ("mpirun", 2)])
def test_two_ranks_say_what_one_does(
    launcher: str, ranks: int, old_transformers: str, kernel_cache: Path, tmp_path: Path
) -> None:
    launch(
        launcher,
        ranks,
        PROGRAM,
        str(tmp_path / "out"),
        DS_PLUGIN_CACHE_DIR=str(kernel_cache),
        DS_PLUGIN_FALLBACK="0",
        PYTHONPATH=old_transformers,
        PYTHONWARNINGS="ignore",
    )
    found = [json.loads((tmp_path / f"out.{rank}").read_text(encoding="utf-8")) for rank in range(ranks)]
    for rank, models in enumerate(found):
        assert sorted(models) == ["gpt2", "llama", "opt"]
        for model, result in models.items():
            check(model, result, f"{model} on rank {rank}")
    if ranks == 4:  # two pairs that say the same would not show whose sums they are
        assert found[0]["llama"]["tokens"] != found[2]["llama"]["tokens"]


def check(model: str, result: dict[str, Any], where: str) -> None:
    assert result["tokens"] == result["expected_tokens"], where
    assert all(len(row) == 12 + STEPS for row in result["tokens"]), where
    if model == "llama":  # after attention, after the MLP, after the head
        assert result["inference_all_reduce"] == (2 * LAYERS + 1) * STEPS, where
    else:
        assert result["calls"]["cached_attention"] == LAYERS * STEPS, where
    # The layers are divided; the embeddings, a tenth to a fifth of these small models, are not.
    assert result["held"] < 0.65, where
