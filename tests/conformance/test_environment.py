"""How a report names the machine."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from ds_plugin_sdk.conformance import environment

X86 = "processor\t: {}\ncpu family\t: {}\nmodel\t\t: {}\nmodel name\t: AMD EPYC\n\n"


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (X86.format(0, 26, 2) + X86.format(1, 25, 17), "AMD EPYC, family 26, model 2"),
        ("processor\t: 0\ncpu family\t: sh4\nmachine\t: RTS7751R2D\n\n", None),
        ("processor\t: 0\ncpu\t\t: POWER9\n\nmodel\t\t: 8335-GTW\n", None),
        ("", None),
    ],
    ids=["x86, two kinds", "SuperH", "POWER", "none"],
)
def test_the_first_processor_with_its_numbers(
    cpuinfo: str, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    if cpuinfo:
        file.write_text(cpuinfo, encoding="utf-8")
    monkeypatch.setattr(environment, "Path", lambda path: file)
    assert environment.processor() == (name or platform.processor() or platform.machine())
