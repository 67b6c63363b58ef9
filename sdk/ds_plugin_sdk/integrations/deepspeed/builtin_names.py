"""The names that the installed DeepSpeed has for accelerators of its own, without importing it."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path


def builtin_names() -> tuple[str, ...]:
    """What DeepSpeed understands in ``DS_ACCELERATOR`` without plugins; empty where that cannot be read."""
    try:
        spec = importlib.util.find_spec("deepspeed")
        if spec is None or spec.origin is None:
            return ()
        source = Path(spec.origin).with_name("accelerator") / "real_accelerator.py"
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SUPPORTED_ACCELERATOR_LIST":
                return tuple(ast.literal_eval(node.value))
    except (ImportError, OSError, SyntaxError, ValueError):
        pass
    return ()
