"""The process that reads a manifest as nobody else has imported anything: ``probe NAME`` or ``choose NAME``."""

from __future__ import annotations

import sys
import time

from ds_plugin_sdk.conformance.programs import give


def _probe(name: str) -> dict[str, object]:
    from ds_plugin_sdk import registry

    candidate = registry.only(registry.scan()[name])
    begin = time.perf_counter()
    answer = candidate.manifest.probe()
    seconds = time.perf_counter() - begin
    imported = sorted({"torch", "deepspeed"} & set(sys.modules))
    return {
        "seconds": seconds,
        "probe": isinstance(answer, registry.Probe),
        "answer": str(answer),
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
