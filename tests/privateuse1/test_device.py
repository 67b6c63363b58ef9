"""The backend on the simulated runtime holds every check of device_checks.py; names, kernels, a vendor's runtime."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from device_programs import Run, RunChecks
from ds_plugin_sdk import privateuse1, simulator
from ds_plugin_sdk.errors import DeviceNameError

CHECKS_FILE = Path(__file__).with_name("device_checks.py")


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
        "from ds_plugin_sdk import privateuse1\n"
        "from ds_plugin_sdk.errors import DeviceNameError\n"
        "assert simulator.install('zap') is torch.zap\n"
        "assert privateuse1.installed_name() == 'zap'\n"
        "try:\n"
        "    simulator.install('zip')\n"
        "except DeviceNameError as error:\n"
        "    print(error)\n"
    )
    assert "torch has one out-of-tree device in each process, and it is 'zap'" in run("-c", program).stdout


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
    with pytest.raises(DeviceNameError, match=reason):
        privateuse1.install(name, runtime=simulator.SimulatedRuntime())


@pytest.mark.parametrize("collectives", ["nccl", "gloo", "xccl"])
def test_collectives_that_torch_has_cannot_be_had(collectives: str) -> None:
    with pytest.raises(DeviceNameError, match=f"'{collectives}' cannot be the name of the collectives"):
        privateuse1.install("zap", runtime=simulator.SimulatedRuntime(), collectives=collectives)


def test_another_backend_has_torch_s_place(run: Run) -> None:
    program = (
        "import torch; torch.utils.rename_privateuse1_backend('other')\n"
        "from ds_plugin_sdk import simulator\n"
        "simulator.install('zap')\n"
    )
    assert "and it is 'other'" in run("-c", program, fails=True).stderr


def test_importing_the_packages_does_not_import_torch(run: Run) -> None:
    program = "import sys; from ds_plugin_sdk import privateuse1, simulator; print('torch' in sys.modules)\n"
    assert run("-c", program + "print(privateuse1.installed_name())").stdout.split() == ["False", "None"]


@pytest.mark.compiler
@pytest.mark.parametrize(("collectives", "registered"), [(None, "ZAPCCL"), ("zapgloo", "ZAPGLOO"), ("", "none")])
def test_collectives_have_the_name_they_are_given(collectives: str | None, registered: str, run: Run) -> None:
    program = (
        "import torch; from ds_plugin_sdk import simulator\n"
        "before = set(dir(torch.distributed.Backend))\n"
        f"simulator.install('zap', memory_mb=64, collectives={collectives!r})\n"
        "print(*sorted(name for name in set(dir(torch.distributed.Backend)) - before) or ['none'])\n"
    )
    assert run("-c", program).stdout.split() == [registered]


@pytest.mark.compiler
def test_the_threads_of_the_backward_pass_are_waited_for_at_exit(run: Run) -> None:
    """Or one that drops the last reference to a tensor while Python ends takes the process with it: SIGABRT."""
    program = (
        "from ds_plugin_sdk import simulator, torch_threads\n"
        "torch_threads.wait = lambda: print('waited')\n"
        "simulator.install('zap', memory_mb=64)\n"
        "print('done')\n"
    )
    assert run("-c", program).stdout.split() == ["done", "waited"]


@pytest.mark.compiler
def test_a_kernel_library_launches_through_the_runtime(run: Run) -> None:
    run("axpy_program.py")


# Those that need no delayed work.
DATA_CHECKS = (
    "tensors_make_the_round_trip",
    "copies_between_layouts_are_right",
    "storages_grow_and_shrink",
    "devices_have_memory_of_their_own",
    "each_device_has_its_own_random_numbers",
    "draws_leave_the_cpu_alone",
    "children_forked_in_the_middle_of_work_end",
    "torch_saves_and_loads",
    "training_equals_the_cpu",
)


VENDOR_FILES = Path(__file__).with_name("vendor_runtime")


@pytest.mark.compiler
@pytest.mark.parametrize(
    "replaced",
    [("device",), ("device", "memory"), ("device", "memory", "stream", "event")],
    ids=["devices", "and memory", "and streams"],
)
def test_a_vendor_replaces_the_simulated_files_one_by_one(
    replaced: tuple[str, ...], run: Run, run_checks: RunChecks, tmp_path: Path
) -> None:
    """After each step what is replaced is used, and the rest works as before.

    From the second step on the CPU cannot reach device memory, and in the end no stream runs a C++ function.
    """
    sources = shutil.copytree(simulator.sources_dir(), tmp_path / "runtime")
    for name in replaced:
        shutil.copy(VENDOR_FILES / f"{name}.cpp", sources)
    assert run_checks(list(DATA_CHECKS), "--sources", str(tmp_path)) == dict.fromkeys(DATA_CHECKS, "")
    program = (
        "import sys, pathlib, torch, device_checks\n"
        "from ds_plugin_sdk import privateuse1, simulator\n"
        "device_checks.take_sources_from(pathlib.Path(sys.argv[1]))\n"
        "simulator.install('zap', devices=2)\n"
        "print(torch.zap.device_count(), torch.ones(3, device='zap:2').sum().item())\n"
        "library = privateuse1.runtime_library()\n"
        "print([hasattr(library, f'simulator_set_{what}') for what in ('devices', 'memory')])\n"
        "print(hasattr(library, 'runtime_set_delay'))\n"
    )
    done = run("-c", program, str(tmp_path))
    assert done.stdout.splitlines() == [
        "3 3.0",
        str([False, "memory" not in replaced]),
        str("stream" not in replaced),
    ]


@pytest.mark.compiler
def test_a_vendor_s_kernels_copy_and_fill(run: Run) -> None:
    program = INSTALL + (
        "def copy_(self, src):\n"
        "    print('copy_', tuple(src.shape))\n"
        "    self.copy_(src.cpu().to(self.dtype))\n"
        "def fill_(self, value):\n"
        "    print('fill_', value)\n"
        "    self.copy_(torch.full(self.shape, value, dtype=self.dtype))\n"
        "library = torch.library.Library('ds_device', 'IMPL')\n"
        "library.impl('copy_', copy_, 'PrivateUse1')\n"
        "library.impl('fill_', fill_, 'PrivateUse1')\n"
        "print(torch.full((2,), 7.0, device='zap').to(torch.int64).tolist())\n"
    )
    assert run("-c", program).stdout.splitlines() == ["fill_ 7.0", "copy_ (2,)", "[7, 7]"]


VENDOR_RUNTIME = """\
from ds_plugin_sdk import privateuse1, simulator

class ZipRuntime(privateuse1.RuntimeBuilder):
    def sources(self):
        files = ('device', 'memory', 'stream', 'event')
        return [self.kernel_path(f'csrc/runtime/{file}.cpp') for file in files]

    def configure(self, library):
        simulator.configure(library, devices=1, memory_mb=64)
"""


@pytest.mark.compiler
def test_a_vendor_s_runtime_is_built_from_the_vendor_s_package(run: Run, tmp_path: Path) -> None:
    package = tmp_path / "ds_plugin_zip"
    shutil.copytree(simulator.sources_dir(), package / "csrc" / "runtime")
    (package / "__init__.py").write_text("")
    (package / "runtime.py").write_text(VENDOR_RUNTIME)
    program = (
        "import torch\n"
        "from ds_plugin_sdk import privateuse1\n"
        "from ds_plugin_zip.runtime import ZipRuntime\n"
        "privateuse1.install('zip', runtime=ZipRuntime())\n"
        "with open('/proc/self/maps') as maps:\n"
        "    print({line.split('/')[-5] for line in maps if line.endswith('/device_runtime.so\\n')})\n"
        "print(torch.ones(3, device='zip').sum().item(), torch.zip.device_count())\n"
    )
    lines = run("-c", program, PYTHONPATH=str(tmp_path)).stdout.splitlines()
    assert "ds-plugin-zip" in lines[0]
    assert lines[1] == "3.0 1"


@pytest.mark.parametrize(
    ("variables", "error"),
    [({"PATH": "/nowhere"}, "no C++ compiler"), ({"DS_PLUGIN_COMPILE": "0"}, "compiling is forbidden")],
    ids=["no compiler", "forbidden"],
)
def test_nothing_is_said_to_be_compiled_where_nothing_can_be(
    variables: dict[str, str], error: str, run: Run, tmp_path: Path
) -> None:
    program = "from ds_plugin_sdk import simulator; simulator.install('zap')"
    said = run("-c", program, fails=True, DS_PLUGIN_CACHE_DIR=str(tmp_path), **variables).stderr
    assert error in said and "compiling the device runtime" not in said
