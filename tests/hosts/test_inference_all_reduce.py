"""DeepSpeed's inference_all_reduce on our plugin: right for every group, op and dtype, under every launcher."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

# Two groups where there are four ranks, else one. DeepSpeed's own shared-memory op gives sums over all ranks for any
# op, leaves float64 and int32 as they are, and crashes where its launcher has not set LOCAL_SIZE.
PROGRAM = """
import sys
import deepspeed
import torch
from deepspeed import comm as dist

deepspeed.init_distributed("gloo", verbose=False)
rank, size = dist.get_rank(), dist.get_world_size()
groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])[: size // 2]]
group = groups[rank // 2]
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32):
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        tensor = torch.full((1000,), rank + 1, dtype=dtype)
        dist.inference_all_reduce(tensor, op=op, group=group)
        values = tensor.unique().tolist()
        print(f"rank {rank} {str(dtype)[6:]} {'sum' if op == dist.ReduceOp.SUM else 'max'} {values}", flush=True)
dist.barrier()
torch.distributed.destroy_process_group()
"""

LAUNCHERS = {
    "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_accelerators", "{ranks}", "--master_port", "{port}"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node", "{ranks}", "--master_port", "{port}"],
    "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "{ranks}"],
}


def command(launcher: str, ranks: int) -> list[str]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    words = [word.format(ranks=ranks, port=port) for word in LAUNCHERS[launcher]]
    return [*words, sys.executable, "reduce.py"] if launcher == "mpirun" else [sys.executable, *words, "reduce.py"]


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "ranks"), [("deepspeed", 2), ("torchrun", 2), ("torchrun", 4), ("mpirun", 2)])
def test_is_right_under_every_launcher(launcher: str, ranks: int, tmp_path: Path) -> None:
    if launcher == "mpirun" and (shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None):
        pytest.skip("mpirun or mpi4py is not installed")
    (tmp_path / "reduce.py").write_text(PROGRAM, encoding="utf-8")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command(launcher, ranks),
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"rank (\d) (\w+) (sum|max) \[([\d.]+)\]", done.stdout)
    assert len(lines) == ranks * 5 * 2, done.stdout
    expected = {("0", "sum"): 3, ("0", "max"): 2, ("1", "sum"): 7, ("1", "max"): 4}
    wrong = [line for line in lines if float(line[3]) != expected[str(int(line[0]) // 2), line[2]]]
    assert not wrong, wrong
