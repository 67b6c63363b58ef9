"""The process that reads a manifest as nobody else has imported anything: ``probe NAME`` or ``choose NAME``."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO

from ds_plugin_sdk.conformance.programs import give


@contextlib.contextmanager
def _printed_into(file: IO[bytes]) -> Iterator[None]:
    """Within it all goes into a file that this process prints, from native code too."""
    kept = [os.dup(stream) for stream in (1, 2)]
    for stream in (1, 2):
        os.dup2(file.fileno(), stream)
    try:
        yield
    finally:
        sys.stdout.flush()
        for stream, old in zip((1, 2), kept, strict=True):
            os.dup2(old, stream)
            os.close(old)


def _probe(name: str) -> dict[str, object]:
    from ds_plugin_sdk import registry

    with tempfile.TemporaryFile() as file:
        with _printed_into(file):
            candidate = registry.only(registry.scan()[name])
            begin = time.perf_counter()
            answer = candidate.manifest.probe()
            seconds = time.perf_counter() - begin
        file.seek(0)
        printed = file.read().decode(errors="replace").strip()
    imported = sorted({"torch", "deepspeed"} & set(sys.modules))
    return {
        "seconds": seconds,
        "probe": isinstance(answer, registry.Probe),
        "answer": str(answer),
        "devices": getattr(answer, "devices", None),
        "printed": printed,
        "imported": imported,
    }


def _choose() -> dict[str, object]:
    from ds_plugin_sdk import get_accelerator

    accelerator = get_accelerator()
    cls = type(accelerator)
    return {"accelerator": f"{cls.__module__}:{cls.__name__}", "device": accelerator.device_name()}


def main() -> None:
    _, question, name = sys.argv[1:]
    give(_probe(name) if question == "probe" else _choose())


if __name__ == "__main__":
    main()
