"""A generated plugin, installed as its vendor would: its own tests green, wheel and sdist built.

So too without any kernel of its own: its reference implementations then hold the contract. The way there by the pages,
and a wheel with binaries, are in tests/test_vendors_first_day.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pages
from ds_plugin_sdk import provenance
from ds_plugin_sdk.op_builder import op_table
from ds_plugin_sdk.scaffold import Project, generate

pytestmark = [pytest.mark.deepspeed, pytest.mark.compiler, pytest.mark.slow]

OFFLINE = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]


def installed(folder: Path, site: Path, cache: Path) -> dict[str, str]:
    """The environment in which the plugin in `folder` is installed, and requested."""
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *OFFLINE, "--target", str(site), str(folder)],
        check=True,
        timeout=120,
    )
    return {
        **os.environ,
        "DS_PLUGIN_CACHE_DIR": str(cache),
        "DS_ACCELERATOR": folder.name.removeprefix("ds-plugin-"),
        "PYTHONPATH": str(site),
        "PROJECT": str(folder),
    }


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> dict[str, str]:
    """Where plugin ``zap`` is installed, and requested."""
    folder = generate(Project("zap", output=tmp_path_factory.mktemp("vendor")))
    return installed(folder, tmp_path_factory.mktemp("site"), kernel_cache)


@pytest.fixture(scope="module")
def without_kernels(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> dict[str, str]:
    """Where plugin ``bare`` is installed, whose vendor has taken the template's kernels away."""
    folder = generate(Project("bare", output=tmp_path_factory.mktemp("vendor")))
    package = folder / "ds_plugin_bare"
    (package / "op_builder" / "kernels.py").unlink()
    (folder / "conformance.toml").unlink()  # it excuses one of them
    shutil.rmtree(package / "csrc")
    return installed(folder, tmp_path_factory.mktemp("site"), kernel_cache)


def run_its_pytest(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=environment["PROJECT"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    return done.stdout


@pytest.mark.timeout(600)
def test_its_own_tests_are_green(environment: dict[str, str]) -> None:
    assert "skipped" not in run_its_pytest(environment, "tests")


# Also those that only a kernel of the device's own has.
CASES = "runtime.streams.wait or ops.accuracy/adam_ or ops.stream/adam_ or ops.asynchronous/adam_ or ops.large/adam_"


@pytest.mark.timeout(600)
def test_its_pytest_run_checks_conformance(environment: dict[str, str]) -> None:
    """Some of each level; all of it is `sdk conformance zap`."""
    said = run_its_pytest(environment, "-vv", "-m", "conformance", "-k", CASES)
    assert "conformance::runtime.streams.wait_stream PASSED" in said
    for case in ("ops.accuracy/adam_/bfloat16", "ops.stream/adam_", "ops.asynchronous/adam_", "ops.large/adam_"):
        assert f"conformance::{case} PASSED" in said


# Cases, and the op family that each needs; the whole of it is `sdk conformance bare --level ops --level training`.
SELECTED = {
    "ops.accuracy/adam_/bfloat16": "adam",
    "ops.accuracy/quantize/float16": "quantizer",
    "ops.accuracy/cached_attention/float32": "attention",
    "ops.accuracy/rms_norm/bfloat16": "norm",
    "ops.accuracy/fused_bias_gelu/float32": "transformer",
    "ops.gradcheck/fused_bias_gelu": "transformer",
    "ops.front_end/FusedLamb": "lamb",
    "ops.front_end/SoftmaxContextOp.WorkspaceOp": "softmax",
    "training.zero.losses/1": "adam",
}


@pytest.mark.timeout(600)
def test_it_holds_the_contract_without_any_kernel(without_kernels: dict[str, str], tmp_path: Path) -> None:
    sources = tmp_path / "provenance.jsonl"
    levels = [word for level in ("ops", "training") for word in ("--level", level)]
    selected = [word for case in SELECTED for word in ("-k", case)]
    done = subprocess.run(
        [sys.executable, "-m", "ds_plugin_sdk.cli", "conformance", "bare", *levels, *selected],
        cwd=without_kernels["PROJECT"],
        env={**without_kernels, "DS_PLUGIN_PROVENANCE": str(sources)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"bare: {len(SELECTED)} passed" in done.stdout
    # Cases may compare with the host, whose kernels are the SDK's; what ran on the device is "reference" alone.
    origins = [(op_table.family_of(record.name), record.origin) for record in provenance.read(sources)[0]]
    assert {family for family, origin in origins if origin == "reference"} >= set(SELECTED.values())


@pytest.mark.timeout(600)
def test_a_driver_without_queues(tmp_path: Path, kernel_cache: Path) -> None:
    folder = generate(Project("zap", output=tmp_path))
    for path, text in pages.files(pages.ROOT / "docs" / "privateuse1.md").items():
        (folder / path).write_text(text, encoding="utf-8")
    accelerator = folder / "ds_plugin_zap" / "accelerator.py"
    accelerator.write_text(accelerator.read_text(encoding="utf-8") + "    synchronous = True\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "ds_plugin_sdk.cli", "conformance", "zap", "-k", "training.zero.losses/1"],
        cwd=folder,
        env=installed(folder, tmp_path / "site", kernel_cache),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all that was checked holds" in done.stdout


@pytest.mark.timeout(600)
def test_an_op_of_its_own(tmp_path: Path, kernel_cache: Path) -> None:
    """All of docs/conformance.md: kernel, builder, function and description."""
    folder = generate(Project("zap", output=tmp_path))
    for path, text in pages.files(pages.ROOT / "docs" / "conformance.md").items():
        (folder / path).write_text(text, encoding="utf-8")
    accelerator = folder / "ds_plugin_zap" / "accelerator.py"
    accelerator.write_text(
        accelerator.read_text(encoding="utf-8") + '    op_info = "ds_plugin_zap.op_info"\n', encoding="utf-8"
    )
    environment = installed(folder, tmp_path / "site", kernel_cache)

    def sdk(*words: str) -> str:
        program = [sys.executable, "-W", "error::RuntimeWarning", "-m", "ds_plugin_sdk.cli", *words]
        done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # As the project's own workflow has it.
    for check in ("mypy", "ruff check .", "ruff format --check ."):
        subprocess.run([sys.executable, "-m", *check.split()], cwd=folder, check=True, timeout=120)

    cases = ("ops.builder_name/ScaledReluBuilder", "ops.*/scaled_relu", "ops.*/scaled_relu/*")
    said = sdk("conformance", "zap", *(word for case in cases for word in ("-k", case)))
    assert "zap: 20 passed" in said and "all that was checked holds" in said
    assert "scaled_relu" in sdk("build", "zap", "--ops", "scaled_relu")
    assert "scaled_relu" in sdk("report")


def test_it_builds_as_a_wheel_and_an_sdist(environment: dict[str, str], tmp_path: Path) -> None:
    program = "import hatchling.build as b, sys; b.build_sdist(sys.argv[1]); b.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=environment["PROJECT"], check=True)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"ds_plugin_zap-0.1.0.tar.gz", "ds_plugin_zap-0.1.0-py3-none-any.whl"}
