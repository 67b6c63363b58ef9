"""The smallest form of each example: a few steps, in few seconds."""

from __future__ import annotations

import argparse
import ast
import csv
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import example_ranks
import example_table
from example_ranks import EXAMPLES
from example_table import side_by_side

SCRIPTS = sorted(EXAMPLES.rglob("*.py"))
SHELL = sorted(file for file in EXAMPLES.rglob("*") if file.suffix in {".sh", ".sbatch", ".lsf"})


def trains(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that runs DeepSpeed in ranks of its own."""
    for mark in (
        pytest.mark.deepspeed,
        pytest.mark.compiler,
        pytest.mark.timeout(900),
        pytest.mark.usefixtures("compiled_once"),
    ):
        test = mark(test)
    return test


def load(name: str) -> ModuleType:
    """A module of an example, which is a folder of scripts and no package."""
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def metrics(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    return found


def losses(folder: Path) -> list[float]:
    return [loss for _, loss in metrics(folder)["curves"]["loss"]]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: str(file.relative_to(EXAMPLES)))
def test_users_code_imports_nothing_of_ours(script: Path) -> None:
    ours = [
        name
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        if name.startswith("ds_plugin")
    ]
    # One way to generate is the SDK's own integration of transformers.
    allowed = {"generate.py": ["ds_plugin_sdk.integrations.transformers"]}
    assert ours == allowed.get(script.name, [])


# Python keeps what it compiles beside the sources, in a folder that is no example.
_FOLDERS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__")


@pytest.mark.parametrize("folder", _FOLDERS, ids=lambda f: f.name)
def test_an_example_is_in_the_table(folder: Path) -> None:
    assert f"]({folder.name}/" in (EXAMPLES / "README.md").read_text(encoding="utf-8")


def test_the_table_of_full_sizes_runs_what_is_there_and_says_how_far_apart_the_losses_are(tmp_path: Path) -> None:
    for example in example_table.EXAMPLES:
        scripts = re.findall(r"examples/\S+\.(?:py|sh)", example.command)
        assert scripts and all((EXAMPLES.parent / script).is_file() for script in scripts), example.command
    for name, drift in zip(side_by_side.RUNS, (0, 0.001), strict=True):
        run = {"curves": {"loss": [[step, 2 + drift * step] for step in range(1, 41)]}}
        folder = side_by_side.folder_of(tmp_path, name)
        folder.mkdir()
        (folder / "metrics.json").write_text(json.dumps(run), encoding="utf-8")
    assert example_table.apart(tmp_path) == "0.01; 0.04"


# --- cifar10 ----------------------------------------------------------------------------------------------------------


def test_drawn_images_are_those_of_a_seed_and_have_every_class() -> None:
    images = load("cifar10/images")
    one, again, other = images.draw(400, seed=1), images.draw(400, seed=1), images.draw(400, seed=2)
    assert one.pictures.shape == (400, 3, 32, 32)
    assert one.pictures.abs().max() <= 1
    assert sorted(set(one.classes.tolist())) == list(range(10))
    assert torch.equal(one.pictures, again.pictures) and not torch.equal(one.pictures, other.pictures)


def test_the_data_set_itself_is_read(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (3, 3073), dtype=np.uint8)
    rows[:, 0] = [7, 0, 9]
    for name in ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"):
        rows.tofile(tmp_path / name)
    train, held_out = load("cifar10/images").load(tmp_path, 0, 0)
    assert train.classes.tolist() == [7, 0, 9] * 2
    assert held_out.classes.tolist() == [7, 0, 9]
    red_corner = (train.pictures[1, 0, 0, 0] + 1) * 127.5
    assert round(red_corner.item()) == rows[1, 1]


@trains
def test_cifar10_with_experts_on_two_ranks(tmp_path: Path) -> None:
    options = ["--moe", "--ep-world-size", 2, "--steps", 4, "--eval-every", 2, "--images", 400, "--out", tmp_path]
    said = example_ranks.run("cifar10/train.py", *options, ranks=2, log=tmp_path / "log")
    assert "on each of 2 ranks of CPU_Accelerator" in said
    found = metrics(tmp_path)["curves"]
    assert len(found["loss"]) == 4
    assert found["loss"][0][1] == pytest.approx(2.3, abs=0.2)  # untrained: a guess among ten
    assert [step for step, _ in found["accuracy"]] == [0, 2, 4]
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")


# --- gpt2_trainer -----------------------------------------------------------------------------------------------------


@trains
def test_a_resumed_gpt2_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    config = EXAMPLES / "gpt2_trainer" / "zero2.json"
    options = ["--deepspeed", config, "--steps", 4, "--batch", 2, "--length", 32, "--held-out", 4]
    example_ranks.run("gpt2_trainer/train.py", *options, "--out", tmp_path / "whole", log=tmp_path / "log")
    resumed = [*options, "--out", tmp_path / "resumed", "--resume", tmp_path / "whole" / "checkpoint-2"]
    said = example_ranks.run("gpt2_trainer/train.py", *resumed, log=tmp_path / "log")
    assert "steps 3 to 4, resumed and uninterrupted: the largest difference of a loss is 0\n" in said
    assert losses(tmp_path / "whole")[2:] == losses(tmp_path / "resumed")[-2:]


# --- opt_sft ----------------------------------------------------------------------------------------------------------


def test_the_questions_have_answers_and_only_those_are_learned() -> None:
    from transformers import ByT5Tokenizer

    data = load("opt_sft/data")
    examples = {kind: data.load(kind) for kind in ("text", "answers", "names")}
    assert all(len(some) > 1000 for some in examples.values())
    assert data.load("answers") == examples["answers"]
    (one,) = (example for example in examples["answers"] if "json.dumps " in example.prompt)
    assert one.answer == "Serialize ``obj`` to a JSON formatted ``str``."
    batch = data.encode([one], ByT5Tokenizer(extra_ids=0), 128)
    learned = batch["labels"][0] != data.IGNORED
    assert learned.sum() == len(one.answer) + 1  # and its end
    assert bytes(batch["labels"][0, learned][:-1].sub(3).tolist()).decode() == one.answer
    assert batch["attention_mask"].sum() == len(one.prompt) + len(one.answer) + 1


@trains
def test_the_three_stages_of_an_opt(tmp_path: Path) -> None:
    folder = EXAMPLES / "opt_sft"
    first, second, third = (tmp_path / name for name in ("text", "answers", "lora"))
    few = ["--steps", 3, "--batch", 2, "--length", 64]
    stages = [
        ["--config", folder / "zero3.json", "--data", "text", "--out", first],
        ["--config", folder / "offload.json", "--data", "answers", "--model", first, "--out", second],
        ["--config", folder / "zero3.json", "--data", "names", "--model", second, "--out", third],
    ]
    for stage, more in zip(stages, ([], [], ["--lora", 4, "--gradient-checkpointing"]), strict=True):
        said = example_ranks.run("opt_sft/train.py", *stage, *more, *few, log=tmp_path / "log")
    assert [float(rate) > 0 for rate in re.findall(r"throughput: ([\d.]+) samples/s", said)] == [True] * 3
    assert metrics(first)["optimizer"] == "FusedAdam" and metrics(second)["optimizer"] == "DeepSpeedCPUAdam"
    assert all(np.isfinite(losses(stage)).all() for stage in (first, second, third))
    assert list((second / "nvme").rglob("*.swp"))  # the optimizer's state did go to files
    trained = torch.load(third / "lora.pt")
    assert len(trained) == 2 * 6 * 4  # two factors for each of six linear layers in each of four blocks
    assert any(part.abs().sum() > 0 for name, part in trained.items() if name.endswith("lora_b"))


LAUNCHER = """\
#!/bin/sh
case "$2" in
    *good) echo "throughput: 25.50 samples/s" ;;
    *slow) echo "throughput: 5.00 samples/s" ;;
    *wrong) echo "ValueError: Hostfile contains a bad entry: a slot=2" >&2; echo "bye" >&2; exit 1 ;;
    *stuck) trap 'echo "ended by a signal"; exit 1' TERM; echo "waiting for worker-1"; sleep 600 & wait ;;
esac
"""


def test_run_batch_names_what_fails_and_what_hangs_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for ``deepspeed``, which does as its hostfile is called."""
    launcher = tmp_path / "bin" / "deepspeed"
    launcher.parent.mkdir()
    launcher.write_text(LAUNCHER, encoding="utf-8")
    launcher.chmod(0o755)
    monkeypatch.setenv("PATH", str(launcher.parent), prepend=":")
    (tmp_path / "hosts").mkdir()
    for name in ("a-good", "b-wrong", "c-stuck", "d-slow"):
        (tmp_path / "hosts" / name).write_text("localhost slots=2\n", encoding="utf-8")
    script = EXAMPLES / "opt_sft" / "run_batch.py"
    out = tmp_path / "out"
    options = ["--threshold", "20", "--timeout", "5", "--", "train.py"]
    done = subprocess.run(
        [sys.executable, script, tmp_path / "hosts", out, *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    with (out / "results.csv").open(encoding="utf-8") as file:
        rows = {row["batch"]: row for row in csv.DictReader(file)}
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "a-good": "passed",
        "b-wrong": "failed",
        "c-stuck": "hung",
        "d-slow": "slow",
    }
    assert rows["a-good"]["throughput"] == "25.5"
    assert rows["b-wrong"]["why"] == "ValueError: Hostfile contains a bad entry: a slot=2"
    assert rows["c-stuck"]["why"] == "no end in 5 s; last line: waiting for worker-1"
    assert rows["d-slow"]["why"] == "5.00 of 20 samples/s"
    assert "1 of 4 batches passed" in done.stdout
    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "c-stuck.log").exists()


# --- generate ---------------------------------------------------------------------------------------------------------


@trains
def test_text_is_generated_by_our_integration(tmp_path: Path) -> None:
    """The other ways are what tests/inference tests."""
    options = ["--by", "sdk", "--width", 128, "--layers", 2, "--tokens", 4, "--out", tmp_path]
    said = example_ranks.run("generate/generate.py", *options, log=tmp_path / "log")
    assert "--- sdk on 1 rank(s) of CPU_Accelerator" in said
    assert metrics(tmp_path)["same"] is True


@pytest.mark.deepspeed
def test_random_weights_choose_no_token_without_a_byte() -> None:
    sizes = argparse.Namespace(model=None, dtype="float32", width=64, layers=1)
    tokenizer, model = load("generate/generate").load(sizes)
    assert tokenizer.decode(list(range(model.config.vocab_size)), skip_special_tokens=True).startswith("\0\1")


# --- Job scripts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "rank"),
    [
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4"}, "5 8 1 4"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}, "1 2 0 1"),
        (
            {"JSM_NAMESPACE_RANK": "7", "JSM_NAMESPACE_SIZE": "12"}
            | {"JSM_NAMESPACE_LOCAL_RANK": "1", "JSM_NAMESPACE_LOCAL_SIZE": "6"},
            "7 12 1 6",
        ),
        # mpirun in a job of Slurm, whose variables are those of the job's first process.
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "1"}
            | {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
            | {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "3 4 1 2",
        ),
    ],
)
def test_a_rank_is_what_its_launcher_says(tmp_path: Path, said: dict[str, str], rank: str) -> None:
    script = tmp_path / "script.py"
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"
    script.write_text(f"import os, sys\nprint(*map(os.environ.get, {names}), *sys.argv[1:])\n", encoding="utf-8")
    environment = {"PATH": os.environ["PATH"], "MASTER_ADDR": "node-1", "MASTER_PORT": "29500", **said}
    command = [sys.executable, EXAMPLES / "ranks.py", script, "--steps", "3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{rank} --steps 3\n"


def test_a_rank_whose_launcher_is_not_known_does_not_begin() -> None:
    environment = {"PATH": os.environ["PATH"], "MASTER_ADDR": "node-1", "MASTER_PORT": "29500", "SLURM_PROCID": "0"}
    command = [sys.executable, EXAMPLES / "ranks.py", "script.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no launcher has said which rank this is" in done.stderr
    assert "srun wants --ntasks-per-node" in done.stderr


JSRUN = """\
#!/bin/bash
# Starts a resource set's task after the other, and says to each who it is, as jsrun does.
echo "jsrun $*"
while [[ $1 == --* ]]; do
    case $1 in --nrs) sets=$2 ;; --rs_per_host) here=$2 ;; esac
    shift 2
done
for ((rank = 0; rank < sets; rank++)); do
    JSM_NAMESPACE_RANK=$rank JSM_NAMESPACE_SIZE=$sets JSM_NAMESPACE_LOCAL_RANK=$((rank % here)) \\
        JSM_NAMESPACE_LOCAL_SIZE=$here "$@"
done
"""


def test_the_script_for_lsf_starts_six_ranks_on_each_compute_node(tmp_path: Path) -> None:
    """By a stand-in for ``jsrun``; the ranks say who they are in place of training."""
    examples = tmp_path / "examples"
    for name in ("ranks.py", "slurm/env.sh", "summit/train.lsf"):
        (examples / name).parent.mkdir(parents=True, exist_ok=True)
        (examples / name).write_bytes((EXAMPLES / name).read_bytes())
    (examples / "tiny_gpt").mkdir()
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"
    script = f"import os, sys\nprint(*map(os.environ.get, {names}), *sys.argv[1:])\n"
    (examples / "tiny_gpt" / "train.py").write_text(script, encoding="utf-8")
    programs = {"jsrun": JSRUN, "sdk": '#!/bin/sh\necho "sdk $* at $DS_PLUGIN_CPU_LEVEL"\n'}
    for name, text in programs.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text, encoding="utf-8")
        program.chmod(0o755)
    (tmp_path / "hosts").write_text("batch1\n" + "c05n01\n" * 42 + "c05n02\n" * 42, encoding="utf-8")
    environment = {
        "PATH": os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "DS_HOME": str(tmp_path / "home"),
        "LS_SUBCWD": str(tmp_path),
        "LSB_DJOB_HOSTFILE": str(tmp_path / "hosts"),
        "LSB_JOBID": "171234",
    }
    command = ["bash", examples / "summit" / "train.lsf"]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    looked, *nodes, started = (line for line in done.stdout.splitlines() if not line[0].isdigit())
    assert looked == "jsrun --nrs 2 --rs_per_host 1 --tasks_per_rs 1 --cpu_per_rs 1 sdk doctor --port 21234"
    assert nodes == ["sdk doctor --port 21234 at power9"] * 2
    assert started.startswith(
        "jsrun --nrs 12 --rs_per_host 6 --tasks_per_rs 1 --cpu_per_rs 7 --gpu_per_rs 0 --bind packed:7 python -u"
    )
    ranks = [line for line in done.stdout.splitlines() if line[0].isdigit()]
    assert ranks == [f"{rank} 12 {rank % 6} 6 c05n01 21234 7 --out out/tiny_gpt-171234" for rank in range(12)]


@pytest.mark.parametrize("script", SHELL, ids=lambda file: str(file.relative_to(EXAMPLES)))
def test_a_shell_script_is_one(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    shellcheck = Path(sysconfig.get_path("scripts")) / "shellcheck"
    found = subprocess.run([shellcheck, "--shell=bash", script], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
