"""PyInstaller, which copies into a program what it sees imported: plugins are imported by nobody, but found by name.

Without this a frozen program runs on the accelerator that DeepSpeed brings along, and no message says so.
"""

from __future__ import annotations

from pathlib import Path


def hook_dirs() -> list[str]:
    """Where PyInstaller finds what to do for ``import deepspeed``; it asks for this by an entry point."""
    return [str(Path(__file__).parent)]
