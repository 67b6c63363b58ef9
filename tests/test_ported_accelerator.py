"""A class written against an old DeepSpeed, 60 members long, works with its base changed and nothing else."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_plugin_sdk import DeepSpeedAccelerator, PortedAccelerator, SYCLOpBuilder
from ds_plugin_sdk.ported_accelerator import port

# As such classes stand in extensions of 2023: members and arguments of DeepSpeed 0.12, no super().__init__(). The
# device is one that this machine has.


class XPU_Accelerator(PortedAccelerator):
    def __init__(self):  # type: ignore[no-untyped-def]  # old code has no types
        self._name = "cpu"
        self._communication_backend_name = "gloo"

    def is_synchronized_device(self):
        return True

    def device_name(self, device_index=None):
        return "cpu"

    def device(self, device_index=None):
        return None

    def set_device(self, device_index):
        pass

    def current_device(self):
        return 0

    def current_device_name(self):
        return "cpu"

    def device_count(self):
        return 1

    def synchronize(self, device_index=None):
        pass

    def set_rng_state(self, new_state, device_index=None):
        return torch.set_rng_state(new_state)

    def get_rng_state(self, device_index=None):
        return torch.get_rng_state()

    def manual_seed(self, seed):
        return torch.manual_seed(seed)

    def initial_seed(self, seed):
        return torch.initial_seed()

    def default_generator(self, device_index):
        return torch.default_generator

    def stream(self, stream):
        return contextlib.nullcontext()

    def memory_stats(self, device_index=None):
        return {}

    def reset_peak_memory_stats(self, device_index=None):
        pass

    def total_memory(self, device_index=None):
        return 1

    def available_memory(self, device_index=None):
        return 1

    def range_push(self, msg):
        self.pushed = msg

    def range_pop(self):
        return "popped"

    def communication_backend_name(self):
        return self._communication_backend_name

    def pin_memory(self, tensor, align_bytes=1):
        return tensor.clone()

    def op_builder_dir(self):
        return "intel_extension_for_deepspeed.op_builder"

    def export_envs(self):
        return []


@pytest.fixture
def ported() -> Any:
    return XPU_Accelerator()  # type: ignore[no-untyped-call]  # old code has no types


def test_it_constructs_and_what_it_lacks_is_answered(ported: Any) -> None:
    assert isinstance(ported, DeepSpeedAccelerator)
    assert ported.visible_devices_envs() == ["CPU_VISIBLE_DEVICES"]
    assert ported.get_compile_backend() == "inductor"
    assert ported.pin_empty_like is not None
    assert ported.memory_allocated() == 0


def test_a_class_that_sets_its_names_after_its_base_s_init_is_set() -> None:
    """As DeepSpeed's own for NPUs, which returns what its __init__ sets."""

    class NPU_Accelerator(XPU_Accelerator):
        def __init__(self) -> None:
            PortedAccelerator.__init__(self)
            self._communication_backend_name = "gloo"

    accelerator = NPU_Accelerator()
    assert port(accelerator) is accelerator
    assert accelerator._communication_backend_name == "gloo" and accelerator._name == accelerator.device_name()


def test_old_methods_take_what_every_release_passes(ported: Any) -> None:
    ported.range_push("a", domain="d", category="c")
    assert ported.pushed == "a"
    assert ported.range_pop(domain="d") == "popped"
    assert ported.initial_seed() == ported.initial_seed(1)
    tensor = torch.ones(2, 3)
    assert ported.pin_memory(tensor, 1).shape == (2, 3)
    assert ported.pin_memory(tensor, make_copy=False).shape == (2, 3)
    assert ported.pin_memory(tensor, make_copy=False, match_shape=False).shape == (6,)


def test_old_methods_that_take_anything_are_given_it() -> None:
    class Lenient(XPU_Accelerator):
        def range_push(self, *args):
            self.pushed = args

        def range_pop(self, **kwargs):
            return kwargs

    lenient = Lenient()  # type: ignore[no-untyped-call]  # old code has no types
    lenient.range_push("a", "d")
    assert lenient.pushed == ("a", "d")
    lenient.range_push("a", domain="d")
    assert lenient.pushed == ("a",)
    assert lenient.range_pop() == {} and lenient.range_pop(domain="d") == {"domain": "d"}


def test_new_methods_are_left_alone() -> None:
    class New(XPU_Accelerator):
        def pin_memory(self, tensor, make_copy=True, match_shape=True):
            return make_copy, match_shape

    assert New().pin_memory(None, match_shape=False) == (True, False)


class FusedAdamBuilder(SYCLOpBuilder):
    """A builder as extensions of that kind have them."""

    NAME = "fused_adam"
    BUILD_VAR = "DS_BUILD_FUSED_ADAM"

    def __init__(self, name=None):  # type: ignore[no-untyped-def]  # old code has no types
        name = self.NAME if name is None else name
        super().__init__(name=name)

    def absolute_name(self) -> str:
        return f"intel_extension_for_deepspeed.ops.adam.{self.NAME}_op"

    def kernel_root(self) -> Path:
        return Path(__file__).resolve().parent

    def sources(self) -> list[str]:
        return [self.sycl_kernel_path("test_ported_accelerator.py")]

    def include_paths(self) -> list[str]:
        return [self.sycl_kernel_include("op_builder")]


def test_an_old_builder_needs_another_base_and_nothing_else() -> None:
    builder = FusedAdamBuilder()  # type: ignore[no-untyped-call]  # old code has no types
    assert builder.sources() == [__file__]
    assert builder.TOOLCHAIN == "sycl"
    assert builder.absolute_name() == "intel_extension_for_deepspeed.ops.adam.fused_adam_op"
    assert builder.build_spec().toolchain == "sycl"
