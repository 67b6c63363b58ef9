"""What `cuda_ops.py` measures: each case with the calls of every implementation, ours first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from gpu_check import inference_cases, optimizer_cases, training_cases
from gpu_check.cases import Case


def groups_of_cases(own: Path | None) -> dict[str, Callable[[], Iterator[Case]]]:
    """All cases in groups, which fail alone; what matters most first."""
    return {
        "optimizers": lambda: optimizer_cases.optimizer_cases(own),
        "ops": lambda: inference_cases.op_cases((8192, 4096)),
        "layer": lambda: training_cases.layer_cases(own),
        "decode": inference_cases.decode_cases,
        "losses": training_cases.loss_cases,
        "prompt": inference_cases.prompt_cases,
        "heads": inference_cases.head_cases,
        "training": training_cases.training_cases,
        "quantizer": lambda: inference_cases.quantizer_cases(own),
        "tokens": lambda: inference_cases.token_cases(own),
        "ops on other shapes": lambda: inference_cases.op_cases((32, 4096), (4096, 8192), (262144, 128)),
    }
