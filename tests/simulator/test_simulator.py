"""What only the simulated device does: no host reads its memory, no forked child uses it, settings say what it is."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from device_programs import Run, environment

INSTALL = "import torch; from ds_plugin_sdk import simulator; simulator.install('zap', memory_mb=64)\n"


@pytest.mark.compiler
def test_the_host_cannot_follow_a_device_pointer(kernel_cache: Path) -> None:
    program = INSTALL + (
        "import ctypes\n"
        "tensor = torch.full((4,), 7.0, device='zap')\n"
        "torch.zap.synchronize()\n"
        "print('alive', flush=True)\n"
        "print(ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_float))[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(kernel_cache), capture_output=True, text=True, check=False
    )
    assert done.stdout == "alive\n"
    assert done.returncode == -signal.SIGSEGV


@pytest.mark.compiler
def test_a_forked_child_gets_an_error_and_ends_normally(run: Run) -> None:
    program = INSTALL + (
        "import os\n"
        "tensor = torch.ones(3, device='zap')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        tensor.cpu()\n"
        "    except RuntimeError as error:\n"
        "        assert 'fork' in str(error), error\n"
        "        assert torch.zap._is_in_bad_fork()\n"
        "        raise SystemExit(0)\n"
        "    raise SystemExit(1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "assert tensor.sum().item() == 3\n"
    )
    run("-W", "ignore", "-c", program, PYTHONWARNINGS="ignore")


@pytest.mark.compiler
def test_a_child_forked_before_use_can_use_the_device(run: Run) -> None:
    program = INSTALL + (
        "import os\n"
        "assert torch.zap.device_count() == 2\n"
        "child = os.fork()\n"
        "assert not torch.zap._is_in_bad_fork()\n"
        "assert torch.ones(3, device='zap').sum().item() == 3\n"
        "if child:\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
    )
    run("-W", "ignore", "-c", program, PYTHONWARNINGS="ignore")


@pytest.mark.compiler
def test_settings_say_how_many_devices_and_how_large(run: Run) -> None:
    program = (
        "import torch; from ds_plugin_sdk import simulator; simulator.install('zap')\n"
        "print(torch.zap.device_count(), torch.zap.mem_get_info(2)[1] >> 20)\n"
        "import time; x = torch.zeros(1, device='zap'); begin = time.perf_counter(); x.item()\n"
        "print(time.perf_counter() - begin > 0.02)\n"
    )
    done = run("-c", program, DS_SIMULATOR_DEVICES="3", DS_SIMULATOR_MEMORY_MB="128", DS_SIMULATOR_DELAY_US="20000")
    assert done.stdout.split() == ["3", "128", "True"]


@pytest.mark.compiler
def test_more_memory_than_there_are_addresses(run: Run) -> None:
    program = INSTALL.replace("64", str(1 << 33)) + "torch.ones(1, device='zap')\n"
    assert "MiB of address space: Cannot allocate memory; try less memory" in run("-c", program, fails=True).stderr


@pytest.mark.compiler
def test_a_device_that_is_hidden_while_it_is_used_keeps_what_it_has(run: Run) -> None:
    program = INSTALL + (
        "import os\n"
        "tensor = torch.ones(3, device='zap')\n"
        "os.environ['ZAP_VISIBLE_DEVICES'] = ''\n"
        "assert (tensor + 1).sum().item() == 6\n"
        "torch.zap.synchronize()\n"
        "del tensor\n"
        "torch.zap.empty_cache()\n"
        "try:\n"
        "    torch.ones(3, device='zap:1')\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    assert run("-c", program).stdout.startswith("invalid device 1: this process sees 0")
