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
        assert all(
            table[f"{name}Builder"]
            for name in ("Inference", "InferenceCore", "FusedLamb", "FPQuantizer", "EvoformerAttn")
        )
        assert not any(table[f"{name}Builder"] for name in ("DeepCompile", "InferenceCutlass", "RaggedOps"))


def test_of_deepspeeds_own_accelerator_is_left_alone(python: Python) -> None:
    table = "from deepspeed.ops.op_builder.all_ops import ALL_OPS\nprint(sorted(ALL_OPS))"
    program = "import deepspeed\n" + table
    own = python(program, DS_ACCELERATOR="cpu", DS_PLUGIN_AUTOLOAD="0")
    without = python(program, DS_ACCELERATOR="cpu", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert own.stdout.splitlines()[-1] == without.stdout.splitlines()[-1]


def test_an_accelerator_may_answer_none_for_an_op_it_lacks(zap: Path, python: Python) -> None:
    """As those do that were written against DeepSpeed's own class."""
    (zap / "few.py").write_text(
        """
from ds_plugin_cpu.accelerator import CPU_Accelerator


class Zap(CPU_Accelerator):
    def get_op_builder(self, class_name):
        return super().get_op_builder(class_name) if class_name == "FusedAdamBuilder" else None

    def create_op_builder(self, class_name):
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()
""",
        encoding="utf-8",
    )
    (zap / "zap_accelerators.py").write_text("from few import Zap\n", encoding="utf-8")
    table = "import deepspeed\nfrom deepspeed.ops.op_builder.all_ops import ALL_OPS\nprint(sorted(ALL_OPS))"
    done = python(table, DS_ACCELERATOR="zap")
    assert "fused_adam" in done.stdout.splitlines()[-1]
    assert "Warning: ds-plugin-sdk" not in done.stderr
