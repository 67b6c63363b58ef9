"""The commands of examples/slurm/README.md on two nodes that have no network: `make test-jobs`, after prepare.sh.

Both jobs train for some steps on the two nodes. Then one node plays that it does not see the folder of the others:
it installs the packed wheels alone, and must find every kernel in them.
"""

from __future__ import annotations

import collections
import json
import os
import re
import shutil
import subprocess
import sys

from clusters import nodes
from clusters.cases import REPOSITORY

FOLDER = REPOSITORY / "build" / "jobs"
PAGE = REPOSITORY / "examples" / "slurm" / "README.md"
PATH = f"{sys.base_exec_prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# How each script that the page submits shares the two cores of a node, and what its log says if all went well. A mask
# is that of a rank's cores.
OPTIONS = {"train": ("--ntasks-per-node=1", "--cpus-per-task=2"), "train_deepspeed": ("--cpus-per-task=1",)}
SAID = {
    "train": (
        r"Nothing will fail\.",
        r"2 ranks on CPU_Accelerator",
        r"node2, task  1  0 .*mask 0x3 set",
        r"5 steps on 2 ranks",
        r"fused_adam.* cache",
    ),
    "train_deepspeed": (r"4 ranks on CPU_Accelerator", r"node2, task  3  1 .*mask 0x2 set", r"5 steps on 4 ranks"),
}
FEW = ("--steps", "5", "--eval-every", "5", "--eval-windows", "8", "--sample-bytes", "20")


def main() -> None:
    environment = {"PATH": PATH, "HOME": os.environ.get("HOME", "/root"), "DS_HOME": str(FOLDER)}
    shutil.rmtree(FOLDER / "daemons", ignore_errors=True)
    both = nodes.make(FOLDER / "daemons", REPOSITORY, PATH)
    failed = [script for script in submitted() if not train(script, environment)]
    failed += [] if wheels(both[1], environment) else ["the wheels"]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def submitted() -> list[str]:
    """The scripts of the page's `sbatch` commands, by their names."""
    return re.findall(r"^    sbatch examples/slurm/(\w+)\.sbatch", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def train(script: str, environment: dict[str, str]) -> bool:
    """Submit a script, wait for its end, and look for what its log should say."""
    log = FOLDER / f"{script}.log"
    options = ["--wait", *OPTIONS[script], f"--output={log}"]
    command = ["sbatch", *options, f"examples/slurm/{script}.sbatch", *FEW]
    status = subprocess.run(command, env=environment, cwd=REPOSITORY, check=False).returncode
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    missing = [said for said in SAID[script] if not re.search(said, text)]
    print(
        f"{script}.sbatch: exit status {status}; {log} {f'does not say {missing}' if missing else 'is as it should be'}"
    )
    return status == 0 and not missing


def wheels(node: nodes.Node, environment: dict[str, str]) -> bool:
    """Install the packed wheels on a node as prepare.sh says, and ask where its kernels come from."""
    venv = FOLDER / "from-wheels"
    shutil.rmtree(venv, ignore_errors=True)
    settings = {**environment, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(FOLDER / "wheels"), "DS_PLUGIN_COMPILE": "0"}
    on_node = [*node.enter, "env", *(f"{name}={value}" for name, value in settings.items())]
    for command in (
        ["python3", "-m", "venv", str(venv)],
        [f"{venv}/bin/pip", "install", "--quiet", "ds-plugin-sdk[demo]", "ds-plugin-cpu"],
    ):
        subprocess.run([*on_node, *command], check=True)
    # With a cache of its own: the compiled kernels lie in the folder that this node plays not to see.
    report = ["env", f"DS_PLUGIN_CACHE_DIR={venv}/kernels", f"{venv}/bin/sdk", "report", "--json"]
    said = subprocess.run([*on_node, *report], stdout=subprocess.PIPE, text=True, check=True)
    origins = collections.Counter(op["origin"] for op in json.loads(said.stdout)["ops"])
    print(f"from wheels: {dict(origins)}")
    return set(origins) <= {"prebuilt", "combined", "reference"} and origins["prebuilt"] > 0


if __name__ == "__main__":
    main()
