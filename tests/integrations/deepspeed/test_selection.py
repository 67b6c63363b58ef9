"""Which accelerator plain ``import deepspeed`` gets, in processes of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed_support import Install, Python

import ds_plugin_sdk
from ds_plugin_sdk.integrations.deepspeed import adopt

pytestmark = pytest.mark.deepspeed

WHICH = """
import deepspeed
from deepspeed.accelerator import get_accelerator
print(type(get_accelerator()).__module__, get_accelerator()._name)
"""
# What DeepSpeed says when it falls back to the CPU. It prints to standard output.
FELL_BACK = "Setting accelerator to CPU. If you have GPU"
OURS = "ds_plugin_cpu.accelerator cpu"
DEEPSPEEDS = "deepspeed.accelerator.cpu_accelerator cpu"
WARNINGS_ARE_ERRORS = ("-W", "error::RuntimeWarning")


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.splitlines()[-1]


def test_plain_import_takes_the_plugin_and_freezes_nothing_else(zap: Path, python: Python) -> None:
    python("""
import deepspeed
from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator, is_current_accelerator_supported
from deepspeed.accelerator.real_accelerator import SUPPORTED_ACCELERATOR_LIST
import ds_plugin_sdk, zap_accelerators
from ds_plugin_sdk import registry

accelerator = get_accelerator()
assert type(accelerator) is zap_accelerators.Zap
assert isinstance(accelerator, DeepSpeedAccelerator)
assert ds_plugin_sdk.get_accelerator() is accelerator
assert is_current_accelerator_supported()
assert {"meta", "cpu", "cuda"} <= set(SUPPORTED_ACCELERATOR_LIST)

from deepspeed.ops import op_builder
names = [name for name in vars(op_builder) if name.endswith("Builder") and name not in ("OpBuilder", "CUDAOpBuilder")]
assert len(names) == 27, names
assert {getattr(op_builder, name).owner for name in names} == {"Zap"}
assert deepspeed.ops.adam.fused_adam.FusedAdamBuilder.owner == "Zap"
assert "zap: chosen, the best available: priority 50" in str(registry.decision())
""")


def test_a_request_by_name(zap: Path, python: Python) -> None:
    assert python(WHICH, DS_ACCELERATOR="cpu").stdout.strip() == OURS
    failed = python(WHICH, DS_ACCELERATOR="xyz", fails=True)
    assert "UnknownAcceleratorError: DS_ACCELERATOR=xyz names nothing that is installed" in failed.stderr
    assert "installed plugins: cpu, zap; built into DeepSpeed: cuda, cpu, xpu" in failed.stderr
    assert "by convention called ds-plugin-xyz; `sdk list` has" in failed.stderr


def test_files_and_locked_memory_are_ours(python: Python) -> None:
    done = python(
        WHICH + "from deepspeed.ops import op_builder\n"
        "from deepspeed.runtime.swap_tensor import partitioned_param_swapper\n"
        "assert op_builder.AsyncIOBuilder.__module__ == 'ds_plugin_sdk.op_builder.cpu.host'\n"
        "assert partitioned_param_swapper.AsyncIOBuilder is op_builder.AsyncIOBuilder\n"
        "assert op_builder.PinMemoryBuilder.__module__ == 'ds_plugin_sdk.op_builder.sourceless'\n"
        "assert op_builder.FusedAdamBuilder.__module__ == 'ds_plugin_sdk.op_builder.cpu.kernels'\n"
        "assert op_builder.UtilsBuilder.NAME == 'utils'\n"
    )
    assert done.stdout.strip() == OURS


def test_autoload_off_leaves_deepspeed_alone_until_an_accelerator_is_set(zap: Path, python: Python) -> None:
    done = python(
        WHICH + "import ds_plugin_sdk, zap_accelerators\n"
        "assert ds_plugin_sdk.get_accelerator() is get_accelerator()\n"
        "ds_plugin_sdk.set_accelerator(zap_accelerators.Zap())\n"
        "assert type(get_accelerator()) is zap_accelerators.Zap\n",
        DS_PLUGIN_AUTOLOAD="0",
        DS_ACCELERATOR="cpu",
    )
    assert last_line(done) == DEEPSPEEDS
    # A name that only a plugin has can mean nothing else.
    assert python(WHICH, DS_PLUGIN_AUTOLOAD="0", DS_ACCELERATOR="zap").stdout.strip() == "zap_accelerators meta"


PATCHED = """
from deepspeed.comm.torch import TorchBackend
from deepspeed.inference.engine import InferenceEngine

def patched():
    methods = (TorchBackend.inference_all_reduce, InferenceEngine.forward)
    return ["ds_plugin_sdk" in method.__code__.co_filename for method in methods]
"""


def test_autoload_off_leaves_the_methods_of_deepspeed_alone_until_an_accelerator_is_set(
    zap: Path, python: Python
) -> None:
    python(
        "import deepspeed\n" + PATCHED + "import ds_plugin_sdk, zap_accelerators\n"
        "assert patched() == [False, False]\n"
        "ds_plugin_sdk.set_accelerator(zap_accelerators.Zap())\n"
        "assert patched() == [True, True]\n"
        "once = TorchBackend.inference_all_reduce\n"
        "ds_plugin_sdk.set_accelerator(zap_accelerators.Zip())\n"
        "assert TorchBackend.inference_all_reduce is once\n",
        DS_PLUGIN_AUTOLOAD="0",
        DS_ACCELERATOR="cpu",
    )
    python("import deepspeed\n" + PATCHED + "assert patched() == [True, True]\n", DS_ACCELERATOR="cpu")


@pytest.mark.parametrize(
    ("module", "function", "concerns"),
    [
        ("collectives", "replace", "deepspeed.comm.torch"),
        ("injection", "explain", "deepspeed.inference.engine"),
        ("op_table", "complete", "deepspeed.ops.op_builder.all_ops"),
    ],
)
def test_what_fails_in_the_sdks_own_changes_is_one_warning(
    module: str, function: str, concerns: str, python: Python
) -> None:
    done = python(
        f"from ds_plugin_sdk.integrations.deepspeed import {module}\n"
        "def broken(_):\n    raise OSError('out of order')\n"
        f"{module}.{function} = broken\n" + WHICH + f"import {concerns}\n",
        DS_ACCELERATOR="cpu",
    )
    assert last_line(done) == OURS
    assert done.stderr.count("RuntimeWarning: ds-plugin-sdk") == 1
    assert f"{module}:{function} failed, {concerns} stays as it is: OSError: out of order" in done.stderr


def test_deepspeed_imported_before_the_sdk(zap: Path, python: Python) -> None:
    """Without torch's autoload the SDK may come late; it then does at once what it would have done earlier."""
    done = python(
        WHICH + "import ds_plugin_sdk, zap_accelerators\n"
        "assert type(get_accelerator()) is zap_accelerators.Zap\n"
        "assert deepspeed.ops.op_builder.FusedAdamBuilder.owner == 'Zap'\n"
        "deepspeed.accelerator.set_accelerator(zap_accelerators.Zip())\n"
        "assert deepspeed.ops.op_builder.FusedAdamBuilder.owner == 'Zip'\n",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert last_line(done) == DEEPSPEEDS


def test_the_cpu_plugin_steps_aside_for_hardware_that_deepspeed_finds(tmp_path: Path, python: Python) -> None:
    """DeepSpeed takes an installed torch_npu for hardware; that is a stand-in here, DeepSpeed's detection is real."""
    (tmp_path / "torch_npu.py").write_text(
        "import sys, unittest.mock, torch\ntorch.npu = sys.modules['torch.npu'] = unittest.mock.MagicMock()\n", "utf-8"
    )
    done = python(
        WHICH + "from ds_plugin_sdk import registry\nprint(registry.decision())\n"
        "assert registry.get_accelerator() is get_accelerator()\n",
        PYTHONPATH=str(tmp_path),
    )
    assert done.stdout.splitlines()[0] == "deepspeed.accelerator.npu_accelerator npu"
    assert "cpu: not used, 'npu' was found, which needs no plugin" in done.stdout


@pytest.mark.parametrize(("there", "found"), [(True, "cuda"), (False, None)])
def test_hardware_that_deepspeed_takes_for_granted_must_be_there(there: bool, found: str | None) -> None:
    """As DeepSpeed 0.12 does with a GPU where it finds nothing else."""
    cuda = SimpleNamespace(_name="cuda", is_available=lambda: there)
    real_accelerator = SimpleNamespace(ds_accelerator=None, accel_logger=None, get_accelerator=lambda: cuda)
    assert adopt._detect(real_accelerator) == found


def test_broken_plugins_are_skipped_with_a_warning_each(install: Install, python: Python) -> None:
    install("boom", body="raise RuntimeError('no licence')")
    install("needy", body="import libzap_that_is_missing")
    install("liar", body="from ds_plugin_sdk import Plugin, Probe\nplugin = Plugin('cpu', (1, 0), 'a:b', lambda: 1)\n")
    install("twin", distribution="ds-plugin-twin-a")
    install("twin", distribution="ds-plugin-twin-b")
    done = python(WHICH)
    assert done.stdout.strip() == OURS
    warnings = [line for line in done.stderr.splitlines() if "RuntimeWarning: ds-plugin-sdk: plugin '" in line]
    assert [line.split("'")[1] for line in warnings] == ["boom", "liar", "needy", "twin"], done.stderr
    assert "RuntimeError: no licence" in done.stderr
    assert "pip install libzap_that_is_missing" in done.stderr
    assert "is a Plugin named 'cpu'" in done.stderr
    assert "ds-plugin-twin-a 1.0 and ds-plugin-twin-b 1.0 both register it" in done.stderr
    assert python(WHICH, *WARNINGS_ARE_ERRORS).stdout.strip() == OURS

    failed = python(WHICH, DS_ACCELERATOR="boom", fails=True)
    assert "PluginLoadError: a plugin cannot be imported (plugin 'boom')" in failed.stderr


def test_an_accelerator_that_cannot_be_made(zap: Path, install: Install, python: Python) -> None:
    """Chosen by us: one warning, and DeepSpeed's own. Asked for by name: an error through ``import deepspeed``."""
    install("dud", priority=99, accelerator="zap_accelerators:Broken")
    done = python(WHICH)
    assert last_line(done) == DEEPSPEEDS
    assert done.stderr.count("RuntimeWarning: ds-plugin-sdk") == 1
    assert "DeepSpeed chooses its accelerator by itself" in done.stderr
    assert "libzap.so.3: cannot open shared object file" in done.stderr
    assert last_line(python(WHICH, *WARNINGS_ARE_ERRORS)) == DEEPSPEEDS

    failed = python(WHICH, DS_ACCELERATOR="dud", fails=True)
    assert "PluginLoadError: a plugin's accelerator cannot be loaded (plugin 'dud')" in failed.stderr


def test_a_sdk_error_is_not_hidden_by_deepspeeds(zap: Path, install: Install, python: Python) -> None:
    """DeepSpeed could only say that the name 'needy' must be one of its own."""
    install(
        "needy",
        body="from ds_plugin_sdk import Plugin, Probe\n"
        "plugin = Plugin('needy', (1, 0), 'zap_accelerators:Zap', lambda: Probe.available(1), prebuilt='not_there')\n",
    )
    failed = python(WHICH, DS_ACCELERATOR="needy", fails=True)
    assert "PluginLoadError: a plugin's prebuilt ops cannot be looked for (plugin 'needy')" in failed.stderr
    assert "prebuilt='not_there' in the manifest of ds-plugin-needy 1.0: ModuleNotFoundError" in failed.stderr
    failed = python(WHICH, DS_ACCELERATOR="zap", DS_PLUGIN_AUTOLOAD="maybe", fails=True)
    assert "SettingError: DS_PLUGIN_AUTOLOAD='maybe' cannot be used" in failed.stderr
    assert "must be one of" not in failed.stderr


def test_a_probe_that_hangs_does_not_hold_deepspeed(install: Install, python: Python) -> None:
    install("slow", priority=99, probe="__import__('time').sleep(60)")
    done = python(WHICH, DS_PLUGIN_PROBE_TIMEOUT="1")
    assert last_line(done) == OURS
    assert done.stderr.count("plugin 'slow' is skipped: its probe did not return within 1 s") == 1


@pytest.fixture
def other_site(tmp_path: Path) -> Path:
    """A copy of this environment's site-packages without the SDK and its plugins: what pip uninstall leaves."""
    folder = tmp_path / "other-site"
    folder.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not re.match(r"_*(editable_impl_)?ds_plugin_|.*\.pth$", entry.name):
            (folder / entry.name).symlink_to(entry)
    return folder


def add_sdk(site: Path) -> Path:
    """Install a copy of the SDK there; returns its package's folder."""
    package = site / "ds_plugin_sdk"
    shutil.copytree(Path(ds_plugin_sdk.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    info = site / "ds_plugin_sdk-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ds-plugin-sdk\nVersion: 0.1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[torch.backends]\nds_plugin_sdk = ds_plugin_sdk.integrations.deepspeed.import_hook:install\n", encoding="utf-8"
    )
    return package


def test_without_plugins_deepspeed_is_as_it_was(other_site: Path, python: Python) -> None:
    """-S: only the folder given is searched. First without anything of ours, then with the SDK alone."""
    program = WHICH + PATCHED + "import sys; print('ds_plugin_sdk' in sys.modules, *patched())"
    bare = python(program, "-S", PYTHONPATH=str(other_site)).stdout.splitlines()
    add_sdk(other_site)
    alone = python(program, "-S", PYTHONPATH=str(other_site)).stdout.splitlines()
    assert bare[1:] == [DEEPSPEEDS, "False False False"]
    assert alone[1:] == [DEEPSPEEDS, "True False False"]
    assert FELL_BACK in bare[0]
    assert FELL_BACK in alone[0]


def test_a_damaged_sdk_breaks_neither_torch_nor_deepspeed(other_site: Path, python: Python) -> None:
    package = add_sdk(other_site)
    (package / "registry" / "__init__.py").write_text("raise RuntimeError('damaged')\n", encoding="utf-8")
    done = python(WHICH, "-S", PYTHONPATH=str(other_site))
    assert last_line(done) == DEEPSPEEDS
    assert "DeepSpeed will not see any plugin: RuntimeError: damaged" in done.stderr


def test_the_hook_costs_less_than_five_milliseconds_and_imports_nothing(python: Python) -> None:
    """Timed from the entry point's load to the end of its call, in new processes, as torch does both.

    torch itself is left out here. It has loaded most of the standard modules that are counted, so this is an upper
    bound, and one that noise of a three-second import does not hide. It is CPU time, the least of several: a busy
    machine lets the process wait for longer than that.
    """
    program = (
        "import importlib.metadata, sys, time\n"
        "[entry] = [e for e in importlib.metadata.entry_points(group='torch.backends') if e.name == 'ds_plugin_sdk']\n"
        "start = time.process_time()\n"
        "entry.load()()\n"
        "print(time.process_time() - start)\n"
        "assert not {'torch', 'deepspeed', 'ds_plugin_sdk.registry'} & set(sys.modules)\n"
        "hooks = len(sys.meta_path)\n"
        "entry.load()()\n"
        "assert len(sys.meta_path) == hooks\n"
    )
    seconds = [float(python(program).stdout) for _ in range(10)]
    assert min(seconds) < 0.005, seconds


WATCHED = """
import importlib.util, sys
import torch
from ds_plugin_sdk.integrations.deepspeed import adopt

class Watch:
    sought = set()

    def find_spec(self, name, path=None, target=None):
        if name in self.sought:
            return None
        self.sought.add(name)
        try:
            return importlib.util.find_spec(name)
        finally:
            self.sought.discard(name)

calls, original = [], adopt.adopt
adopt.adopt = lambda module: calls.append(module) or original(module)
sys.meta_path.insert(PLACE, Watch())
import deepspeed
print(len(calls), deepspeed.accelerator.get_accelerator().device_name())
"""


@pytest.mark.parametrize("place", [0, 1], ids=["before ours", "after ours"])
def test_beside_a_hook_that_asks_the_others_deepspeed_is_joined_once(place: int, python: Python) -> None:
    """As those of tracing tools do."""
    assert python(WATCHED.replace("PLACE", str(place))).stdout.splitlines()[-1] == "1 cpu"


def test_the_hook_raises_nothing(python: Python) -> None:
    """Even where adoption fails and warnings are errors, ``install()`` returns."""
    done = python(
        "import sys, types\n"
        "fake = types.ModuleType('deepspeed.accelerator.real_accelerator')\n"
        "sys.modules[fake.__name__] = fake\n"
        "import ds_plugin_sdk\n"
        "ds_plugin_sdk.integrations.deepspeed.import_hook.install()\n"
        "print('alive')\n",
        "-W",
        "error",
    )
    assert done.stdout.strip() == "alive"
    assert os.linesep not in done.stderr.strip()
