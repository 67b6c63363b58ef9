"""DeepSpeed's front ends: none is missing from the docs, and none from DeepSpeed."""

from __future__ import annotations

import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds_plugin_sdk.conformance.front_ends import FRONT_ENDS

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


# Puts a note of its name in the place of every function of a module, whatever names it goes by.
CALLED = """
import functools, importlib, json, sys
import deepspeed, torch
from ds_plugin_sdk.conformance.front_ends import FRONT_ENDS

called = set()

def noted(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        called.add(function.__name__)
        return function(*args, **kwargs)
    return wrapper

module = importlib.import_module(f"ds_plugin_sdk.integrations.deepspeed.modules.{sys.argv[1]}")
owned = {
    name: value
    for name, value in vars(module).items()
    if callable(value) and getattr(value, "__module__", "").startswith(module.__name__)
}
for name, value in owned.items():
    setattr(module, name, noted(value))
for front_end in FRONT_ENDS:
    for result in front_end.run(torch.device("cpu")) if front_end.builder == sys.argv[2] else ():
        error = (result.actual.double() - result.expected).abs().max()
        assert error <= result.tolerance, f"{front_end.name}: {result.what} is off by {error}"
everything = {value.__name__ for value in owned.values()}
print(json.dumps({"all": sorted(everything), "never called": sorted(everything - called)}))
"""


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("module", "builder"),
    [("transformer_inference", "InferenceBuilder"), ("inference_core_ops", "InferenceCoreBuilder")],
)
def test_every_function_of_the_inference_modules_is_run(
    module: str, builder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reference implementations, so conformance tries each of them on every device; and gives what it should."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("DS_PLUGIN_COMPILE", "0")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CALLED, module, builder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["all"]) >= 12
    assert not found["never called"]
