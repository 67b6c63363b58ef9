"""Whether a GPU can be used, asked of a driver that says whatever a test wants."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ds_plugin_cuda import detect, plugin
from ds_plugin_sdk import TorchAccelerator, nvml
from ds_plugin_sdk.nvml import Driver, Gpu
from ds_plugin_sdk.settings import child_environment

H200 = Gpu("NVIDIA H200", "GPU-aaaa1111", (9, 0))
V100 = Gpu("Tesla V100-SXM2-16GB", "GPU-bbbb2222", (7, 0))

FAKE_NVML = """
#include <cstdio>
#include <cstring>
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int nvmlInit_v2() { return INIT; }
EXPORT int nvmlShutdown() { return 0; }
EXPORT const char* nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "version mismatch"; }
EXPORT int nvmlDeviceGetCount_v2(unsigned* count) { *count = 2; return 0; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = 12080; return 0; }
EXPORT int nvmlSystemGetDriverVersion(char* text, unsigned size) { return snprintf(text, size, "570.1") < 0; }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = (void*)(1ul + index);
  return index == 0 ? FIRST : 0;
}
EXPORT int nvmlDeviceGetCudaComputeCapability(void* device, int* major, int* minor) {
  *major = device == (void*)1 ? 9 : 7;
  *minor = 0;
  return 0;
}
EXPORT int nvmlDeviceGetName(void*, char* text, unsigned size) { return snprintf(text, size, "GPU") < 0; }
EXPORT int nvmlDeviceGetUUID(void* device, char* text, unsigned size) {
  return snprintf(text, size, "GPU-%ld", (long)device) < 0;
}
"""


def fake_nvml(folder: Path, init: int, first: int = 0) -> str:
    """A driver that answers its start, and a question for the first of two GPUs, by these codes."""
    source, library = folder / "nvml.cpp", folder / f"nvml{init}.so"
    source.write_text(FAKE_NVML)
    codes = [f"-DINIT={init}", f"-DFIRST={first}"]
    subprocess.run(["c++", "-shared", "-fPIC", *codes, str(source), "-o", str(library)], check=True)
    return str(library)


@pytest.mark.compiler
def test_nvml_is_understood(tmp_path: Path) -> None:
    driver = nvml.ask(fake_nvml(tmp_path, 0))
    assert driver == Driver("570.1", (12, 8), (Gpu("GPU", "GPU-1", (9, 0)), Gpu("GPU", "GPU-2", (7, 0))))


@pytest.mark.compiler
@pytest.mark.parametrize("code", [4, 15], ids=["a container was not given it", "lost"])
def test_a_gpu_that_cannot_be_asked_leaves_the_others(tmp_path: Path, code: int) -> None:
    assert nvml.ask(fake_nvml(tmp_path, 0, code)).gpus == (Gpu("GPU", "GPU-2", (7, 0)),)


@pytest.mark.compiler
def test_a_driver_that_the_loader_does_not_know_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Path(fake_nvml(tmp_path, 0))
    monkeypatch.setattr(nvml, "_PLACES", ("/nowhere/", f"{library.parent}/"))
    assert nvml.ask(library.name).version == "570.1"


@pytest.mark.compiler
@pytest.mark.parametrize(("code", "absent", "text"), [(9, True, "Driver Not Loaded"), (18, False, "version mismatch")])
def test_a_driver_that_does_not_answer(tmp_path: Path, code: int, absent: bool, text: str) -> None:
    with pytest.raises(nvml.NvmlError, match=text) as caught:
        nvml.ask(fake_nvml(tmp_path, code))
    assert caught.value.absent is absent


def test_no_driver(tmp_path: Path) -> None:
    with pytest.raises(nvml.NvmlError, match="no NVIDIA driver is installed") as caught:
        nvml.ask(str(tmp_path / "libnvidia-ml.so.1"))
    assert caught.value.absent


@pytest.mark.parametrize(
    ("variable", "count"),
    [
        (None, 2),
        ("0,1", 2),
        ("1", 1),
        ("", 0),
        ("-1", 0),
        ("0,7,1", 1),
        ("0,0", 0),
        ("GPU-aaaa", 1),
        ("GPU-bbbb2222, GPU-aaaa1111", 2),
        ("GPU-", 0),
        ("MIG-1234", 1),
        ("MIG-1234,MIG-5678", 1),
        ("0 1", 1),
        ("1;0", 1),
        ("+1", 1),
        ("1gpu,0gpu", 2),
        ("NoDevFiles", 0),
    ],
)
def test_visible_devices(variable: str | None, count: int) -> None:
    assert len(nvml.visible([H200, V100], variable)) == count


def test_a_gpu_that_can_be_used() -> None:
    probe = detect.judge(Driver("580.95", (13, 0), (H200, V100)), None, (13, 0))
    assert probe.state == "available" and probe.devices == 2
    assert "NVIDIA H200" in probe.detail and "580.95" in probe.detail


@pytest.mark.parametrize(
    ("driver", "variable", "cuda", "state", "text"),
    [
        (Driver("580.95", (13, 0), ()), None, (13, 0), "absent", "finds no GPU"),
        (Driver("580.95", (13, 0), (H200,)), "", (13, 0), "absent", "hides all of 1 GPUs"),
        (Driver("580.95", (13, 0), (H200,)), None, None, "absent", "built without CUDA"),
        (Driver("550.54", (12, 4), (H200,)), None, (13, 0), "broken", "update the driver"),
        (Driver("580.95", (13, 0), (H200,)), None, (12, 6), "available", "H200"),
        (Driver("570.10", (12, 8), (H200,)), None, (12, 9), "available", "H200"),
    ],
)
def test_what_is_missing_is_said(
    driver: Driver, variable: str | None, cuda: tuple[int, int] | None, state: str, text: str
) -> None:
    probe = detect.judge(driver, variable, cuda)
    assert probe.state == state
    assert text in probe.detail


def test_a_device_that_poses_as_cuda_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extensions put their device's module in the place of torch.cuda, so that programs for CUDA run on it.

    The probe asks the driver. And the device's own accelerator asks torch for the device by its name.
    """

    def no_driver() -> Driver:
        raise nvml.NvmlError("there is no NVIDIA driver", absent=True)

    posing = ModuleType("torch.zapp")
    vars(posing).update(is_available=lambda: True, device_count=lambda: 8, current_device=lambda: 5, Stream=None)
    monkeypatch.setattr(nvml, "ask", no_driver)
    monkeypatch.setattr(torch, "cuda", posing)
    probe = detect.probe()
    assert (probe.state, probe.detail) == ("absent", "there is no NVIDIA driver")

    class Accelerator(TorchAccelerator):
        device_type = "zapp"
        communication_backend = "gloo"
        synchronous = True
        dtypes = (torch.float32,)

    monkeypatch.setattr(torch, "get_device_module", lambda device: {"zapp": posing}[device])
    accelerator = Accelerator()
    assert accelerator.device_name() == accelerator._name == "zapp"
    assert (accelerator.device_count(), accelerator.current_device()) == (8, 5)


def test_the_probe_of_this_machine_has_a_reason() -> None:
    probe = plugin.probe()
    assert probe.state == "available" or probe.detail


def test_the_manifest_costs_nothing() -> None:
    """Neither the manifest nor its probe imports torch."""
    program = "import sys, ds_plugin_cuda; ds_plugin_cuda.probe(); print('torch' in sys.modules)"
    path = ":".join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=child_environment(PYTHONPATH=path, TORCH_DEVICE_BACKEND_AUTOLOAD="0"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"


FAKE_CUDA = """
#include <cstdio>
extern "C" {
int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { *version = 12060; return 0; }
int cuDeviceGetCount(int* count) { *count = 2; return 0; }
int cuDeviceGetName(char* name, int size, int) { return snprintf(name, size, "Orin") < 0; }
}
"""


@pytest.mark.compiler
def test_where_nvml_is_missing_cuda_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers that were given CUDA's driver alone, and Jetson boards."""
    (tmp_path / "cuda.cpp").write_text(FAKE_CUDA)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["c++", "-shared", "-fPIC", str(tmp_path / "cuda.cpp"), "-o", str(library)], check=True)
    monkeypatch.setattr(detect, "_CUDA", str(library))
    monkeypatch.setattr(detect, "torch_cuda", lambda: (12, 8))
    monkeypatch.setattr(nvml, "ask", _absent)
    probe = detect.probe()
    assert (probe.state, probe.devices) == ("available", 2) and "Orin" in probe.detail
    monkeypatch.setattr(detect, "torch_cuda", lambda: (13, 0))
    assert detect.probe().state == "broken", "its driver runs CUDA up to 12.6"
    monkeypatch.setattr(detect, "_CUDA", str(tmp_path / "none"))
    assert detect.probe().state == "absent"


def _absent() -> None:
    raise nvml.NvmlError("no driver", absent=True)
