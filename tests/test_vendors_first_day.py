"""The vendor's way from an empty environment to training on a node without a compiler, by lines and files of the pages.

Real are the environments, the SDK's wheel, installs, builds, the driver, devices, training. Not real: torch, DeepSpeed
and the other packages that an index would give are links to those of this environment; `sdk conformance zap` runs some
of its cases, and training is short. `pytest -s` shows what each line says, and its time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pages
from pages import ROOT
from test_c_driver import build_driver

pytestmark = [pytest.mark.deepspeed, pytest.mark.compiler, pytest.mark.slow]

README = ROOT / "README.md"
WRITING = ROOT / "docs" / "writing-a-plugin.md"
DRIVER = ROOT / "docs" / "c-driver.md"

# By its path: the second machine has nothing but its own environment on PATH.
BASH = str(shutil.which("bash"))

OURS = ("ds_plugin", "_editable", "pip", "__pycache__")
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


class Machine:
    """A new virtual environment, and a shell in it."""

    def __init__(self, folder: Path, cache: Path, path: str) -> None:
        self.folder = folder
        folder.mkdir()
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        (self.site,) = (folder / "venv" / "lib").glob("python3*/site-packages")
        lend_packages(folder / "lent")
        (self.site / "lent.pth").write_text(f"{folder / 'lent'}\n", encoding="utf-8")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DS_", "PYTHON", "PIP_"))}
        path = f"{folder / 'venv' / 'bin'}:{path}"
        self.environment = {**kept, **OFFLINE, "PATH": path, "DS_PLUGIN_CACHE_DIR": str(cache), "HOME": str(folder)}

    def types(self, line: str, folder: Path | None = None) -> str:
        """What a line says, typed here or in `folder`; the test fails if the line does."""
        start = time.monotonic()
        command, place = [BASH, "-c", line], folder or self.folder
        done = subprocess.run(command, cwd=place, env=self.environment, capture_output=True, text=True, check=False)
        sys.stdout.write(f"$ {line}    ({time.monotonic() - start:.0f} s)\n{done.stdout}\n")
        assert done.returncode == 0, f"$ {line}\n{done.stdout}{done.stderr}"
        return done.stdout


def places_of_packages() -> list[Path]:
    return [Path(place) for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]


def programs_of_packages() -> list[str]:
    """Where their programs lie, such as auditwheel."""
    return [str(place.parents[2] / "bin") for place in places_of_packages()]


def lend_packages(folder: Path) -> None:
    """Links to the packages of this environment, but for the SDK, its plugins and pip."""
    folder.mkdir()
    for place in places_of_packages():
        for package in place.iterdir():
            link = folder / package.name
            if not package.name.startswith(OURS) and package.suffix != ".pth" and not link.exists():
                link.symlink_to(package)


def cases(*names: str) -> str:
    """Options of `sdk conformance`, which otherwise runs all."""
    return "".join(f" -k {name}" for name in names)


@pytest.mark.timeout(1200)
def test_the_vendors_first_day(tmp_path: Path, kernel_cache: Path) -> None:
    driver = build_driver(tmp_path / "driver")
    first = Machine(tmp_path / "first", kernel_cache, ":".join([os.environ["PATH"], *programs_of_packages()]))
    scaffold_and_train(first)
    write_a_runtime_and_a_kernel(first, driver)
    wheel = build_a_wheel(first)
    second = Machine(tmp_path / "second", tmp_path / "no-cache", str(tmp_path / "empty"))
    train_without_a_compiler(second, wheel, first)


def scaffold_and_train(machine: Machine) -> None:
    """The README's block for vendors, line by line, and the list that the new project's README asks for."""
    install, new, editable, conformance, train = pages.lines(README, "## For vendors of a device")
    machine.types(install, ROOT)
    machine.types(new)
    machine.types(editable)
    listed = machine.types(pages.line(machine.folder / "ds-plugin-zap" / "README.md", "sdk list"))
    assert re.search(r"zap +ds-plugin-zap 0.1.0 +available: 2 devices \(simulated\) .*<- chosen", listed)
    some = cases(
        "runtime.manifest.imports",
        "runtime.manifest.probe_is_honest/*",
        "ops.native/FusedAdamBuilder/adam_",
        "ops.accuracy/adam_/float32",
    )
    expected = " --expectations ds-plugin-zap/conformance.toml"
    assert "all that was checked holds" in machine.types(conformance + some + expected)
    assert "training on zap:0, 1 rank(s), ZAP_Accelerator" in machine.types(f"{train} --steps 3")


def write_a_runtime_and_a_kernel(machine: Machine, driver: Path) -> None:
    """Memory, streams, collectives of docs/c-driver.md and the kernel of docs/writing-a-plugin.md."""
    *_, conformance, train = pages.lines(README, "## For vendors of a device")
    machine.types(pages.line(DRIVER, "rm "))
    project = machine.folder / "ds-plugin-zap"
    pages.put(DRIVER, project, driver)
    pages.put(WRITING, project, driver)
    assert re.search(r"zap .* available: 2 devices .*<- chosen", machine.types("sdk list"))
    runtime = ("runtime.memory.allocated", "runtime.streams.wait_stream", "runtime.manifest.probe_is_honest")
    norms = ("ops.native/NormBuilder/*", *(f"ops.accuracy/{op}/*" for op in NORMS))
    said = machine.types(conformance + cases(*runtime, *norms))
    assert "all that was checked holds" in said
    assert "training on zap:0, 1 rank(s), ZAP_Accelerator" in machine.types(f"{train} --steps 3")


def build_a_wheel(machine: Machine) -> Path:
    machine.types(pages.line(WRITING, "DS_BUILD_OPS=1 pip wheel"))
    (built,) = machine.folder.glob("*.whl")
    assert re.fullmatch(r"ds_plugin_zap-0\.1\.0-py3-none-linux_\w+\.whl", built.name)
    machine.types(pages.line(WRITING, "auditwheel repair"))
    (repaired,) = (machine.folder / "dist").iterdir()
    assert re.fullmatch(r"ds_plugin_zap-0\.1\.0-py3-none-manylinux_2_\d+_\w+\.whl", repaired.name)
    return repaired


# The op that is a Python module made with pybind11; nothing is worth a warning.
HELLO = "from ds_plugin_zap.op_builder.kernels import HelloBuilder; print(HelloBuilder().load().hello())"

NORMS = ("layer_norm", "post_layer_norm", "pre_layer_norm", "rms_norm", "pre_rms_norm")
LIBRARIES = {"adam", "norm", "zap_hello", "device_runtime", "torch_device"}


def train_without_a_compiler(machine: Machine, wheel: Path, built_on: Machine) -> None:
    """Everything that the device needs is in the wheel, or is the driver."""
    install, *_, train = pages.lines(README, "## For vendors of a device")
    machine.types(install, ROOT)
    machine.types(f"pip install {wheel}")
    package = machine.site / "ds_plugin_zap"
    assert {path.name for path in (package / "prebuilt").glob("*/*")} == LIBRARIES
    for record in (package / "prebuilt").rglob("key.json"):
        text = record.read_text(encoding="utf-8")
        assert not [place for place in (built_on.folder, ROOT) if f"{place}/" in text], "folders of its builder"
    assert not list((package / "prebuilt").rglob("build.log"))
    shutil.copytree(built_on.folder / "ds-plugin-zap" / "examples", machine.folder / "ds-plugin-zap" / "examples")
    machine.environment |= {"DS_PLUGIN_FALLBACK": "0", "DS_PLUGIN_PROVENANCE": str(machine.folder / "run.jsonl")}
    machine.types("sdk report")
    facts = json.loads(machine.types("sdk report --json"))
    assert facts["compilers"]["cxx"].startswith("absent")
    origins = {op["name"]: op["origin"] for op in facts["ops"]}
    assert {origins[name] for name in ("fused_adam", "norm", "zap_hello")} == {"prebuilt"}
    assert not {"compiles", "cache", "failed", "broken"} & set(origins.values())
    assert "training on zap:0, 1 rank(s), ZAP_Accelerator" in machine.types(f"{train} --steps 3")
    assert machine.types(f"python -W error -c '{HELLO}'") == "hello from zap\n"
    assert re.search(r"fused_adam +ds-plugin-zap 0.1.0 +prebuilt", machine.types("sdk report --run run.jsonl"))
    assert not (machine.folder.parent / "no-cache").exists(), "something was compiled"
