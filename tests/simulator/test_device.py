"""The simulated device holds every check of simulator_checks.py, and cannot be used as hardware could not."""

from __future__ import annotations

import ast
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from running import Run, RunChecks

CHECKS_FILE = Path(__file__).with_name("simulator_checks.py")
CSRC = Path(__file__).resolve().parents[2] / "sdk" / "ds_plugin_sdk" / "simulator" / "csrc"


def names_of_checks() -> list[str]:
    """From the text, because importing it would import torch's device."""
    tree = ast.parse(CHECKS_FILE.read_text(encoding="utf-8"))
    found = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.args.args]
    return [name for name in found if name != "main"]


@pytest.fixture(scope="session")
def outcomes(run_checks: RunChecks) -> dict[str, str]:
    return run_checks(names_of_checks())


@pytest.mark.compiler
@pytest.mark.parametrize("check", names_of_checks())
def test_the_device_holds(check: str, outcomes: dict[str, str]) -> None:
    assert outcomes[check] == "", outcomes[check]


INSTALL = "import torch; from ds_plugin_sdk import simulator; simulator.install('zap', memory_mb=64)\n"


@pytest.mark.compiler
def test_the_host_cannot_follow_a_device_pointer(simulator_environment: dict[str, str]) -> None:
    program = INSTALL + (
        "import ctypes\n"
        "tensor = torch.full((4,), 7.0, device='zap')\n"
        "torch.zap.synchronize()\n"
        "print('alive', flush=True)\n"
        "print(ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_float))[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=simulator_environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "alive\n"
    assert done.returncode == -signal.SIGSEGV


@pytest.mark.compiler
def test_a_forked_child_is_refused_and_ends_in_peace(run: Run) -> None:
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
def test_data_loader_workers_and_pinned_memory(run: Run) -> None:
    program = INSTALL + (
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "data = TensorDataset(torch.arange(8.0))\n"
        "loader = DataLoader(data, batch_size=4, num_workers=1, pin_memory=True)\n"
        "print([batch[0].to('zap', non_blocking=True).sum().item() for batch in loader])\n"
    )
    assert "[6.0, 22.0]" in run("-c", program, PYTHONWARNINGS="ignore").stdout


@pytest.mark.compiler
def test_a_process_has_one_device_name(run: Run) -> None:
    program = INSTALL + (
        "from ds_plugin_sdk.errors import DeviceNameError\n"
        "assert simulator.install('zap') is torch.zap\n"
        "assert simulator.installed_name() == 'zap'\n"
        "try:\n"
        "    simulator.install('zip')\n"
        "except DeviceNameError as error:\n"
        "    print(error)\n"
    )
    assert (
        "torch has one place for a device from outside in each process, and 'zap' has it" in run("-c", program).stdout
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("xpu", "torch has a device type of that name"),
        ("cuda", "torch has a device type of that name"),
        ("privateuseone", "torch has a device type of that name"),
        ("Zap", "lower case"),
        ("zap2", "lower case"),
        ("", "lower case"),
    ],
)
def test_names_that_cannot_be_had(name: str, reason: str) -> None:
    from ds_plugin_sdk import simulator
    from ds_plugin_sdk.errors import DeviceNameError

    with pytest.raises(DeviceNameError, match=reason):
        simulator.install(name)


def test_another_backend_has_torch_s_place(run: Run) -> None:
    program = (
        "import torch; torch.utils.rename_privateuse1_backend('other')\n"
        "from ds_plugin_sdk import simulator\n"
        "simulator.install('zap')\n"
    )
    assert "and 'other' has it" in run("-c", program, fails=True).stderr


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


def test_importing_the_simulator_does_not_import_torch(run: Run) -> None:
    program = "import sys; from ds_plugin_sdk import simulator as s; print('torch' in sys.modules, s.installed_name())"
    assert run("-c", program).stdout.split() == ["False", "None"]


@pytest.mark.compiler
def test_a_kernel_library_launches_through_the_runtime(run: Run) -> None:
    run("axpy_program.py")


@pytest.mark.compiler
def test_a_vendor_s_runtime_is_built_from_the_vendor_s_package(run: Run, tmp_path: Path) -> None:
    package = tmp_path / "ds_plugin_zip"
    shutil.copytree(CSRC / "runtime", package / "csrc" / "runtime")
    (package / "__init__.py").write_text("")
    (package / "runtime.py").write_text(
        "from ds_plugin_sdk.simulator import RuntimeBuilder\n"
        "class ZipRuntime(RuntimeBuilder):\n"
        "    def sources(self):\n"
        "        files = ('device', 'memory', 'stream', 'event')\n"
        "        return [self.kernel_path(f'csrc/runtime/{file}.cpp') for file in files]\n"
    )
    program = (
        "import torch\n"
        "from ds_plugin_sdk import simulator\n"
        "from ds_plugin_zip.runtime import ZipRuntime\n"
        "simulator.install('zip', devices=1, memory_mb=64, runtime=ZipRuntime())\n"
        "with open('/proc/self/maps') as maps:\n"
        "    print({line.split('/')[-5] for line in maps if line.endswith('/device_runtime.so\\n')})\n"
        "print(torch.ones(3, device='zip').sum().item(), torch.zip.device_count())\n"
    )
    lines = run("-c", program, PYTHONPATH=str(tmp_path)).stdout.splitlines()
    assert "ds-plugin-zip" in lines[0]
    assert lines[1] == "3.0 1"
