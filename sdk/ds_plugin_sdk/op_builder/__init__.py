"""Op builders: from DeepSpeed's name of an op to its native code.

lookup     DeepSpeed's builder name -> builder class
builder    OpBuilder: sources and flags -> prebuilt, cache, compiler or reference
combined   ops that are several families at once
kinds      C++, CUDA and SYCL builders
families   op name -> the SDK's torch ops
host       the SDK's own builders, for host tensors
"""

from __future__ import annotations

from ds_plugin_sdk.op_builder.builder import (
    NotImplementedBuilder,
    OpBuilder,
    ReferenceOpBuilder,
    add_prebuilt,
)
from ds_plugin_sdk.op_builder.combined import OWN_NAMES, CombinedOpBuilder
from ds_plugin_sdk.op_builder.families import module_for, register_modules
from ds_plugin_sdk.op_builder.languages import CppOpBuilder, CUDAOpBuilder, SYCLOpBuilder
from ds_plugin_sdk.op_builder.lookup import (
    HOST_BUILDERS,
    OPTIONAL_BUILDERS,
    borrow_from,
    builders,
    find,
    is_base,
    load_kernels,
    op_name,
    use_package,
)

__all__ = [
    "HOST_BUILDERS",
    "OPTIONAL_BUILDERS",
    "OWN_NAMES",
    "CUDAOpBuilder",
    "CombinedOpBuilder",
    "CppOpBuilder",
    "NotImplementedBuilder",
    "OpBuilder",
    "ReferenceOpBuilder",
    "SYCLOpBuilder",
    "add_prebuilt",
    "borrow_from",
    "builders",
    "find",
    "is_base",
    "load_kernels",
    "module_for",
    "op_name",
    "register_modules",
    "use_package",
]
