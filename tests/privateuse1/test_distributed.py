"""Two ranks on the simulated device: torch's collectives, and unmodified DeepSpeed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from device_programs import Run

pytestmark = [pytest.mark.compiler]

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
# torch and DeepSpeed warn of each other's old names.
QUIET = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}

# float32, a dozen ops deep: sums in another order.
TOLERANCE = 2e-6


def test_every_collective_on_two_ranks(run: Run) -> None:
    done = run(*TORCHRUN, "collectives_worker.py", **QUIET)
    held = re.findall(r"rank (\d): (\w+) holds", done.stdout)
    assert len(held) == 2 * 9
    assert "terminate called" not in done.stderr


WITHOUT_GLOO = """
import torch
import torch.distributed as dist
from ds_plugin_sdk.privateuse1 import process_group

class VendorsGroup(process_group.StagedProcessGroup):
    def __init__(self, store, rank, size, timeout, backend):
        dist.ProcessGroup.__init__(self, rank, size)
        self._backend, self._name, self._description = backend, "", ""

    def allreduce(self, tensors, options=None):
        return process_group.done(tensors)

process_group.register("vendorccl", "meta", VendorsGroup)
dist.init_process_group("vendorccl", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
print("reduced")
"""


def test_a_vendors_group_may_do_without_gloo(run: Run) -> None:
    assert "reduced" in run("-c", WITHOUT_GLOO, **QUIET).stdout


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["one rank", "two ranks"])
def test_deepspeed_trains_as_plain_torch_on_the_cpu(run: Run, launcher: tuple[str, ...], tmp_path: Path) -> None:
    # DeepSpeed overlaps communication and computation on streams: with work that is late, each wait has to be there.
    variables = {"DS_SIMULATOR_DELAY_US": "500"}
    if not launcher:
        variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = run(*launcher, "deepspeed_worker.py", str(tmp_path), **QUIET, **variables)
    worst = {int(stage): float(value) for stage, value in re.findall(r"^stage (\d): (\S+)$", done.stdout, re.MULTILINE)}
    assert sorted(worst) == [0, 1, 2, 3]
    assert max(worst.values()) < TOLERANCE, worst
