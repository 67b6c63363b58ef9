"""`make cuda-compile`: what the wheel with all CUDA ops weighs, for which GPUs, and how long each took to compile.

DS_BUILD_OPS=1 pip wheel --no-deps --no-build-isolation --wheel-dir FOLDER plugins/cuda
python tools/cuda_compile.py FOLDER
"""

from __future__ import annotations

import json
import struct
import sys
import zipfile
from collections import Counter
from pathlib import Path

FATBIN = struct.pack("<I", 0xBA55ED50)  # how each of nvcc's containers of device code begins


def device_code(binary: bytes) -> Counter[str]:
    """Bytes of device code in a library, by architecture."""
    found: Counter[str] = Counter()
    at = binary.find(FATBIN)
    while at >= 0:
        _, header, size = struct.unpack_from("<HHQ", binary, at + 4)
        part, end = at + header, at + header + size
        while part < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", binary, part)
            (arch,) = struct.unpack_from("<I", binary, part + 28)
            found["PTX" if kind == 1 else f"sm_{arch}"] += header + size
            part += header + size
        at = binary.find(FATBIN, end)
    return found


def table(rows: dict[str, tuple[float, int, Counter[str]]]) -> list[str]:
    """In Markdown: for each family seconds, size, and device code by architecture, in KiB; and all together."""
    together: Counter[str] = Counter()
    for _, _, code in rows.values():
        together += code
    total = (sum(row[0] for row in rows.values()), sum(row[1] for row in rows.values()), together)
    archs = sorted(together, key=lambda arch: (arch == "PTX", len(arch), arch))
    lines = [f"| family | s | KiB | {' | '.join(archs)} |", "|---" * (3 + len(archs)) + "|"]
    for family, (seconds, size, code) in {**rows, "all": total}.items():
        parts = " | ".join(f"{code[arch] / 1024:.0f}" for arch in archs)
        lines.append(f"| {family} | {seconds:.0f} | {size / 1024:.0f} | {parts} |")
    return lines


def main(folder: Path) -> None:
    (wheel,) = folder.glob("ds_plugin_cuda-*.whl")
    rows: dict[str, tuple[float, int, Counter[str]]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(name for name in archive.namelist() if name.endswith("/key.json")):
            record = json.loads(archive.read(name))
            family = record["key"]["request"]["op"]
            binary = archive.read(name.replace("key.json", f"{family}.so"))
            rows[family] = record["seconds"], len(binary), device_code(binary)
    print("\n".join(table(rows)))
    print(f"\n{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
