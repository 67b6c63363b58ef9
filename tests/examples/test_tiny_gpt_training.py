"""The demo's script is plain DeepSpeed, and runs."""

from __future__ import annotations

import ast
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from ds_plugin_sdk.settings import child_environment
from launchers import free_port


def test_example_imports_nothing_of_ours(tiny_gpt_folder: Path) -> None:
    imported: set[str] = set()
    for file in tiny_gpt_folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
    local = {file.stem for file in tiny_gpt_folder.glob("*.py")}
    others = imported - set(sys.stdlib_module_names) - local
    assert others == {"deepspeed", "torch", "matplotlib", "plotext", "tqdm"}


def test_config_asks_for_what_the_demo_shows(tiny_gpt_folder: Path) -> None:
    config = json.loads((tiny_gpt_folder / "ds_config.json").read_text(encoding="utf-8"))
    assert config["optimizer"]["type"] == "AdamW"
    assert "torch_adam" not in config["optimizer"]["params"]  # so DeepSpeed takes its fused op
    assert config["zero_optimization"]["stage"] == 2


@pytest.mark.deepspeed
@pytest.mark.compiler
@pytest.mark.slow
def test_three_steps_in_one_process(tiny_gpt_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(tiny_gpt_folder / "train.py"), "--steps", "3", "--eval-every", "3"]
    command += ["--eval-windows", "8", "--sample-bytes", "20", "--out", str(tmp_path)]
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    environment = child_environment(**launched, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"  # DeepSpeed's own builds need ninja

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)

    assert done.returncode == 0, done.stderr
    assert "bits per byte on held-out text" in done.stdout
    run = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    assert len(run["losses"]) == len(run["step_seconds"]) == 3
    assert [step for step, _ in run["evaluations"]] == [0, 3]
    # An untrained model guesses among 256 bytes, and three steps already help.
    assert run["losses"][0] == pytest.approx(math.log(256), rel=0.05)
    assert run["evaluations"][1][1] < run["evaluations"][0][1]
    assert run["sample"].startswith("import os\nimport sys\n\ndef ")
    assert run["optimizer"].endswith("FusedAdam")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
