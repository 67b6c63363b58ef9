"""Unmodified DeepSpeed, started by its own launcher, trains on a plugin: two ranks, ZeRO, our optimizer ops."""

from __future__ import annotations

import collections
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds_plugin_sdk import provenance
from ds_plugin_sdk.settings import child_environment
from launchers import free_port

TRAIN = """
import torch, deepspeed

def losses(optimizer, zero):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    config = {
        'train_micro_batch_size_per_gpu': 8,
        'optimizer': {'type': optimizer, 'params': {'lr': 1e-2, 'weight_decay': 0.01}},
        'zero_optimization': {'reduce_bucket_size': 10000, 'allgather_bucket_size': 10000, **zero},
        'steps_per_print': 1000,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator().manual_seed(engine.global_rank)
    x = torch.randn(8, 16, generator=generator)
    y = x.square().sum(dim=1, keepdim=True) / 16
    for _ in range(20):
        loss = torch.nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        yield loss.item()

offload = {'offload_optimizer': {'device': 'cpu'}}
for optimizer, zero in (('AdamW', {'stage': 1}), ('Adam', {'stage': 2, **offload}), ('AdamW', {'stage': 3, **offload})):
    first, *_, last = losses(optimizer, zero)
    print(f"loss {optimizer} {zero['stage']} {first:.3f} {last:.3f}", flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.deepspeed
@pytest.mark.compiler
@pytest.mark.slow
def test_deepspeeds_launcher_trains_on_the_plugin(tmp_path: Path, kernel_cache: Path) -> None:
    """The launcher, its process on the node and both workers take the plugin; each rank loads the ops it steps with."""
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    loads = tmp_path / "loads.jsonl"
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2"]
    environment = child_environment(
        DS_PLUGIN_CACHE_DIR=str(kernel_cache),
        DS_PLUGIN_PROVENANCE=str(loads),
        PATH=f"{Path(sys.executable).parent}:{child_environment()['PATH']}",
    )
    done = subprocess.run(
        [*launcher, "--master_port", free_port(), "train.py"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    found = re.findall(r"loss (\w+) (\d) ([\d.]+) ([\d.]+)", done.stdout)
    assert sorted({each[:2] for each in found}) == [("Adam", "2"), ("AdamW", "1"), ("AdamW", "3")], done.stdout
    assert len(found) == 6
    assert all(float(last) < 0.5 * float(first) for _, _, first, last in found), found

    loaded = collections.defaultdict(list)
    for record in provenance.read(loads)[0]:
        loaded[record.name].append(record)
    assert [record.origin for record in loaded["cpu"]] == ["accelerator"] * 4
    for name in ("fused_adam", "cpu_adam"):
        assert {record.rank for record in loaded[name]} == {0, 1}, name
        assert {record.origin for record in loaded[name]} <= {"compiled", "cache"}, name
