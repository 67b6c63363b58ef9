"""docs/c-driver.md: its files, put into the generated project, hold the contract on a driver that is not the SDK's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pages
from ds_plugin_sdk.scaffold import Project, generate
from ds_plugin_sdk.settings import child_environment
from launchers import free_port
from pages import ROOT

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

PAGE = ROOT / "docs" / "c-driver.md"


def shell(line: str, folder: Path) -> None:
    subprocess.run(line, shell=True, cwd=folder, check=True)


def build_driver(folder: Path) -> Path:
    """The driver, built and installed by the page's lines, into `folder`."""
    for name in ("lib", "include"):
        (folder / name).mkdir(parents=True)
    for start in ("cc ", "cp "):
        shell(pages.line(PAGE, start).replace(pages.DRIVER, str(folder)), ROOT)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> dict[str, str]:
    """Where the plugin of the page is installed, and requested."""
    folder, site = tmp_path_factory.mktemp("vendor"), tmp_path_factory.mktemp("site")
    driver = build_driver(folder / "driver")
    project = generate(Project("zap", output=folder))
    shell(pages.line(PAGE, "rm "), folder)
    pages.put(PAGE, project, driver)
    offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, "--target", site, project], check=True)
    shutil.copytree(project / "examples", site / "examples")
    return child_environment(DS_PLUGIN_CACHE_DIR=str(kernel_cache), DS_ACCELERATOR="zap", PYTHONPATH=str(site))


@pytest.mark.timeout(900)
def test_the_driver_holds_every_case_of_runtime_and_collectives(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "ds_plugin_sdk.cli", "conformance", "zap"]
    command += ["--level", "runtime", "--level", "distributed"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all that was checked holds" in done.stdout
    assert " failed" not in done.stdout and "expected failure" not in done.stdout


# A sum of several chunks, and what is staged: strided views, other dtypes and operations. Each rank has its own device.
RANKS = """
import sys, torch, torch.distributed as dist
from ds_plugin_sdk import get_accelerator
from ds_plugin_zap import collectives
rank, port = map(int, sys.argv[1:])
get_accelerator().set_device(rank)
dist.init_process_group("zapccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
calls = []
real = collectives.driver.zap_all_reduce
collectives.driver.zap_all_reduce = lambda *arguments: calls.append(1) or real(*arguments)
here = torch.device("zap", rank)
values = torch.arange(40_000.0).to(here) * (rank + 1)
dist.all_reduce(values)
assert torch.equal(values.cpu(), torch.arange(40_000.0) * 3), values
assert len(calls) == 1
for tensor, operation, expected in (
    (torch.ones(6, 4, device=here)[:, ::2], dist.ReduceOp.SUM, 2.0),
    (torch.ones(5, dtype=torch.int64, device=here), dist.ReduceOp.SUM, 2.0),
    (torch.full((5,), rank + 1.0, device=here), dist.ReduceOp.MAX, 2.0),
    (torch.full((5,), rank + 1.0, device=here), dist.ReduceOp.AVG, 1.5),
):
    dist.all_reduce(tensor, op=operation)
    assert set(tensor.cpu().flatten().tolist()) == {expected}, (tensor, operation)
assert len(calls) == 1, "these are staged"
with torch.zap.stream(torch.Stream(here)):
    again = dist.all_reduce(values, async_op=True)
again.wait()
assert values.cpu()[1].item() == 6.0
print("rank", rank, "is right")
dist.destroy_process_group()
"""


@pytest.mark.timeout(300)
def test_two_ranks_add_up_by_the_driver(environment: dict[str, str]) -> None:
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(rank), port],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for number, rank in enumerate(ranks):
        out, err = rank.communicate(timeout=240)
        assert rank.returncode == 0, err
        assert f"rank {number} is right" in out
