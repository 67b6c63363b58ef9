"""Accelerators on DeepSpeed's own abstract class, as vendors have them, are set and served as they are."""

from __future__ import annotations

import pytest
from deepspeed_support import Python

from plugin_site import Install

pytestmark = pytest.mark.deepspeed

# Stand-ins for the modules of the vendors' torch extensions: host memory under the device's name.
STAND_INS = """
import importlib, sys, types
import torch

class Stream:
    pass

class DeviceModule(types.ModuleType):
    def __init__(self, name):
        super().__init__(f"torch.{name}")
        self.Stream = self.Event = Stream
        generator = torch.Generator()
        self.random, self.default_generators = self, [generator] * 2
        self.get_rng_state, self.set_rng_state = generator.get_state, generator.set_state
        self.manual_seed, self.initial_seed = generator.manual_seed, generator.initial_seed
        self.device_count, self.current_device, self.is_available = lambda: 2, lambda: 1, lambda: True
        self.memory_stats = lambda index=None: {"allocated_bytes.all.current": 7, "allocated_bytes.all.peak": 9}
        self.memory_allocated = lambda index=None: 7
        self.is_bf16_supported = self.is_fp16_supported = lambda: True
        self.recommended_max_memory = lambda: 1 << 30

def stand_in(name):
    module = sys.modules[f"torch.{name}"] = DeviceModule(name)
    setattr(torch, name, module)
    return module

for name in ("xpu", "npu", "mlu", "sdaa", "mps", "hpu"):
    stand_in(name)
torch.use_deterministic_algorithms = lambda mode: None  # what HPU's class calls would import torch's compiler
torch.backends.mps.is_macos_or_newer = lambda major, minor: True
names = "habana_frameworks", "torch", "utils", "experimental"
habana = [types.ModuleType(".".join(names[:i])) for i in range(1, 5)]
for module, inner in zip(habana, [*habana[1:], None]):
    sys.modules[module.__name__], module.__path__ = module, []
    if inner is not None:
        setattr(module, inner.__name__.rpartition(".")[2], inner)
habana[1].hpu = sys.modules["habana_frameworks.torch.hpu"] = torch.hpu
habana[3]._is_fp16_supported = lambda: True

def make(name):
    module = importlib.import_module(f"deepspeed.accelerator.{name.lower()}_accelerator")
    return getattr(module, f"{name}_Accelerator")()
"""

IN_TREE = """
import ds_plugin_sdk, deepspeed
from deepspeed.accelerator import get_accelerator
from ds_plugin_sdk.conformance.runtime import builders
from ds_plugin_sdk.conformance.target import Target

for name in ("XPU", "NPU", "HPU", "MLU", "SDAA", "MPS"):
    accelerator = make(name)
    cls = type(accelerator)
    ds_plugin_sdk.set_accelerator(accelerator)
    assert get_accelerator() is ds_plugin_sdk.get_accelerator() is accelerator
    assert isinstance(accelerator, cls) and isinstance(accelerator, ds_plugin_sdk.PortedAccelerator)
    device = name.lower()
    assert accelerator._name == accelerator.device_name() == device
    assert accelerator.device_count() == (1 if name == "MPS" else 2)
    assert isinstance(accelerator.visible_devices_envs(), list) and accelerator.communication_backend_name()
    assert accelerator.supported_dtypes()
    assert accelerator.get_compile_backend()
    accelerator.manual_seed(3)
    assert accelerator.get_rng_state().dtype == torch.uint8
    assert accelerator.initial_seed() == accelerator.initial_seed(1)
    target = Target(name, accelerator)
    for builder in builders.NAMES:
        builders.builder_class(target, builder)
        builders._create(target, builder)
    builders.unknown(target)
    builders.folder(target)
    builders.again(target)
    # What the class does not offer is the SDK's reference implementation, for DeepSpeed too.
    assert accelerator.create_op_builder("FusedLambBuilder").load() is not None
    assert deepspeed.ops.op_builder.RandomLTDBuilder is accelerator.get_op_builder("RandomLTDBuilder")
xpu = make("XPU")
ds_plugin_sdk.set_accelerator(xpu)
assert xpu.get_op_builder("FusedAdamBuilder").__module__ == "deepspeed.ops.op_builder.xpu.fused_adam"
print("served")
"""


def test_deepspeeds_in_tree_classes_are_set_and_answer(python: Python) -> None:
    done = python(STAND_INS + IN_TREE, DS_ACCELERATOR="cpu")
    assert done.stdout.splitlines()[-1] == "served"


# As an extension of 2023 has it: it lacks what DeepSpeed has made abstract since, and some more.
EXTENSION = """
import contextlib, torch
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

class ZAP_Accelerator(DeepSpeedAccelerator):
    def __init__(self):
        self._communication_backend_name = "gloo"
    def device_name(self, device_index=None):
        return "meta"
    def device_count(self):
        return 1
    def current_device(self):
        return 0
    def set_device(self, device_index):
        pass
    def synchronize(self, device_index=None):
        pass
    def get_rng_state(self, device_index=None):
        return torch.get_rng_state()
    def set_rng_state(self, new_state, device_index=None):
        torch.set_rng_state(new_state)
    def manual_seed(self, seed):
        torch.manual_seed(seed)
    def default_generator(self, device_index):
        return torch.default_generator
    def memory_stats(self, device_index=None):
        return {"allocated_bytes.all.current": 5}
    def reset_peak_memory_stats(self, device_index=None):
        pass
    def total_memory(self, device_index=None):
        return 9
    def available_memory(self, device_index=None):
        return 4
    def communication_backend_name(self):
        return self._communication_backend_name
    def range_push(self, msg):
        return msg
"""


@pytest.mark.parametrize(
    ("before", "set_accelerator"),
    [("import deepspeed", "deepspeed.accelerator.set_accelerator"), ("", "ds_plugin_sdk.set_accelerator")],
)
def test_an_old_extensions_class_lacks_members_and_is_served(python: Python, before: str, set_accelerator: str) -> None:
    program = (
        f"import ds_plugin_sdk\n{before}\n{EXTENSION}\n"
        "accelerator = ZAP_Accelerator()\n"
        f"import deepspeed\n{set_accelerator}(accelerator)\n"
        "assert deepspeed.accelerator.get_accelerator() is ds_plugin_sdk.get_accelerator() is accelerator\n"
        "assert accelerator._name == 'meta'\n"
        "assert accelerator.memory_allocated() == 5\n"
        "assert accelerator.range_push('a', domain='b') == 'a'\n"
        "assert accelerator.visible_devices_envs() == ['META_VISIBLE_DEVICES']\n"
        "assert accelerator.is_synchronized_device() is True\n"
        "assert accelerator.pin_empty_like is not None\n"
        "assert deepspeed.ops.op_builder.FusedAdamBuilder.NAME == 'fused_adam'\n"
        "class Nothing(DeepSpeedAccelerator):\n    pass\n"
        "try:\n    Nothing()\n"
        "except TypeError as error:\n    print(error)\n"
    )
    said = python(program, DS_ACCELERATOR="cpu").stdout.splitlines()[-1]
    assert "memory_stats" in said, "what only the vendor knows stays abstract"
    assert "memory_allocated" not in said


FIRST = {
    "the SDK's accelerator": "from ds_plugin_sdk import get_accelerator\nours = get_accelerator()\n",
    "a report": "from ds_plugin_sdk import report\nassert report.collect().ops\n",
    "DeepSpeed": "",
}


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("named", [{}, {"DS_ACCELERATOR": "meta"}], ids=["found", "named"])
def test_a_plugin_whose_module_imports_deepspeed_is_used_whoever_is_asked_first(
    first: str, named: dict[str, str], python: Python, install: Install
) -> None:
    site = install("meta", priority=50, accelerator="old_extension:ZAP_Accelerator")
    (site / "old_extension.py").write_text(EXTENSION, encoding="utf-8")
    program = (
        f"{FIRST[first]}"
        "import deepspeed, ds_plugin_sdk\n"
        "accelerator = deepspeed.accelerator.get_accelerator()\n"
        "assert accelerator is ds_plugin_sdk.get_accelerator(), accelerator\n"
        "from deepspeed.runtime import engine\n"
        "assert engine.get_accelerator() is accelerator\n"
        "print(accelerator.device_name())\n"
    )
    done = python(program, **named)
    assert done.stdout.splitlines()[-1] == "meta"
    assert "ds-plugin-sdk:" not in done.stderr
