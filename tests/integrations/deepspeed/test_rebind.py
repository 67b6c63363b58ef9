"""Everything that ``import deepspeed`` froze follows a change of the accelerator, whichever function made it."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from deepspeed_support import Python

from ds_plugin_sdk.integrations.deepspeed import rebind

pytestmark = pytest.mark.deepspeed

# What DeepSpeed 0.19.8 freezes, by name. `holds(owner)` checks all of it in the process that changes the accelerator.
FROZEN = """
import importlib, inspect, sys
import ds_plugin_sdk

OPS = '''AsyncIO CCLComm CPUAdagrad CPUAdam CPULion DeepCompile EvoformerAttn FPQuantizer FlashAttention FusedAdam
    FusedLamb FusedLion GDS Inference InferenceCore InferenceCutlass NotImplemented PinMemory Quantizer RaggedOps
    RaggedUtils RandomLTD ShareMemComm SpatialInference StochasticTransformer Transformer Utils'''.split()

COPIES = '''
    comm.ccl NotImplemented
    io.fast_file_writer Utils
    ops.adagrad.cpu_adagrad CPUAdagrad
    ops.adam.cpu_adam CPUAdam
    ops.adam.fused_adam FusedAdam
    ops.fp_quantizer.quantize FPQuantizer
    ops.lamb.fused_lamb FusedLamb
    ops.lion.cpu_lion CPULion
    ops.lion.fused_lion FusedLion
    ops.random_ltd.dropping_utils RandomLTD
    ops.transformer.inference.bias_add SpatialInference
    ops.transformer.inference.op_binding.base Inference
    ops.transformer.transformer Transformer
    ops.transformer.transformer StochasticTransformer
    runtime.model_checkpointing.writer_factory AsyncIO
    runtime.model_checkpointing.writer_factory GDS
    runtime.swap_tensor.partitioned_optimizer_swapper AsyncIO
    runtime.swap_tensor.partitioned_param_swapper AsyncIO
    runtime.swap_tensor.partitioned_param_swapper GDS
    runtime.swap_tensor.pipelined_optimizer_swapper AsyncIO
'''.split('\\n')[1:-1]

def module(name):
    return sys.modules['deepspeed.' + name]

def default(function, parameter):
    return inspect.signature(function).parameters[parameter].default

def loaded_ops():
    from ds_plugin_sdk.integrations.deepspeed.rebind import LOADED_OPS
    for name, path in LOADED_OPS:
        if name in sys.modules:
            owner, _, attribute = path.rpartition('.')
            yield (getattr(sys.modules[name], owner) if owner else sys.modules[name]), attribute

def holds(accelerator):
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    assert get_accelerator() is accelerator, get_accelerator()
    assert ds_plugin_sdk.get_accelerator() is accelerator
    expected = accelerator.get_op_builder
    for name in OPS:
        assert getattr(deepspeed.ops.op_builder, name + 'Builder') is expected(name + 'Builder'), name
    for where, name in map(str.split, COPIES):
        assert getattr(module(where), name + 'Builder') is expected(name + 'Builder'), (where, name)
    utils = module('runtime.utils')
    assert utils.torch_memory_reserved == accelerator.memory_reserved
    assert utils.torch_max_memory_reserved == accelerator.max_memory_reserved
    assert default(deepspeed.DeepSpeedEngine.compile, 'backend') == accelerator.get_compile_backend()
    assert default(deepspeed.DeepSpeedEngine.compile, 'schedule') is None
    assert default(deepspeed.InferenceEngine.compile, 'backend') == accelerator.get_compile_backend()
    assert default(utils.PartitionedTensor.from_meta, 'device') == accelerator.device_name()
    # Taken from DeepSpeed's own tree whatever the accelerator is.
    from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder
    from deepspeed.ops.op_builder.dc import DeepCompileBuilder
    assert importlib.import_module('deepspeed.ops.pin_memory').PinMemoryBuilder is PinMemoryBuilder
    assert module('compile.util').DeepCompileBuilder is DeepCompileBuilder
    # What the process loaded from another accelerator must not be used on.
    for owner, attribute in loaded_ops():
        assert getattr(owner, attribute) is None, (owner, attribute)
        setattr(owner, attribute, 'an op of ' + accelerator.device_name())
    assert all(getattr(builder, 'owner', 'deepspeed') == getattr(expected('X'), 'owner', 'deepspeed')
               for builder in module('env_report').ALL_OPS.values())
    ours = set(module('env_report').ALL_OPS) - {'deepspeed_not_implemented'}
    assert ours <= set(deepspeed.ops.__compatible_ops__)
"""


def test_changes_after_import_through_both_doors(zap: Path, python: Python) -> None:
    python(
        FROZEN
        + """
import deepspeed, deepspeed.env_report
from deepspeed.accelerator import get_accelerator, set_accelerator
import zap_accelerators

own = get_accelerator()
assert type(own).__module__ == 'deepspeed.accelerator.cpu_accelerator'
holds(own)

zap = zap_accelerators.Zap()
ds_plugin_sdk.set_accelerator(zap)
holds(zap)
import deepspeed.ops.aio, deepspeed.inference.v2.kernels.core_ops
assert deepspeed.ops.aio.AsyncIOBuilder.owner == 'Zap'

zip = zap_accelerators.Zip()
set_accelerator(zip)
holds(zip)
assert deepspeed.ops.aio.AsyncIOBuilder.owner == 'Zip'

set_accelerator(own)
holds(own)
assert deepspeed.ops.aio.AsyncIOBuilder is own.get_op_builder('AsyncIOBuilder')
assert 'cpu: chosen, deepspeed.accelerator.set_accelerator' in str(ds_plugin_sdk.registry.decision())
set_accelerator(zap)
holds(zap)

for wrong in (None, object(), zap_accelerators.Zap):
    try:
        set_accelerator(wrong)
    except AssertionError as error:
        assert 'is not subclass of DeepSpeedAccelerator' in str(error)
    else:
        raise SystemExit(f'{wrong} was accepted')
    try:
        ds_plugin_sdk.set_accelerator(wrong)
    except TypeError as error:
        assert 'is not an instance of ds_plugin_sdk.DeepSpeedAccelerator, nor of' in str(error)
    else:
        raise SystemExit(f'{wrong} was accepted')
assert get_accelerator() is zap
""",
        DS_PLUGIN_AUTOLOAD="0",
    )


def test_set_before_import_holds_everywhere(zap: Path, python: Python) -> None:
    """`set_accelerator` is stronger than ``DS_ACCELERATOR`` and than a plugin of higher priority."""
    python(
        FROZEN
        + """
import zap_accelerators
zip = zap_accelerators.Zip()
ds_plugin_sdk.set_accelerator(zip)
assert 'deepspeed' not in sys.modules
import deepspeed, deepspeed.env_report
holds(zip)
zap = zap_accelerators.Zap()
deepspeed.accelerator.set_accelerator(zap)
holds(zap)
""",
        DS_ACCELERATOR="cpu",
    )


def deepspeed_files() -> Iterator[tuple[str, ast.Module]]:
    """The modules of the installed DeepSpeed, not imported, but for accelerators and builders themselves."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if parts[0] != "accelerator" and parts[:2] != ("ops", "op_builder"):
            dotted = ".".join(("deepspeed", *parts)).removesuffix(".__init__")
            yield dotted, ast.parse(file.read_text(encoding="utf-8"))


def functions(tree: ast.AST, path: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{path}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{path}{node.name}", node
        elif isinstance(node, ast.If | ast.Try):
            yield from functions(node, path)


def frozen_defaults(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """(parameter, method) of each default argument that comes from the accelerator."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args][-len(arguments.defaults) or None :]
    values = [*arguments.defaults, *arguments.kw_defaults]
    for parameter, value in zip([*named, *arguments.kwonlyargs], values, strict=False):
        text = "" if value is None else ast.unparse(value)
        if "get_accelerator()" in text:
            yield parameter.arg, text.removeprefix("get_accelerator().").removesuffix("()")


def kept_ops(path: str, function: ast.FunctionDef) -> Iterator[str]:
    """Globals and class attributes that keep a loaded op."""
    shared = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and "uilder" in (text := ast.unparse(node.value)) and ".load(" in text:
            target = ast.unparse(node.targets[0])
            if target in shared or target.split(".")[0] in path.split(".")[:-1]:
                yield target


def test_the_lists_are_complete_for_the_installed_deepspeed() -> None:
    defaults, kept = set(), set()
    for module, tree in deepspeed_files():
        for path, function in functions(tree):
            defaults.update((module, path, *default) for default in frozen_defaults(function))
            kept.update((module, name) for name in kept_ops(path, function))
    assert defaults == set(rebind.DEFAULTS)
    from_its_own_tree = {("deepspeed.compile.util", "dc_handle")}
    assert kept == set(rebind.LOADED_OPS) | from_its_own_tree
