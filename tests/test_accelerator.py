"""The accelerator contract: defaults derived from few facts, and flags that cannot contradict the device."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch

from ds_plugin_cpu.accelerator import CPU_Accelerator
from ds_plugin_sdk import DeepSpeedAccelerator, TorchAccelerator, set_accelerator
from ds_plugin_sdk.accelerator_names import misnamed
from ds_plugin_sdk.errors import InvalidAcceleratorError, OpNotImplementedError
from ds_plugin_sdk.ported_accelerator import PortedAccelerator


class Minimal(DeepSpeedAccelerator):
    """The least that a vendor can write against the ABC, here on CPU tensors."""

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu" if device_index is None else f"cpu:{device_index}"

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return {"allocated_bytes.all.current": 10, "allocated_bytes.all.peak": 20}

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        pass

    def total_memory(self, device_index: int | None = None) -> int:
        return 100

    def available_memory(self, device_index: int | None = None) -> int:
        return 90

    def communication_backend_name(self) -> str:
        return "gloo"


def test_a_class_that_lacks_a_member_says_which() -> None:
    class Forgetful(Minimal):
        synchronize = DeepSpeedAccelerator.synchronize

    with pytest.raises(TypeError, match="synchronize"):
        Forgetful()


def test_a_device_without_streams_is_synchronous() -> None:
    device = Minimal()
    assert device.Stream is None
    assert device.Event is None
    assert device.is_synchronized_device()
    assert device.resolves_data_dependency()
    assert device.handles_memory_backpressure()
    assert device.use_host_timers()
    assert device.current_stream() is None
    with device.stream(None):
        pass


def test_a_device_with_streams_and_events_is_asynchronous() -> None:
    class Streaming(Minimal):
        Stream = torch.cpu.Stream
        Event = torch.Event

    device = Streaming()
    assert not device.is_synchronized_device()
    assert not device.resolves_data_dependency()
    assert not device.handles_memory_backpressure()
    assert not device.use_host_timers()


@pytest.mark.parametrize("flag", ["is_synchronized_device", "resolves_data_dependency"])
def test_a_device_cannot_declare_streams_it_does_not_have(flag: str) -> None:
    cls = type("Boastful", (Minimal,), {flag: lambda self: False})
    with pytest.raises(InvalidAcceleratorError, match="its Stream is None"):
        cls()


@pytest.mark.parametrize("flag", ["handles_memory_backpressure", "use_host_timers"])
def test_a_device_cannot_declare_events_it_does_not_have(flag: str) -> None:
    cls = type("Boastful", (Minimal,), {flag: lambda self: False})
    with pytest.raises(InvalidAcceleratorError, match="its Event is None"):
        cls()


def test_memory_numbers_come_from_the_statistics() -> None:
    device = Minimal()
    assert device.memory_allocated() == device.memory_reserved() == device.memory_cached() == 10
    assert device.max_memory_allocated() == device.max_memory_reserved() == device.max_memory_cached() == 20


def test_types_come_from_one_list() -> None:
    class NoHalf(Minimal):
        def supported_dtypes(self) -> list[torch.dtype]:
            return [torch.float32, torch.bfloat16]

    assert NoHalf().is_bf16_supported() is True
    assert NoHalf().is_fp16_supported() is False


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("BFloat16Tensor", torch.bfloat16),
        ("ByteTensor", torch.uint8),
        ("DoubleTensor", torch.float64),
        ("FloatTensor", torch.float32),
        ("HalfTensor", torch.float16),
        ("IntTensor", torch.int32),
        ("LongTensor", torch.int64),
    ],
)
def test_tensor_factories_take_a_list(name: str, dtype: torch.dtype) -> None:
    made = getattr(Minimal(), name)([1, 2])
    assert made.dtype is dtype
    assert made.tolist() == [1, 2]


def test_signatures_of_every_release_are_accepted() -> None:
    device = Minimal()
    device._torch_pin_memory = lambda tensor: tensor.clone()  # type: ignore[method-assign]  # pinning would need a device
    device.range_push("message")
    device.range_push("message", domain="d", category="c")
    device.range_pop()
    device.range_pop(domain="d")
    assert device.initial_seed(1) == device.initial_seed()
    assert device.pin_memory(torch.ones(2), 1).tolist() == [1, 1]
    assert device.pin_memory(torch.ones(2), align_bytes=1).tolist() == [1, 1]


def test_the_launcher_gets_a_variable_and_sets_it() -> None:
    environment: dict[str, str] = {}
    device = Minimal()
    device.set_visible_devices_envs(environment, [0, 2])
    assert environment == {"CPU_VISIBLE_DEVICES": "0,2"}
    assert device.visible_devices_envs() == ["CPU_VISIBLE_DEVICES"]


def test_an_unknown_compile_backend_is_rejected() -> None:
    device = Minimal()
    with pytest.raises(ValueError, match="no backend 'nonsense'"):
        device.set_compile_backend("nonsense")
    device.set_compile_backend("eager")
    assert device.get_compile_backend() == "eager"


def test_an_op_nobody_offers_has_a_named_stub_that_raises_a_value_error() -> None:
    builder = Minimal().get_op_builder("FlashAttentionBuilder")
    assert builder.NAME == "flash_attn"
    assert builder().is_compatible() is False
    with pytest.raises(OpNotImplementedError, match="op 'flash_attn'") as error:
        builder().load()
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("name", ["ShareMemCommBuilder", "CCLCommBuilder"])
def test_optional_collectives_are_absent(name: str) -> None:
    assert Minimal().create_op_builder(name) is None
    assert Minimal().get_op_builder(name) is not None


def test_a_torch_accelerator_names_torch_s_types() -> None:
    class Zap(TorchAccelerator):
        device_type = "zap"
        dtypes = ("float32", torch.bfloat16)  # type: ignore[assignment]  # this is the mistake

    with pytest.raises(InvalidAcceleratorError, match=r"Zap .* one can train .*: .* dtypes has 'float32'"):
        Zap()


def test_a_torch_accelerator_must_name_its_device() -> None:
    class Nameless(TorchAccelerator):
        pass

    with pytest.raises(InvalidAcceleratorError, match="device_type is missing"):
        Nameless()


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"__init__": lambda self: None}, "Zap does not say which device it is: its __init__ has not called super()"),
        ({"device_name": lambda self, device_index=None: None}, "device_name() gives None"),
        (
            {"op_builders": ["zap.op_builder"]},
            "does not say where its op builders are (plugin 'cpu'): op_builders is [",
        ),
        ({"op_builders": torch}, "op_builders is <module 'torch'"),
        ({"op_builders": ""}, "op_builders is ''"),
        ({"exported_envs": "ZAP_"}, "exported_envs is the text 'ZAP_', and each letter of it would be a prefix"),
    ],
)
def test_an_accelerator_that_names_nothing_is_not_set(members: dict[str, Any], says: str) -> None:
    zap = type("Zap", (CPU_Accelerator,), members)()
    with pytest.raises(InvalidAcceleratorError, match=re.escape(says)):
        set_accelerator(zap)


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("op_builder", "zap.op_builder", "op_builders"),
        ("comunication_backend", "zapccl", "communication_backend"),
        ("visible_device_env", "ZAP", "visible_devices_env"),
        ("is_bf16_suported", lambda self: False, "is_bf16_supported"),
        ("memory_alocated", lambda self, device_index=None: 0, "memory_allocated"),
    ],
)
def test_what_a_class_states_by_a_wrong_name_is_warned_of(name: str, value: Any, meant: str) -> None:
    with pytest.warns(RuntimeWarning, match=rf"Zap\.{name} is not used: TorchAccelerator has {meant}; ") as caught:
        type("Zap", (TorchAccelerator,), {"device_type": "cpu", name: value})
    assert [warning.filename for warning in caught] == [__file__]


def test_the_warning_names_the_line_that_makes_the_class() -> None:
    """Of a base that has an __init_subclass__ of its own too, and of one that was written for DeepSpeed."""

    class Ours(PortedAccelerator):
        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)

    with pytest.warns(RuntimeWarning, match="is_bf16_suported is not used") as caught:

        class Zap(Ours):
            def is_bf16_suported(self) -> bool:
                return True

    assert [warning.filename for warning in caught] == [__file__]


def test_a_misspelt_method_of_a_mixin() -> None:
    class Mixin:
        def is_bf16_suported(self) -> bool:
            return True

    class Zap(Mixin, TorchAccelerator):
        device_type = "cpu"

    assert misnamed(Mixin, Zap) == {"is_bf16_suported": "is_bf16_supported"}


@pytest.mark.parametrize(
    "name",
    [
        "current_device_id",
        "default_generators",
        "devices",
        "is_fp8_supported",
        "max_memory_reserved_mb",
        "reset_peak_host_memory_stats",
        "streams",
        "synchronize_device",
    ],
)
def test_a_method_with_other_words_is_the_class_s_own(name: str, recwarn: pytest.WarningsRecorder) -> None:
    cls = type("Zap", (TorchAccelerator,), {"device_type": "cpu", name: lambda self: 1})
    assert getattr(cls(), name)() == 1 and not recwarn.list


@pytest.mark.parametrize("kind", [staticmethod, classmethod, property, functools.lru_cache])
def test_every_kind_of_method_is_warned_of(kind: Any) -> None:
    with pytest.warns(RuntimeWarning, match=r"is_bf16_suported is not used: TorchAccelerator has is_bf16_supported"):
        type("Zap", (TorchAccelerator,), {"device_type": "cpu", "is_bf16_suported": kind(lambda self: False)})


@pytest.mark.parametrize(("name", "value"), [("device_name", "zap"), ("visible_devices_envs", ["ZAP"])])
def test_a_value_in_the_place_of_a_method_is_an_error(name: str, value: Any) -> None:
    with pytest.raises(InvalidAcceleratorError, match=re.escape(f"Zap.{name} hides a method: {name} = {value!r}")):
        type("Zap", (TorchAccelerator,), {"device_type": "cpu", name: value})


class Tuned:
    dtype = None  # of a mixin's own


class Pooled(CPU_Accelerator):
    pool_of_0: int = 1


@pytest.mark.filterwarnings("error")  # a warning would be a false one
@pytest.mark.parametrize(
    ("bases", "own"),
    [
        ((TorchAccelerator,), {"streams": 4, "firmware": "2.1", "Stream": None, "_op_builder": "", "amp": None}),
        ((TorchAccelerator,), {"dtype": "bf16", "dtypes": (torch.bfloat16,)}),
        ((Tuned, TorchAccelerator), {"dtype": "bf16"}),
        ((Pooled,), {"pool_of_1": 2}),
    ],
)
def test_a_class_may_have_attributes_of_its_own(bases: tuple[type, ...], own: dict[str, Any]) -> None:
    made: Any = type("Zap", bases, {"device_type": "cpu", **own})
    assert made.device_type == "cpu"


def test_a_torch_accelerator_of_an_unknown_device_says_what_to_import() -> None:
    class Zap(TorchAccelerator):
        device_type = "zap"
        communication_backend = "gloo"

    with pytest.raises(InvalidAcceleratorError, match="torch does not know a device 'zap'"):
        Zap()


def test_a_torch_accelerator_answers_from_torch() -> None:
    """xpu is a device that every torch knows by name, also where there is none of it."""

    class XPU_Accelerator(TorchAccelerator):
        device_type = "xpu"

    device = XPU_Accelerator()
    assert device.device_count() == torch.xpu.device_count()
    assert device.communication_backend_name() == "xccl"
    assert device.Stream is torch.xpu.Stream
    assert not device.is_synchronized_device()
    assert device.device_name(1) == "xpu:1"
    assert not device.on_accelerator(torch.ones(1))


def test_a_device_is_one_by_its_index_its_name_or_itself() -> None:
    class XPU_Accelerator(TorchAccelerator):
        device_type = "xpu"

        def current_device(self) -> int:
            return 2

    device = XPU_Accelerator().device
    assert {device(2), device("xpu:2"), device(torch.device("xpu", 2))} == {torch.device("xpu:2")}
    assert {device(), device(None), device("xpu"), device(torch.device("xpu"))} == {torch.device("xpu:2")}
    assert device(torch.device("xpu", 0)) == torch.device("xpu:0")
    with pytest.raises(ValueError, match="cpu is no device of 'xpu'"):
        device(torch.device("cpu"))


def test_fork_rng_keeps_the_device_s_generator() -> None:
    device = Minimal()
    device.manual_seed(1)
    first = torch.rand(3)
    device.manual_seed(1)
    with device.random().fork_rng(devices=[device.current_device()]):
        torch.rand(3)
    assert torch.equal(torch.rand(3), first)
    assert device.random().manual_seed is torch.random.manual_seed
