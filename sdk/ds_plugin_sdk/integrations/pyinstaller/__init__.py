"""PyInstaller, which copies into a program what it sees imported: plugins are imported by nobody, but found by name.

Without this a frozen program has no op's kernels, and runs DeepSpeed on the accelerator that it brings along.
"""

from __future__ import annotations

from pathlib import Path


def hook_dirs() -> list[str]:
    """Where PyInstaller finds what to do for DeepSpeed and for the SDK; it asks for this by an entry point."""
    return [str(Path(__file__).parent)]
