"""DeepSpeed's launchers of several nodes carry the SDK's settings: their real commands, without a cluster."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.deepspeed

# `deepspeed --launcher NAME` as far as the command that it would run, for each of the runners: none of their programs
# need be installed.
PROGRAM = """
import json
from deepspeed.accelerator import get_accelerator
from deepspeed.launcher import multinode_runner, runner

# As an accelerator has it that names all variables of its device by one prefix.
kind = type(get_accelerator())
kind.exported_envs = (*getattr(kind, "exported_envs", ()), "CPU_")

class Started:
    returncode = 0
    def __init__(self, command, env):
        commands[name] = command
    def wait(self):
        pass

commands = {}
runner.subprocess.Popen = Started
runner.signal.signal = lambda *_: None
multinode_runner.MVAPICH_TMP_HOSTFILE = "mvapich"
with open("hosts", "w") as file:
    file.write("one slots=2\\ntwo slots=2\\n")
for launcher in (
    multinode_runner.PDSHRunner, multinode_runner.OpenMPIRunner, multinode_runner.MPICHRunner,
    multinode_runner.IMPIRunner, multinode_runner.SlurmRunner, multinode_runner.MVAPICHRunner,
):
    launcher.backend_exists = lambda self: True
    name = launcher.__name__.removesuffix("Runner").lower()
    options = ["--hostfile", "hosts", "--launcher", name, "--no_ssh_check", "--master_addr", "one", "--force_multi"]
    runner.main([*options, "train.py"])
with open("commands.json", "w") as file:
    json.dump(commands, file)
"""

OURS = {
    "DS_ACCELERATOR": "cpu",
    "DS_PLUGINS": "cpu,zap",
    "DS_PLUGIN_CACHE_DIR": "/scratch/my kernels/$USER's",
    "DS_PLUGIN_PROVENANCE": "ops.jsonl",
    "DS_PLUGIN_ZAP_CARD": "3",
    "DS_SIMULATOR_DEVICES": "4",
}
COMPILERS = {
    "CXX": "g++",
    "CXXFLAGS": "-O2 -DNAME='a b'",
    "TORCH_CUDA_ARCH_LIST": "8.0;9.0+PTX",
    "CPATH": "/opt",
}
# What the CPU's accelerator names: commas and braces are part of them.
THREADS = {"CPU_MODE": "fast", "KMP_AFFINITY": "granularity=fine,compact,1,0", "OMP_PLACES": "{0:4},{4:4}"}
STAY = {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1", "CPU_VISIBLE_DEVICES": "1", "DS_BUILD_OPS": "1"}


def pairs(option: str) -> Callable[[list[str]], dict[str, str]]:
    """Reads ``option NAME=VALUE``, as often as it is there."""

    def read(command: list[str]) -> dict[str, str]:
        values = [value for name, value in itertools.pairwise(command) if name == option and "=" in value]
        return dict(value.split("=", 1) for value in values)

    return read


def by_shell(command: list[str]) -> dict[str, str]:
    """pdsh joins its arguments, and a shell of the other node reads them."""
    exports = next(part for part in command if part.startswith("export "))
    done = subprocess.run(
        ["sh", "-c", f"{exports} env -0"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=True
    )
    return dict(line.split("=", 1) for line in done.stdout.decode().split("\0") if line)


def triples(command: list[str]) -> dict[str, str]:
    """Reads ``-genv NAME VALUE``."""
    return {command[at + 1]: command[at + 2] for at, word in enumerate(command) if word == "-genv"}


RECEIVED = {
    "pdsh": by_shell,
    "openmpi": pairs("-x"),
    "mpich": pairs("-genv"),
    "impi": triples,
    "mvapich": pairs("-env"),
}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, list[str]]]:
    """``commands(NAME=value)``: what each launcher runs in this environment; a ``.deepspeed_env`` adds to it."""

    def run(deepspeed_env: str = "", **variables: str) -> dict[str, list[str]]:
        folder = tmp_path_factory.mktemp("launcher")
        (folder / ".deepspeed_env").write_text(deepspeed_env, encoding="utf-8")
        environment = {**os.environ, "HOME": str(folder), **variables}
        subprocess.run([sys.executable, "-c", PROGRAM], env=environment, cwd=folder, capture_output=True, check=True)
        found: dict[str, list[str]] = json.loads((folder / "commands.json").read_text(encoding="utf-8"))
        return found

    return run


@pytest.fixture(scope="module")
def found(commands: Callable[..., dict[str, list[str]]]) -> dict[str, list[str]]:
    return commands("DS_PLUGIN_PROVENANCE=from-file\n", **OURS, **COMPILERS, **THREADS, **STAY)


@pytest.mark.parametrize("launcher", RECEIVED)
def test_a_launcher_carries_the_settings_and_what_kernels_are_compiled_with(
    launcher: str, found: dict[str, list[str]]
) -> None:
    received = RECEIVED[launcher](found[launcher])
    expected = {**OURS, **COMPILERS, **THREADS}
    del expected["DS_PLUGIN_PROVENANCE"]  # changed: see below
    assert {name: received.get(name) for name in expected} == expected
    assert not received.keys() & STAY.keys()


def test_srun_has_the_whole_environment_and_cuts_no_value_at_its_commas(found: dict[str, list[str]]) -> None:
    (exports,) = (part for part in found["slurm"] if part.startswith("--export"))
    assert exports.startswith("--export=ALL")
    carried = {name for name in (*OURS, *COMPILERS, *THREADS) if f",{name}=" in exports}
    assert carried == {"DS_PLUGIN_PROVENANCE"}  # of the user's file


@pytest.mark.parametrize("launcher", RECEIVED)
def test_the_users_file_of_variables_has_the_last_word(launcher: str, found: dict[str, list[str]]) -> None:
    assert RECEIVED[launcher](found[launcher])["DS_PLUGIN_PROVENANCE"] == "from-file"


def test_without_plugins_the_other_nodes_are_without_them_too(
    commands: Callable[..., dict[str, list[str]]],
) -> None:
    found = commands(DS_PLUGIN_AUTOLOAD="0", DS_ACCELERATOR="cpu", **COMPILERS)
    for launcher, read in RECEIVED.items():
        received = read(found[launcher])
        assert (received["DS_PLUGIN_AUTOLOAD"], received["DS_ACCELERATOR"]) == ("0", "cpu"), launcher
        assert not received.keys() & COMPILERS.keys(), launcher
