"""`make cuda-compile`: compile the CUDA ops as a wheel would have them, and say how long each took.

TORCH_CUDA_ARCH_LIST='7.5;9.0+PTX' python benchmarks/cuda_compile.py FOLDER [OP ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

from ds_plugin_sdk import op_builder, prebuild
from ds_plugin_sdk.op_builder import CUDAOpBuilder


def main(folder: Path, ops: list[str]) -> None:
    classes = op_builder.builders("ds_plugin_cuda.op_builder", "cuda").values()
    for builder in prebuild.distinct(cls() for cls in classes if issubclass(cls, CUDAOpBuilder)):
        name = builder.build_spec().name
        if not ops or name in ops:
            made = prebuild.build(builder, folder)
            print(f"{name}: {made.seconds:.1f} s, {made.path.stat().st_size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
