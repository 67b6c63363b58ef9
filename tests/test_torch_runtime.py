"""``sdk new-plugin --runtime torch``: a plugin for a device that torch knows, by an extension of the vendor's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_plugin_sdk.scaffold import Project, generate
from ds_plugin_sdk.settings import child_environment

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

# A torch extension, as torch_npu is one: its import adds torch.npu. Here that is a simulated device.
TORCH_NPU = 'from ds_plugin_sdk import simulator\nsimulator.install("npu", devices=2, memory_mb=4096)\n'


def torch_plugin(
    folder: Path, name: str, *, extension: str, files: int = 2, collectives: str = "", in_class: str = ""
) -> Path:
    """The generated project, with the edits that docs/torch-backend.md asks of a vendor; `files`: how many devices."""
    project = generate(Project(name, runtime="torch", output=folder))
    package, devices = project / f"ds_plugin_{name}", folder / "dev"
    devices.mkdir()
    for index in range(files):
        (devices / f"{name}{index}").touch()
    manifest, accelerator = package / "__init__.py", package / "accelerator.py"
    text = manifest.read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("DEVICE_FILES")]
    manifest.write_text(text.replace(line, f'DEVICE_FILES = "{devices}/{name}[0-9]*"'), encoding="utf-8")
    text = accelerator.read_text(encoding="utf-8")
    text = text.replace("from ds_plugin_sdk import", f"import {extension}\nfrom ds_plugin_sdk import", 1)
    text += f'    communication_backend = "{collectives}"\n{in_class}'
    accelerator.write_text(text, encoding="utf-8")
    return project


def environment(project: Path, *paths: Path) -> dict[str, str]:
    """Where the project is installed, and requested."""
    site = project.parent / "site"
    offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, "--target", site, project], check=True)
    name = project.name.removeprefix("ds-plugin-")
    path = os.pathsep.join(map(str, (site, *paths)))
    return child_environment(PYTHONPATH=path, DS_ACCELERATOR=name)


def sdk(where: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ds_plugin_sdk.cli", *arguments]
    return subprocess.run(command, env=where, capture_output=True, text=True, check=False)


def cases(*patterns: str) -> list[str]:
    return [word for pattern in patterns for word in ("-k", pattern)]


@pytest.mark.parametrize(
    ("name", "files", "variable"),
    [
        ("xpu", "renderD[0-9]*", "ZE_AFFINITY_MASK"),
        ("npu", "davinci[0-9]*", "ASCEND_RT_VISIBLE_DEVICES"),
        ("zap", "zap[0-9]*", "ZAP_VISIBLE_DEVICES"),
    ],
)
def test_its_probe_imports_no_torch_and_finds_no_device_here(
    name: str, files: str, variable: str, tmp_path: Path
) -> None:
    project = generate(Project(name, runtime="torch", output=tmp_path))
    program = f"import sys, ds_plugin_{name} as p; print(p.probe()); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert files in done.stdout or done.stdout.startswith("available")
    program = f"""
import ds_plugin_{name} as p
p.DEVICE_FILES = "device[0-9]"
print(p.probe().devices)
"""
    for number in range(4):
        (project / f"device{number}").touch()
    counted = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        cwd=project,
        env={**os.environ, variable: "0,2"},
        capture_output=True,
        text=True,
    )
    assert counted.stdout.split() == ["2"]


# Where a device of torch's own says least: what TorchAccelerator asks of the module and of torch.accelerator.
RUNTIME = cases(
    "runtime.manifest",
    "runtime.device",
    "runtime.rng",
    "runtime.streams.wait",
    "runtime.memory.allocated",
    "runtime.dtypes",
)


@pytest.mark.deepspeed
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("compiled_once")
def test_a_device_of_an_extension_holds_the_contract_and_trains(tmp_path: Path) -> None:
    (tmp_path / "extension").mkdir()
    (tmp_path / "extension" / "torch_npu.py").write_text(TORCH_NPU, encoding="utf-8")
    compiler = '    compile_backend = "aot_eager"\n'
    project = torch_plugin(tmp_path, "npu", extension="torch_npu", collectives="npuccl", in_class=compiler)
    where = environment(project, tmp_path / "extension")
    done = sdk(where, "conformance", "npu", "--level", "runtime", *RUNTIME)
    assert done.returncode == 0, done.stdout + done.stderr
    train = [sys.executable, str(project / "examples" / "train.py"), "--steps", "10"]
    trained = subprocess.run(train, env=where, capture_output=True, text=True, check=False)
    assert "training on npu:0, 1 rank(s), NPU_Accelerator" in trained.stdout, trained.stderr


# A defect of that backend, which its vendor would write down so.
KNOWN = """
[[expected_failure]]
check = "runtime.device.allocate_out_of_range"
reason = "the backend gives a tensor on device 0 for an index that it does not have"
"""


@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not os.environ.get("DS_TEST_OPENREG"),
    reason="DS_TEST_OPENREG does not name FOLDER:MODULE of a built torch backend after PyTorch's OpenReg",
)
def test_a_torch_backend_of_others(tmp_path: Path) -> None:
    folder, _, extension = os.environ["DS_TEST_OPENREG"].partition(":")
    name = extension.removeprefix("torch_")
    project = torch_plugin(tmp_path, name, extension=extension, collectives="gloo")
    known = tmp_path / "conformance.toml"
    known.write_text(KNOWN, encoding="utf-8")
    where = environment(project, Path(folder))
    done = sdk(where, "conformance", name, "--level", "runtime", *RUNTIME, "--expectations", str(known))
    assert done.returncode == 0, done.stdout + done.stderr
