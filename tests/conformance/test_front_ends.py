"""DeepSpeed's front ends: none is missing from the docs, and none from DeepSpeed."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

from ds_plugin_sdk.hosts.deepspeed.front_ends import FRONT_ENDS

DOCS = Path(__file__).resolve().parents[2] / "docs" / "ops" / "README.md"


def test_the_table_in_the_docs_lists_every_front_end() -> None:
    rows = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if "Builder |" in line]
    listed = {name for row in rows for name in re.findall(r"`([\w.]+)`", row.split("|")[1])}
    assert listed == {front_end.name for front_end in FRONT_ENDS}


@pytest.mark.deepspeed
def test_every_inference_op_of_deepspeed_is_run() -> None:
    """Each module of DeepSpeed's op_binding has its class among the front ends."""
    import importlib

    package = importlib.import_module("deepspeed.ops.transformer.inference.op_binding")
    names = {part for front_end in FRONT_ENDS for part in front_end.name.split(".")}
    for module in pkgutil.iter_modules(package.__path__):
        classes = vars(importlib.import_module(f"{package.__name__}.{module.name}"))
        ops = {
            name for name, value in classes.items() if name.endswith("Op") and value.__module__.endswith(module.name)
        }
        assert ops - {"BaseOp"} <= names, f"{sorted(ops - names)} of {module.name}"
