"""The CPU's kernels on other architectures than this one: cross-compiled, and their native tests run under an emulator.

    make emulate

Needs the cross compilers and qemu's user-mode emulators of ARM and POWER (Debian: apt install qemu-user
g++-aarch64-linux-gnu g++-powerpc64le-linux-gnu). The tests are those of ``kernels/tests``: each kind of work at each
level against its formula in double, or against known bits. Every kind that ``kernels/cpu`` computes must have run.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1] / "kernels"

# Of each architecture: its compiler, its emulator, the folder of its libraries, and models of its CPUs.
ARCHITECTURES = {
    "aarch64": ("aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu", ("cortex-a72",)),
    "ppc64le": ("powerpc64le-linux-gnu-g++", "qemu-ppc64le", "/usr/powerpc64le-linux-gnu", ("power8", "power9")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, help="folder for the binaries")
    parser.add_argument("--architecture", nargs="+", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--cmake", default="cmake")
    options = parser.parse_args()
    for architecture in options.architecture:
        folder = options.build / architecture
        build(architecture, folder, options.cmake)
        for cpu in ARCHITECTURES[architecture][3]:
            test(f"{architecture}, {cpu}", folder, cpu, options.cmake)


def build(architecture: str, folder: Path, cmake: str) -> None:
    """Compile every level of an architecture, and its tests."""
    compiler, emulator, libraries, _ = ARCHITECTURES[architecture]
    for program in (compiler, emulator):
        if shutil.which(program) is None:
            sys.exit(f"{program} is not on PATH")
    settings = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": architecture,
        "CMAKE_CXX_COMPILER": compiler,
        "CMAKE_CROSSCOMPILING_EMULATOR": f"{emulator};-L;{libraries}",
    }
    definitions = [f"-D{name}={value}" for name, value in settings.items()]
    subprocess.run([cmake, "-S", KERNELS, "-B", folder, "-G", "Ninja", *definitions], check=True, stdout=sys.stderr)
    subprocess.run([cmake, "--build", folder, "--parallel", "2"], check=True, stdout=sys.stderr)


def test(name: str, folder: Path, cpu: str, cmake: str) -> None:
    """Run the tests on a model of a CPU, and print what was tried."""
    ctest = str(Path(cmake).with_name("ctest")) if os.sep in cmake else "ctest"
    done = subprocess.run(
        [ctest, "--test-dir", folder, "--no-tests=error", "--verbose", "--timeout", "3600"],
        env={**os.environ, "QEMU_CPU": cpu},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\n{name}: the kernels are wrong there")
    runs: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for work, level, count in re.findall(r"(\w+) at (\w+): (\d+) runs", done.stdout):
        runs[level][work] += int(count)
    if not runs:
        sys.exit(f"{done.stdout}\n{name}: no test says what it ran")
    held = sum(int(count) for count in re.findall(r"(\d+) of \d+ checks hold", done.stdout))
    for level, by_work in runs.items():
        missing = kinds_of_work() - by_work.keys()
        if missing:
            sys.exit(f"{name}: no native test runs {', '.join(sorted(missing))} at {level}")
        print(f"{name}, {level}: {len(by_work)} kinds of work in {by_work.total()} runs")
    print(f"{name}: {held} checks hold", flush=True)


def kinds_of_work() -> set[str]:
    """What the CPU's sources compute."""
    sources = "".join(file.read_text(encoding="utf-8") for file in KERNELS.glob("cpu/*.cpp"))
    return set(re.findall(r"^(?:void compute\(const (?=\w+&)|const (?=\w+& loops\(\)))(\w+)", sources, re.MULTILINE))


if __name__ == "__main__":
    main()
