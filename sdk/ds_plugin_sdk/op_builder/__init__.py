"""Op builders: from DeepSpeed's name of an op to its native code.

op_table   every op, a row each
lookup     DeepSpeed's builder name -> builder class
builder    OpBuilder: sources and flags -> prebuilt, cache, compiler or reference implementation
sourceless builders that compile nothing: reference implementations, ops made of others, another's ops
languages  C++, CUDA and SYCL builders
cpu        the SDK's own builders, for CPU tensors and for host memory
"""

from __future__ import annotations

from ds_plugin_sdk.op_builder.builder import (
    OpBuilder,
    add_prebuilt,
    builders_of,
    check_sources,
    functions_of,
    made,
)
from ds_plugin_sdk.op_builder.languages import CppOpBuilder, CUDAOpBuilder, SYCLOpBuilder
from ds_plugin_sdk.op_builder.lookup import (
    CPU_BUILDERS,
    add_builder_source,
    builders,
    builders_in,
    find,
    has_native_family,
    is_base,
    is_native,
    load_family,
    problems_in,
    use_package,
)
from ds_plugin_sdk.op_builder.sourceless import (
    CombinedOpBuilder,
    LentOpBuilder,
    NotImplementedBuilder,
    ReferenceOpBuilder,
    SourcelessOpBuilder,
)

__all__ = [
    "CPU_BUILDERS",
    "CUDAOpBuilder",
    "CombinedOpBuilder",
    "CppOpBuilder",
    "LentOpBuilder",
    "NotImplementedBuilder",
    "OpBuilder",
    "ReferenceOpBuilder",
    "SYCLOpBuilder",
    "SourcelessOpBuilder",
    "add_builder_source",
    "add_prebuilt",
    "builders",
    "builders_in",
    "builders_of",
    "check_sources",
    "find",
    "functions_of",
    "has_native_family",
    "is_base",
    "is_native",
    "load_family",
    "made",
    "problems_in",
    "use_package",
]
