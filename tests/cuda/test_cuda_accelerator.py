"""The accelerator, as far as it can be asked without a GPU; conformance asks the rest with one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator import cuda_accelerator as deepspeeds

from ds_plugin_cuda import nvtx
from ds_plugin_cuda.accelerator import CUDA_Accelerator


@pytest.fixture(scope="module")
def cuda() -> CUDA_Accelerator:
    return CUDA_Accelerator()


def test_making_one_creates_no_context(cuda: CUDA_Accelerator) -> None:
    assert cuda.device_name() == "cuda" and cuda.device_name(1) == "cuda:1"
    assert cuda.device_count() == torch.cuda.device_count()
    assert cuda.is_available() is (cuda.device_count() > 0)
    assert not torch.cuda.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="shown where CUDA would raise")
def test_memory_is_asked_of_without_starting_cuda(cuda: CUDA_Accelerator) -> None:
    """By a parent that logs it before it forks its workers."""
    assert cuda.memory_stats() == {} and cuda.memory_allocated() == cuda.max_memory_reserved() == 0


def test_it_has_streams_events_and_graphs(cuda: CUDA_Accelerator) -> None:
    assert cuda.Stream is torch.cuda.Stream
    assert cuda.Event is torch.cuda.Event
    assert not cuda.is_synchronized_device() and not cuda.use_host_timers()
    with cuda.stream(None):
        pass


def test_its_names(cuda: CUDA_Accelerator) -> None:
    assert cuda.communication_backend_name() == "nccl"
    assert cuda.get_compile_backend() == "inductor"
    assert cuda.visible_devices_envs() == ["CUDA_VISIBLE_DEVICES"]
    # As DeepSpeed's own: which GPUs a process may use differs from node to node.
    assert all(each.startswith(("NCCL", "TORCH_NCCL")) for each in cuda.export_envs())
    assert cuda.on_accelerator(torch.empty(1, device="meta")) is False


@pytest.mark.parametrize("bfloat16", [True, False])
@pytest.mark.parametrize(
    ("capability", "deprecated", "float16"),
    [((5, 2), "1", False), ((6, 1), "0", False), ((6, 1), "1", True), ((7, 0), "0", True), ((12, 0), "0", True)],
)
def test_dtypes_are_those_that_deepspeeds_own_accelerator_has(
    capability: tuple[int, int],
    deprecated: str,
    float16: bool,
    bfloat16: bool,
    monkeypatch: pytest.MonkeyPatch,
    cuda: CUDA_Accelerator,
) -> None:
    monkeypatch.setenv("DS_ALLOW_DEPRECATED_FP16", deprecated)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bfloat16)
    for each in (cuda, deepspeeds.CUDA_Accelerator()):
        assert each.is_bf16_supported() is bfloat16
        assert each.is_fp16_supported() is float16
        assert set(each.supported_dtypes()) >= {torch.float32}


@pytest.mark.parametrize("there", [True, False], ids=["installed", "not installed"])
@pytest.mark.parametrize(
    ("capability", "supported", "grouped"),
    [((7, 5), False, False), ((8, 6), True, True), ((8, 9), True, True), ((9, 0), True, False)],
)
def test_triton_is_for_ampere_and_later_and_its_grouped_product_where_torch_has_none(
    capability: tuple[int, int],
    supported: bool,
    grouped: bool,
    there: bool,
    monkeypatch: pytest.MonkeyPatch,
    cuda: CUDA_Accelerator,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr("ds_plugin_cuda.accelerator.installed", lambda module: there)
    assert cuda.is_triton_supported() is (supported and there)
    assert cuda.prefer_triton_grouped_mm() is (grouped and there)


def test_the_drivers_number_of_a_visible_device(monkeypatch: pytest.MonkeyPatch, cuda: CUDA_Accelerator) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert [cuda._get_nvml_gpu_id(index) for index in (0, 1)] == [3, 1]


def test_every_op_has_a_builder(cuda: CUDA_Accelerator) -> None:
    names = ("FusedAdamBuilder", "FusedLionBuilder", "FusedLambBuilder", "TransformerBuilder", "QuantizerBuilder")
    for name in (*names, "StochasticTransformerBuilder", "SpatialInferenceBuilder"):
        assert cuda.get_op_builder(name).__module__.startswith("ds_plugin_cuda.")
    assert cuda.get_op_builder("CPUAdamBuilder").__module__.startswith("ds_plugin_sdk.")


class Library:
    """Writes down what NVTX is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def nvtxDomainCreateA(self, name: bytes) -> int:
        self.calls.append(("create", name))
        return 7

    def nvtxDomainNameCategoryA(self, domain: object, number: object, name: bytes) -> None:
        self.calls.append(("category", name))

    def nvtxDomainRangePushEx(self, domain: object, attributes: object) -> int:
        made = attributes._obj  # type: ignore[attr-defined]  # what ctypes.byref refers to
        self.calls.append(("push", (made.message, made.category, made.size)))
        return 0

    def nvtxDomainRangePop(self, domain: object) -> int:
        self.calls.append(("pop", None))
        return 0


def test_ranges_have_domains_and_categories() -> None:
    library = Library()
    domain = nvtx.Domain(library, "DeepSpeed")
    domain.push("forward", "compute")
    domain.push("all-reduce", None)
    domain.push("backward", "compute")
    assert domain.pop() == 0
    size = 48  # of nvtxEventAttributes_t, version 3
    assert library.calls == [
        ("create", b"DeepSpeed"),
        ("category", b"compute"),
        ("push", (b"forward", 1, size)),
        ("push", (b"all-reduce", 0, size)),
        ("push", (b"backward", 1, size)),
        ("pop", None),
    ]


@pytest.fixture
def nvtx_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The library where pip puts it: torch does not load it, and the loader does not look there."""
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libnvtx-of-pip.so.1"  # a name that no loader knows
    library.parent.mkdir(parents=True)
    source = tmp_path / "nvtx.cpp"
    functions = (
        "void* nvtxDomainCreateA(const char*) { return (void*)7; }",
        "int nvtxDomainRangePop(void*) { return 5; }",
    )
    source.write_text("\n".join(f'extern "C" __attribute__((visibility("default"))) {each}' for each in functions))
    subprocess.run(["c++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(nvtx, "_LIBRARIES", (library.name,))
    for function in (nvtx._library, nvtx._domain):
        function.cache_clear()
    yield library
    for function in (nvtx._library, nvtx._domain):
        function.cache_clear()


@pytest.mark.compiler
def test_the_library_is_found_in_pips_packages(nvtx_of_pip: Path) -> None:
    assert list(nvtx._candidates()) == [nvtx_of_pip.name, str(nvtx_of_pip)]
    assert nvtx.pop("DeepSpeed") == 5


def test_without_the_library_ranges_go_to_the_default_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvtx, "_LIBRARIES", ("libno-such-nvtx.so.1",))
    nvtx._library.cache_clear()
    assert nvtx._library() is None
    nvtx._library.cache_clear()
