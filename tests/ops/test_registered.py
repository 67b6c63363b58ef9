"""Every op of a family with kernels has one, or wants none: a forgotten registration is slow and silent."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ds_plugin_sdk.conformance import op_info
from ds_plugin_sdk.op_builder import op_table

KERNELS = Path(__file__).resolve().parents[2] / "kernels"

CPU_ALONE = {"matmul"}  # on CUDA torch's product is the fastest
FAMILIES = sorted({op.families[0] for op in op_table.OPS if op.kernels} - {"all_reduce"})  # it has no description


@pytest.mark.parametrize("family", FAMILIES)
def test_every_op_of_a_family_is_registered(family: str) -> None:
    """In the header of ``ops/`` for all devices at once, or in the bindings of each device."""
    header = (KERNELS / f"include/ds_kernels/ops/{family}.h").read_text(encoding="utf-8")
    for device in ("cpu",) if family in CPU_ALONE else ("cpu", "cuda"):
        binding = (KERNELS / device / f"{family}_binding.cpp").read_text(encoding="utf-8")
        registered = set(re.findall(r'm\.impl\("(\w+)"', header + binding))
        described = {info.name for info in op_info.infos() if info.family == family and not info.plain}
        assert described == registered, f"kernels/include/ds_kernels/ops/{family}.h, on {device}"
