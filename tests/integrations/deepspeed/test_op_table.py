"""DeepSpeed's table of ops has an entry for every builder's name, as its own tests and its users look them up."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from deepspeed_support import Python

pytestmark = pytest.mark.deepspeed

TABLE = """
import deepspeed
import deepspeed.ops.op_builder as builders

names = [name for name in vars(builders) if name.endswith("Builder") and name != "OpBuilder"]
print({name: deepspeed.ops.__compatible_ops__[getattr(builders, name).NAME] for name in names})
"""

# An accelerator without kernels of its own: ops run by their references.
REFERENCES = """
from ds_plugin_cpu.accelerator import CPU_Accelerator


class Zap(CPU_Accelerator):
    def device_name(self, device_index=None):
        return "meta"
"""


def entries(output: str) -> dict[str, bool]:
    table: dict[str, bool] = ast.literal_eval(output.strip().splitlines()[-1])
    return table


def test_with_kernels_and_after_a_change_to_a_device_without(zap: Path, python: Python) -> None:
    (zap / "references.py").write_text(REFERENCES, encoding="utf-8")
    change = "import references\ndeepspeed.accelerator.set_accelerator(references.Zap())"
    done = python(TABLE + change + TABLE, DS_ACCELERATOR="cpu")
    before, after = (entries(line) for line in done.stdout.splitlines() if line.startswith("{"))
    for table in (before, after):
        assert all(table[f"{name}Builder"] for name in ("Inference", "InferenceCore", "FusedLamb", "Quantizer"))
        assert not any(table[f"{name}Builder"] for name in ("FPQuantizer", "EvoformerAttn", "CCLComm", "ShareMemComm"))


def test_of_deepspeeds_own_accelerator_is_left_alone(python: Python) -> None:
    table = "from deepspeed.ops.op_builder.all_ops import ALL_OPS\nprint(sorted(ALL_OPS))"
    program = "import deepspeed\n" + table
    own = python(program, DS_ACCELERATOR="cpu", DS_PLUGIN_AUTOLOAD="0")
    without = python(program, DS_ACCELERATOR="cpu", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert own.stdout.splitlines()[-1] == without.stdout.splitlines()[-1]
