"""``sdk new-plugin``: what it makes, and what it rejects with one clear line and nothing half-written."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cookiecutter.exceptions import RepositoryNotFound

from ds_plugin_sdk import scaffold, simulator
from ds_plugin_sdk.cli.new_plugin import new_plugin
from ds_plugin_sdk.errors import ScaffoldError
from ds_plugin_sdk.scaffold import LICENSES, Project, Runtime, generate, template_folder
from plugin_site import Install


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


@pytest.mark.parametrize("runtime", ["simulated", "torch"])
@pytest.mark.parametrize("name", ["zap", "xpu", "mi400", "two_words"])
def test_a_project_is_whole_and_has_no_leftovers(name: str, runtime: Runtime, tmp_path: Path) -> None:
    folder = generate(Project(name, runtime=runtime, output=tmp_path))
    assert list(tmp_path.iterdir()) == [folder]
    for file in filter(Path.is_file, folder.rglob("*")):
        text = re.sub(r"\$\{\{ (matrix|github)\.\w+ \}\}", "", file.read_text(encoding="utf-8"))  # GitHub's own
        assert not any(mark in text for mark in ("{{", "{%", "cookiecutter")), file
        assert not text.startswith("\n"), file
    for file in python_files(folder):
        compile(file.read_text(encoding="utf-8"), str(file), "exec")
    project = (folder / "pyproject.toml").read_text(encoding="utf-8")
    assert f'[project.entry-points."ds_plugin_sdk.plugins"]\n{name} = "ds_plugin_{name}:plugin"' in project
    assert 'template = "1"' in project
    assert (folder / f"ds_plugin_{name}" / "runtime" / "memory.cpp").exists() == (runtime == "simulated")


@pytest.mark.parametrize(
    ("name", "simulated", "known"),
    [("zap", "zap", "zap"), ("xpu", "xpusim", "xpu"), ("mi400", "mi", "mi"), ("two_words", "two_words", "two_words")],
)
def test_the_device_has_a_name_that_torch_accepts(name: str, simulated: str, known: str) -> None:
    assert Project(name).device_type == simulated
    assert Project(name, runtime="torch").device_type == known


def test_the_accelerator_is_short(tmp_path: Path) -> None:
    folder = generate(Project("zap", output=tmp_path))
    assert len((folder / "ds_plugin_zap" / "accelerator.py").read_text(encoding="utf-8").splitlines()) <= 16


@pytest.mark.parametrize("license", LICENSES)
def test_every_licence_has_its_text(license: str, tmp_path: Path) -> None:
    folder = generate(Project("zap", vendor="Zap & Sons", license=license, output=tmp_path))
    text = (folder / "LICENSE").read_text(encoding="utf-8")
    assert "Zap & Sons" in text
    named = {"Apache-2.0": "Apache License", "MIT": "MIT License", "BSD-3-Clause": "Redistribution and use"}
    assert named.get(license, "All rights reserved") in text


@pytest.mark.parametrize(
    "name",
    ["", "Zap", "1zap", "zap-1", "../zap", "/zap", "zap/x", "class", "_zap", "zap_", "z__p", "z" * 31, "zäp", "zap\n"],
)
def test_bad_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(ScaffoldError, match="cannot be a plugin's name"):
        generate(Project(name, output=tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name",
    [
        *("cpu", "cuda", "meta", "privateuseone", "sdk", "self", "torch", "nn", "relu", "float", "data", "mm2"),
        *("ops", "classes", "train", "count", "filename"),
    ],
)
def test_names_that_torch_or_the_sdk_has(name: str, tmp_path: Path) -> None:
    with pytest.raises(ScaffoldError, match=f"the name '{name}' is taken"):
        generate(Project(name, output=tmp_path))


@pytest.mark.parametrize("name", ["n", "n1", "x"])
def test_names_whose_collectives_torch_has(name: str, tmp_path: Path) -> None:
    with pytest.raises(ScaffoldError, match=f"the name '{name}' is taken.*ccl, which torch has itself"):
        generate(Project(name, output=tmp_path))


def test_a_name_that_an_installed_plugin_has(install: Install, tmp_path: Path) -> None:
    install("zap")
    with pytest.raises(ScaffoldError, match=r"ds-plugin-zap 1.0 is installed here and has it"):
        generate(Project("zap", output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("vendor", ["", "  ", 'a"b', "a\\b", "a\nb", "{{ 7 * 7 }}", "bell\a", "\x7f", "\udcff"])
def test_bad_vendors(vendor: str, tmp_path: Path) -> None:
    with pytest.raises(ScaffoldError, match="cannot be a vendor's name"):
        generate(Project("zap", vendor=vendor, output=tmp_path))


def test_without_cookiecutter_the_command_says_what_to_install(tmp_path: Path) -> None:
    """A node that trains has no need of it, so only the extra brings it."""
    program = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('cookiecutter', 'hatchling', 'editables', 'pluggy'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from ds_plugin_sdk.cli import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", program, "new-plugin", "zap", "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "error: a project cannot be generated (plugin 'zap'): cookiecutter" in done.stderr
    assert "-> pip install 'ds-plugin-sdk[vendor]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_nothing_is_ever_overwritten(tmp_path: Path) -> None:
    (tmp_path / "ds-plugin-zap").mkdir()
    (tmp_path / "ds-plugin-zap" / "precious").write_text("mine", encoding="utf-8")
    with pytest.raises(ScaffoldError, match="nothing is ever overwritten"):
        generate(Project("zap", output=tmp_path))
    assert [path.name for path in tmp_path.rglob("*")] == ["ds-plugin-zap", "precious"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    with pytest.raises(ScaffoldError, match="the project cannot be written"):
        generate(Project("zap", output=tmp_path / "file"))


def test_nothing_is_left_of_a_rendering_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ds_plugin_sdk.scaffold._finish", full)
    with pytest.raises(ScaffoldError, match="No space left on device"):
        generate(Project("zap", output=tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "runtime"), [("zap", "simulated"), ("z" * 30, "simulated"), ("zap", "torch")])
def test_style_and_types_of_the_project_are_clean(name: str, runtime: Runtime, tmp_path: Path) -> None:
    folder = generate(Project(name, runtime=runtime, output=tmp_path))
    # Longer names break other lines, and have the same types.
    others = [["ruff", "format", "--check", "."], ["mypy"]] if name == "zap" else []
    for command in (["ruff", "check", "."], *others):
        done = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "device", "says"),
    [
        ("xpu", "xpusim", "torch has a device 'xpu' itself, so the simulated one is called 'xpusim'."),
        ("xpu2", "xpusim", "torch has a device 'xpu' itself, so the simulated one is called 'xpusim'."),
        ("npu2", "npu", "torch takes no digits in a device's name."),
    ],
)
def test_the_command_says_what_to_do_next(
    name: str, device: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new_plugin(name, vendor="Zap", runtime="simulated", license="MIT", into=tmp_path)
    said, folder = capsys.readouterr().out, tmp_path / f"ds-plugin-{name}"
    assert f"Made {folder}: plugin '{name}', device '{device}'." in said
    assert says in said
    assert f"pip install --no-build-isolation -e {folder}" in said
    assert f"DS_ACCELERATOR={name} python {folder}/examples/train.py" in said


def test_what_is_printed_can_be_typed_where_folders_have_spaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new_plugin("zap", vendor="Zap", runtime="simulated", license="MIT", into=tmp_path / "my out")
    said = capsys.readouterr().out
    install = next(line for line in said.splitlines() if "pip install" in line)
    assert shlex.split(install)[-1] == str(tmp_path / "my out" / "ds-plugin-zap")
    train = next(line for line in said.splitlines() if "DS_ACCELERATOR" in line)
    assert Path(shlex.split(train)[-1]).is_file()


@pytest.mark.parametrize("runtime", ["simulated", "torch"])
def test_a_project_of_an_sdk_that_nobody_can_write_can_be_edited(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Nix's store, or images that were made read-only."""
    folders = {"template": scaffold.template_folder(), "runtime": simulator.sources_dir()}
    for name, folder in folders.items():
        shutil.copytree(folder, tmp_path / name)
        for path in (tmp_path / name, *(tmp_path / name).rglob("*")):
            path.chmod(path.stat().st_mode & ~0o222)
    monkeypatch.setattr(scaffold, "template_folder", lambda: tmp_path / "template")
    monkeypatch.setattr(simulator, "sources_dir", lambda: tmp_path / "runtime")
    folder = generate(Project("zap", runtime=runtime, output=tmp_path / "out"))
    assert not [path for path in (folder, *folder.rglob("*")) if not path.stat().st_mode & 0o200]


@pytest.mark.parametrize("home", ["home", "file/home"])
def test_no_home_is_needed_and_nothing_is_left_in_one(home: str, tmp_path: Path) -> None:
    """As of `docker run --user 1000`, whose home cannot be made."""
    (tmp_path / "home").mkdir()
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "ds_plugin_sdk", "new-plugin", "zap", "--output", str(tmp_path / "out")]
    environment = {**os.environ, "HOME": str(tmp_path / home)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "home").iterdir())


def test_no_compiled_python_comes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip compiles the template's files where it installs them."""
    template = Path(shutil.copytree(template_folder(), tmp_path / "template"))
    for folder in [path for path in template.rglob("*") if path.is_dir()]:
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / "kernels.cpython-311.pyc").write_bytes(b"")
    monkeypatch.setattr("ds_plugin_sdk.scaffold.template_folder", lambda: template)
    assert not list(generate(Project("zap", output=tmp_path)).rglob("__pycache__"))


def test_a_place_that_looks_like_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert generate(Project("zap", output=Path("me@work"))).is_dir()


def test_what_cookiecutter_cannot_do_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RepositoryNotFound("no such template")

    monkeypatch.setattr("cookiecutter.main.cookiecutter", fail)
    with pytest.raises(ScaffoldError, match="no such template"):
        generate(Project("zap", output=tmp_path))
