"""Commands that need torch. The others start in a fraction of its import's time, and without it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ds_plugin_sdk.errors import SdkError


def needs_torch(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, which says without a traceback that torch cannot be imported."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        import_torch()
        command(*arguments, **options)

    return run


def import_torch() -> None:
    """Import torch.

    Raises:
        SdkError: it cannot be imported.
    """
    try:
        import torch

        if not hasattr(torch, "Tensor"):  # a folder or a file of that name
            where = torch.__file__ or ", ".join(torch.__path__)
            raise ImportError(f"{where} is no torch")
    except Exception as error:  # absent, without its libraries, or the fault of a backend or of its metadata
        raise SdkError(
            "torch cannot be imported",
            why=f"{type(error).__name__}: {error}",
            hint=f"see `{sys.executable} -c 'import torch'`; the SDK needs torch 2.11 or later in this environment",
        ) from error
