"""What the text of a model's file says of its attention."""

from __future__ import annotations

import inspect
import re
import sys

# Files that do something else for torch's attention by its name.
_ASKS_FOR_SDPA = re.compile(r"""_attn_implementation\s*(==|!=|in)\s*[^\n]*["']sdpa["']""")
# Files that have a table of their own by the name of the attention. Those of transformers read it when a model is made.
_LOOKS_UP = re.compile(r"(?<!_FUNCTIONS)\[[^\]\n]*_attn_implementation\]")


def asks_for_sdpa(file: str) -> bool:
    """Whether a model's file does something else for torch's attention by its name."""
    source = source_of(file) or ""
    looks_up = not file.startswith("transformers.") and _LOOKS_UP.search(source)
    return bool(looks_up or _ASKS_FOR_SDPA.search(source))


def source_of(module: str) -> str | None:
    """The text of a module's file; None where it has none, as a notebook."""
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return None
