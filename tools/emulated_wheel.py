"""The wheels with binaries on older CPUs than this one: every op of every family under an emulator, against float64.

    make emulate

Needs qemu's user-mode emulator of x86-64 (Debian: apt install qemu-user). It ends a program that runs an instruction
which the emulated CPU lacks, and it is slow: of each op's samples only small ones are tried.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

# AVX2 without AVX-512, and neither.
CPUS = ("Haswell", "Nehalem")
LARGEST = 20_000  # elements of a sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, help="folder of the SDK's wheel and of ds-plugin-cpu's")
    parser.add_argument("--cpu", nargs="+", default=CPUS, help="models as `qemu-x86_64 -cpu help` lists them")
    parser.add_argument("--family", nargs="+", default=[], help="only these")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        check_ops(options.wheels, options.family)
        return
    with tempfile.TemporaryDirectory() as folder:
        for wheel in options.wheels.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)
        for cpu in options.cpu:
            print(f"{cpu}:", flush=True)
            emulate(cpu, Path(folder), options.family)


def emulate(cpu: str, site: Path, chosen: list[str]) -> None:
    """Run this program with the packages in `site`, compiling nothing and falling back on nothing."""
    emulator = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
    if emulator is None:
        sys.exit("qemu's user-mode emulator (qemu-x86_64) is not on PATH")
    settings = {
        "PYTHONPATH": str(site),
        "DS_ACCELERATOR": "cpu",
        "DS_PLUGIN_COMPILE": "0",
        "DS_PLUGIN_FALLBACK": "0",
        "DS_PLUGIN_CACHE_DIR": str(site / "cache"),
        "OMP_NUM_THREADS": "2",
    }
    command = [emulator, "-cpu", cpu, sys.executable, __file__, "--inside", str(site)]
    if chosen:
        command += ["--family", *chosen]
    subprocess.run(command, check=True, env={**os.environ, **settings})


def check_ops(site: Path, chosen: list[str]) -> None:
    """Every op of the chosen families, or of all, on its small samples, in each dtype; one line for each family."""
    import torch

    import ds_plugin_cpu
    import ds_plugin_sdk
    from ds_plugin_sdk import op_builder, provenance
    from ds_plugin_sdk.conformance import op_info

    for package in (ds_plugin_sdk, ds_plugin_cpu):
        assert Path(package.__file__).is_relative_to(site), package.__file__
    ds_plugin_sdk.get_accelerator()  # which brings the binaries of its wheel
    print(f"  torch {torch.__version__} computes with {torch.backends.cpu.get_cpu_capability()}", flush=True)
    families = defaultdict(list)
    for info in op_info.infos():
        if not chosen or info.family in chosen:
            families[info.family].append(info)
    for family, ops in families.items():
        op_builder.load_family(family, "cpu")
        results = sum(compare(info, dtype) for info in ops for dtype in info.dtypes)
        native = sum(torch._C._dispatch_has_kernel_for_dispatch_key(f"ds_plugin::{info.name}", "CPU") for info in ops)
        print(f"  {family:<12} {native:>2} of {len(ops):>2} ops native, {results:>4} results hold", flush=True)
    # A reference is then an op that has no kernel: falling back is forbidden.
    assert {record.origin for record in provenance.records()} <= {"prebuilt", "accelerator", "reference"}


def compare(info: Any, dtype: Any) -> int:
    """Run an op on its small samples of a dtype. Returns how many tensors were compared."""
    from ds_plugin_sdk.conformance.op_info import Make, close_to

    compared = 0
    for sample in info.samples(Make.seeded(dtype)):
        if sample.kind == "real":
            break  # of the shapes of real models, which come last
        if sum(tensor.numel() for each in sample.arguments.values() for tensor in tensors(each)) > LARGEST:
            continue
        exact = {name: copied(each, exactly=True) for name, each in sample.arguments.items()}
        given = {name: copied(each, exactly=False) for name, each in sample.arguments.items()}
        expected = [tensor for each in info.formula(**exact) for tensor in tensors(each)]
        replaced = [tensor for name in info.written for tensor in tensors(sample.arguments[name])]
        known = {id(tensor) for each in given.values() for tensor in tensors(each)}
        outputs = [tensor for tensor in tensors(info.function(**given)) if id(tensor) not in known]
        actual = [tensor for name in info.written for tensor in tensors(given[name])] + outputs
        assert len(actual) == len(expected), f"{info.name} on '{sample.label}' gave {len(actual)} tensors"
        for i, (result, wanted) in enumerate(zip(actual, expected, strict=True)):
            before = replaced[i] if i < len(replaced) else None
            rtol, atol = info.allowed(sample.arguments, result.dtype)
            wrong = close_to(result, wanted, before=before, rtol=rtol, atol=atol)
            assert wrong is None, f"{info.name} on '{sample.label}' ({dtype}), result {i}: {wrong} times the tolerance"
            compared += 1
    return compared


def tensors(value: Any) -> list[Any]:
    """The tensors of an argument or a result."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    return [each for each in value if isinstance(each, torch.Tensor)] if isinstance(value, list | tuple) else []


def copied(value: Any, *, exactly: bool) -> Any:
    """An argument's own copy, in float64 if asked for."""
    if isinstance(value, list | tuple):
        return [copied(each, exactly=exactly) for each in value]
    if not tensors(value):
        return value
    return value.double() if exactly and value.is_floating_point() else value.clone()


if __name__ == "__main__":
    main()
