"""docs/troubleshooting.md: what it quotes is what the SDK, or the named package, says; every error has a page."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from ds_plugin_sdk import errors

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"(?m)^### `(.+)`$", PAGE)

# Messages that others print: what they are written in.
OTHERS = {
    "Type fp16 is not supported on your device": ("deepspeed", "runtime/engine.py"),
    "Torch not compiled with CUDA enabled": ("torch", "cuda/__init__.py"),
    "doesn't have NCCL built in": ("torch", "distributed/distributed_c10d.py"),
    "Unknown backend type": ("torch", "distributed/distributed_c10d.py"),
    "Your setup doesn't support bf16/gpu": ("transformers", "training_args.py"),
    "only supported on CUDA GPUs": ("lightning", "pytorch/strategies/deepspeed.py"),
    "Could not find schema for ds_plugin::": None,  # torch's, in C++
    "Cannot access accelerator device when none is available": None,
    "Can't instantiate abstract class": None,  # Python's own
    "No module named 'mpi4py'": None,
    "No module named 'hatchling'": None,
    "No such file or directory: 'numactl'": None,
}


def texts(file: Path) -> str:
    """Every string of a Python file but its docstrings, with `...` where a value stands in it."""
    found = []
    tree = ast.parse(file.read_text(encoding="utf-8"))
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if node in docstrings:
            continue
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return "\n".join(found)


@pytest.fixture(scope="module")
def said() -> str:
    """Everything that the SDK and the CPU plugin can say."""
    folders = (ROOT / "sdk", ROOT / "plugins" / "cpu")
    return "\n".join(texts(file) for folder in folders for file in folder.rglob("*.py"))


def test_there_are_messages() -> None:
    assert len(MESSAGES) >= 50
    assert set(OTHERS) <= set(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_printed_as_it_is_quoted(message: str, said: str) -> None:
    if message not in OTHERS:
        assert message in said
    elif (place := OTHERS[message]) is not None:
        spec = importlib.util.find_spec(place[0])
        assert spec is not None and spec.submodule_search_locations is not None
        assert message in (Path(spec.submodule_search_locations[0]) / place[1]).read_text(encoding="utf-8")


def test_every_error_has_a_row_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    every = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
    assert [name for name in every if f"| `{name}` |" not in page] == []
