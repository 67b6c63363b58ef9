"""The steps of `make gpu-check`, each a process with a share of the time, and the run of all."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_check.report import RESULTS, ROOT, conformance_result, markdown, source_digests

WORK = ROOT / "build" / "gpu-check"
NATIVE_TESTS, DEEPSPEED_OPS = "test_cuda", "deepspeed_ops"
PROJECTS = (ROOT, ROOT / "plugins" / "cpu", ROOT / "plugins" / "cuda")
SECONDS = 520  # of the whole run
RESERVE = 80  # of these, kept for the benchmarks and what looks at the device's memory
GRACE = 5  # for a command to write down what it knows, once its time is over


# ---- steps -------------------------------------------------------------------------------------------------------
class Run:
    """The steps of a run, each a process with what is left of the time.

    Attributes:
        into: the folder of the report.
        wheels: what was carried along: wheels, and perhaps `NATIVE_TESTS` and `DEEPSPEED_OPS`, compiled elsewhere.
    """

    def __init__(self, into: Path, wheels: Path, seconds: float = SECONDS) -> None:
        self.into, self.wheels, self.seconds = into, wheels, seconds
        self.start = time.monotonic()
        self.date = datetime.datetime.now(datetime.timezone.utc)
        self.steps: dict[str, dict[str, Any]] = {}
        # Parts of conformance, and their arguments of `sdk conformance`.
        self.parts: dict[str, tuple[str, ...]] = {name: ("--level", name) for name in ("training", "features")}
        self.writing = threading.Lock()
        # A shell has its background jobs ignore SIGINT, and their children too unless these handle it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ours = map(str, (WORK / "site", ROOT / "sdk", ROOT / "tools", *PROJECTS[1:]))
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*ours, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "DS_PLUGIN_CACHE_DIR": str(WORK / "cache"),
            "DS_PLUGIN_FALLBACK": "0",
            "TORCHINDUCTOR_CACHE_DIR": str(WORK / "inductor"),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "4",  # several steps at once
        }
        if archs := os.environ.get("TORCH_CUDA_ARCH_LIST"):
            self.environment["TORCH_CUDA_ARCH_LIST"] = re.sub(r"(?<=\d)a\b", "", archs)  # DeepSpeed cannot read 9.0a

    def left(self, reserve: float = 0) -> float:
        return self.seconds - reserve - (time.monotonic() - self.start)

    def step(self, name: str, command: Sequence[str | Path], *, limit: float, **environment: str) -> bool:
        """Run a command, and note how it went: what it printed last, to its end or to the limit. Then it and all that
        it has started are ended. Without time for it, it is not begun.

        Returns:
            Whether it succeeded.
        """
        begin = time.monotonic()
        if limit <= 0:
            self.note(name, 124, begin, ["not begun: no time was left for it"])
            return False
        print(f"=== {name} ({self.left():.0f} s left): {' '.join(map(str, command))[:200]}", flush=True)
        log = self.log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            try:
                process = subprocess.Popen(
                    list(map(str, command)),
                    cwd=ROOT,
                    env={**self.environment, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # what it starts can be ended with it
                )
            except OSError as error:
                self.note(name, 127, begin, [str(error)])
                return False
        status = _end_of(process, min(limit, self.left()))
        lines = log.read_text(errors="replace").replace(f"{ROOT}/", "").splitlines()
        self.note(name, status, begin, lines[-25 if status == 0 else -150 :])
        return status == 0

    @staticmethod
    def log(name: str) -> Path:
        """The file with what a step prints."""
        return WORK / "logs" / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.log"

    def note(self, name: str, status: int, begin: float, tail: list[str]) -> None:
        """Put a step into the report."""
        seconds = round(time.monotonic() - begin, 1)
        self.steps[name] = {"status": status, "seconds": seconds, "tail": tail}
        print("\n".join([f"--- {name}: status {status} after {seconds} s", *tail[-25:]]), flush=True)

    def python(self, name: str, *arguments: str | Path, limit: float) -> bool:
        return self.step(name, (sys.executable, *arguments), limit=limit)


def _end_of(process: subprocess.Popen[bytes], limit: float) -> int:
    """The status of a process, 124 if it had to be interrupted; its whole group is ended."""
    try:
        status = process.wait(max(1.0, limit))
    except subprocess.TimeoutExpired:
        status = 124
        process.send_signal(signal.SIGINT)  # so that it can write down what it knows
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return status


def install(run: Run) -> None:
    """Make the site folder: the entry points of our own projects beside their sources, and the carried wheels."""
    site = WORK / "site"
    for folder in (site, WORK / "cache"):
        shutil.rmtree(folder, ignore_errors=True)
    site.mkdir(parents=True)
    for results in WORK.glob("*.json"):  # of an earlier run
        results.unlink()
    for project in PROJECTS:
        write_entry_points(site, (project / "pyproject.toml").read_text(encoding="utf-8"))
    for wheel in sorted(run.wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


CHOICE = """
import deepspeed
from deepspeed.accelerator import get_accelerator
accelerator = type(get_accelerator())
print(f"DeepSpeed {deepspeed.__version__} uses {accelerator.__module__}.{accelerator.__qualname__}")
raise SystemExit(not accelerator.__module__.startswith("ds_plugin_cuda."))
"""


def choice(run: Run) -> None:
    """What the probes say, and what DeepSpeed uses."""
    run.python("sdk list", "-m", "ds_plugin_sdk.cli", "list", "--explain", limit=60)
    run.python("DeepSpeed's choice", "-c", CHOICE, limit=90)


def write_entry_points(site: Path, pyproject: str) -> None:
    """What installing a project would leave for those who look for its entry points."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    project = tomllib.loads(pyproject)["project"]
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    folder = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in points.items())
        for group, points in groups.items()
        if points
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines))


BUILD = """
import time
from concurrent.futures import ThreadPoolExecutor
from ds_plugin_sdk import op_builder, prebuild
from ds_plugin_sdk.op_builder import CUDAOpBuilder
classes = op_builder.builders("ds_plugin_cuda.op_builder", "cuda").values()
builders = prebuild.distinct(cls() for cls in classes if issubclass(cls, CUDAOpBuilder))
start = time.perf_counter()
def build(builder):
    try:
        made = prebuild.build(builder, None)
        print(f"{builder.build_spec().name}: {made.seconds:.1f} s, {made.origin}", flush=True)
    except Exception as error:
        print(f"{builder.build_spec().name}: {error}", flush=True)
        return 1
    return 0
with ThreadPoolExecutor() as pool:
    failed = sum(pool.map(build, builders))
print(f"{len(builders) - failed} of {len(builders)} families: {time.perf_counter() - start:.1f} s")
raise SystemExit(failed)
"""


def build(run: Run) -> None:
    """Compile every family again, in parallel."""
    run.python("build", "-c", BUILD, limit=min(200, run.left(RESERVE)))


def has_binaries(run: Run) -> bool:
    """Whether the plugin came as a wheel, which has all that would be compiled."""
    return any(run.wheels.glob("ds_plugin_cuda-*.whl"))


NATIVE = """
import subprocess, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
nvcc, binary, *command = sys.argv[1:]
options = [word for word in command if not word.endswith((".cu", ".cpp"))]
sources = [Path(word) for word in command if word.endswith((".cu", ".cpp"))]
objects = [Path(binary).with_suffix(f".{source.name}.o") for source in sources]
def compile(source, to):
    subprocess.run([nvcc, *options, "-x", "cu", "-c", source, "-o", to], check=True)
with ThreadPoolExecutor() as pool:
    list(pool.map(compile, sources, objects))
subprocess.run([nvcc, *options, *objects, "-o", binary], check=True)
"""


def building_of_native_tests(nvcc: str, arch: str, binary: Path) -> tuple[str | Path, ...]:
    """Arguments for Python, to compile the launchers' tests, which need no torch."""
    sources = [ROOT / "kernels" / "tests" / "test_cuda.cpp", *sorted((ROOT / "kernels" / "cuda").glob("*.cu"))]
    options = ("-std=c++17", "-O2", "-lineinfo", f"-arch={arch}", f"-I{ROOT / 'kernels' / 'include'}")
    return ("-c", NATIVE, nvcc, binary, *options, *sources)


def native_tests(run: Run, nvcc: str, arch: str) -> None:
    """The launchers' tests, then the same under NVIDIA's sanitizer."""
    binary = WORK / NATIVE_TESTS
    if (carried := run.wheels / NATIVE_TESTS).exists():
        shutil.copy2(carried, binary)
    else:
        command = building_of_native_tests(nvcc, arch, binary)
        if not run.python("native tests: build", *command, limit=min(150, run.left(RESERVE))):
            return
    run.step("native tests", (binary,), limit=min(40, run.left(RESERVE)))
    for tool in ("memcheck", "racecheck"):
        command = (sanitizer(nvcc), "--tool", tool, "--error-exitcode", "1", binary, "exact")
        run.step(f"native tests: {tool}", command, limit=min(110, run.left(RESERVE)))


def sanitizer(nvcc: str) -> str:
    """compute-sanitizer on PATH or in a toolkit: nvcc's, where that is no script outside of its toolkit."""
    homes = (str(Path(nvcc).resolve().parents[1]), os.environ.get("CUDA_HOME", ""), "/usr/local/cuda")
    places = [f"{home}/{folder}/compute-sanitizer" for home in homes for folder in ("bin", "compute-sanitizer")]
    return next(filter(None, map(shutil.which, ("compute-sanitizer", *places))), "compute-sanitizer")


def deepspeed_ops(run: Run) -> None:
    """DeepSpeed's own CUDA ops, built by DeepSpeed without this plugin: a minute or two, while others have the GPU."""
    folder = WORK / DEEPSPEED_OPS
    if (carried := run.wheels / DEEPSPEED_OPS).exists():
        shutil.copytree(carried, folder, dirs_exist_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    command = ("nice", "-n", "10", sys.executable, "-m", "gpu_check.deepspeed_cuda_ops", folder)
    alone = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TORCH_EXTENSIONS_DIR": str(folder)}
    run.step("DeepSpeed's own ops", command, limit=min(170, run.left(RESERVE)), **alone)


# The cases of ops are dealt to so many processes: front ends start one each, with a CUDA context of its own.
SHARES = 8
# What looks at the device's memory as a whole has it to itself.
ALONE = "runtime.memory."
MEMORY = "runtime, memory"


def share_out(run: Run) -> None:
    """Decide which cases of ops and of the runtime run together."""
    levels = ("--level", "ops", "--level", "runtime")
    command = (sys.executable, "-m", "ds_plugin_sdk.cli", "conformance", "cuda", *levels, "--list")
    run.step("cases", command, limit=60, COLUMNS="400")
    listed = re.findall(r"^ ((?:ops|runtime)\.\S+)", run.log("cases").read_text(errors="replace"), re.MULTILINE)
    if not listed:  # without -k each share would be the whole suite
        raise RuntimeError(
            "`sdk conformance cuda --list` named no case, so none of ops and runtime is run; see its log"
        )
    of_ops = [case for case in listed if case.startswith("ops.")]
    of_runtime = [case for case in listed if case.startswith("runtime.")]
    for share in range(SHARES):
        run.parts[f"ops, share {share + 1}"] = only(of_ops[share::SHARES])
    run.parts["runtime"] = only([case for case in of_runtime if not case.startswith(ALONE)])
    run.parts[MEMORY] = only([case for case in of_runtime if case.startswith(ALONE)])


def only(cases: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for case in cases for word in ("-k", case))


def conformance(run: Run, part: str) -> None:
    """A part of the contract, as `sdk conformance` checks it."""
    arguments = ("-m", "ds_plugin_sdk.cli", "conformance", "cuda", *run.parts[part], "--json", conformance_file(part))
    run.python(f"conformance: {part}", *arguments, limit=min(200, run.left(RESERVE)))


def conformance_file(part: str) -> Path:
    return WORK / f"conformance-{part.replace(', ', '-').replace(' ', '-')}.json"


def benchmarks(run: Run) -> None:
    """`gpu_check.cuda_ops`, with what is left of the time; again, if a kernel has broken its process."""
    own = WORK / DEEPSPEED_OPS
    for name in ("benchmarks", "benchmarks, second process", "benchmarks, third process"):
        options = ("--json", WORK / "cuda_ops.json", "--seconds", str(run.left() - 40), "--deepspeed-ops", own)
        if run.python(name, "-m", "gpu_check.cuda_ops", *options, limit=run.left() - 10):
            return


# ---- the report --------------------------------------------------------------------------------------------------
def environment_of(run: Run) -> dict[str, Any]:
    """GPU and versions.

    Raises:
        SystemExit: there is no GPU that torch can use, or no nvcc; the message says which.
    """
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(f"make gpu-check needs a GPU: torch {torch.__version__} sees none here")
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")
    if nvcc is None:
        raise SystemExit("make gpu-check needs nvcc, on PATH or in CUDA_HOME")
    release = re.search(r"release ([\d.]+)", _output(nvcc, "--version"))
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "arch": f"sm_{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        "torch": torch.__version__,
        "nvcc": release[1] if release else "unknown",
        "nvcc_path": nvcc,
        "python": platform.python_version(),
        "deepspeed": deepspeed_version(run.wheels),
    }


def _output(*command: str) -> str:
    """What a program prints; nothing if it cannot be run."""
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def deepspeed_version(wheels: Path) -> str | None:
    """The release that is installed or carried along."""
    import importlib.metadata

    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return next((path.name.split("-")[1] for path in wheels.glob("deepspeed-*.whl")), None)


def write_report(run: Run, environment: dict[str, Any]) -> Path:
    """Write the report, as JSON and as Markdown."""
    with run.writing:
        return _write_report(run, environment)


def _write_report(run: Run, environment: dict[str, Any]) -> Path:
    report = {
        "date": run.date.isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - run.start, 1),
        "environment": {name: value for name, value in environment.items() if name != "nvcc_path"},
        "sources": source_digests(),
        "steps": dict(run.steps),
        "conformance": {part: conformance_result(_json(conformance_file(part))) for part in run.parts},
        "benchmarks": _json(WORK / "cuda_ops.json"),
    }
    slug = re.sub(r"[^a-z0-9]+", "-", environment["gpu"].lower()).strip("-")
    path = run.into / f"cuda-{slug}-{report['date'][:10]}.json"
    run.into.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
    return path


def _json(path: Path) -> Any:
    """What a file has; None if it is not there, or was not written to its end."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None


Steps = Mapping[str, Callable[[], object]]


def do(run: Run, environment: dict[str, Any], steps: Steps) -> None:
    """Some steps, one after the other. The report is written after each: whatever ends the run, it says how far it
    came.
    """
    for name, step in steps.items():
        begin = time.monotonic()
        try:
            step()
        except Exception:
            run.note(f"{name}: broke", 1, begin, traceback.format_exc().splitlines()[-25:])
        write_report(run, environment)


def deepspeed_runs(run: Run) -> None:
    """Short runs of DeepSpeed with the plugin and on DeepSpeed's own accelerator, whose losses are compared."""
    files = [WORK / f"runs-{whose}.json" for whose in ("plugin", "own")]
    own = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    program = ("-m", "gpu_check.deepspeed_runs")
    with ThreadPoolExecutor(2) as pool:
        commands = [(sys.executable, *program, path) for path in files]
        limit = min(180, run.left(RESERVE))
        ours = pool.submit(run.step, "DeepSpeed runs: plugin", commands[0], limit=limit)
        pool.submit(run.step, "DeepSpeed runs: DeepSpeed's own", commands[1], limit=limit, **own).result()
        ours.result()
    run.python("DeepSpeed runs", *program, "--compare", *files, limit=min(60, run.left(RESERVE)))


def warm_up(run: Run) -> None:
    """Let torch compile what the benchmarks compare with, while others have the GPU."""
    options = ("--turns", "1", "--only-compile")
    run.python("compiling by torch", "-m", "gpu_check.cuda_ops", *options, limit=min(180, run.left(RESERVE)))


def check(run: Run, environment: dict[str, Any]) -> Path:
    """All steps. Those that need correct results alone run side by side; then those that look at the device's memory
    and clocks, each with the machine to itself.
    """
    compiled = {} if has_binaries(run) else {"build": lambda: build(run)}
    do(run, environment, {"install": lambda: install(run), **compiled, "cases": lambda: share_out(run)})
    native = environment["nvcc_path"], environment["arch"]
    side_by_side = [part for part in run.parts if part.startswith("ops") or part == "runtime"]
    lanes: list[Steps] = [
        *({f"conformance, {part}": lambda part=part: conformance(run, part)} for part in side_by_side),
        {"native tests": lambda: native_tests(run, *native)},
        {"compiling by torch": lambda: warm_up(run)},
    ]
    if environment["deepspeed"]:
        lanes += [
            {"choice": lambda: choice(run), "training": lambda: conformance(run, "training")},
            {"conformance, features": lambda: conformance(run, "features")},
            {"DeepSpeed runs": lambda: deepspeed_runs(run)},
            {"DeepSpeed's own ops": lambda: deepspeed_ops(run)},
        ]
    with ThreadPoolExecutor(len(lanes)) as pool:
        list(pool.map(lambda steps: do(run, environment, steps), lanes))
    do(
        run,
        environment,
        {
            **({"conformance, runtime": lambda: conformance(run, MEMORY)} if MEMORY in run.parts else {}),
            "benchmarks": lambda: benchmarks(run),
        },
    )
    return write_report(run, environment)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu_check", description="Everything that needs a GPU, in one go.")
    parser.add_argument("--into", type=Path, default=RESULTS)
    parser.add_argument("--wheels", type=Path, default=ROOT / "build" / "gpu-wheels")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the whole run (%(default)s)")
    arguments = parser.parse_args()
    run = Run(arguments.into, arguments.wheels, arguments.seconds)
    environment = environment_of(run)
    print(", ".join(f"{name} {value}" for name, value in environment.items()), flush=True)
    path = check(run, environment)
    failed = [name for name, step in run.steps.items() if step["status"]]
    print(
        f"\nmake gpu-check: {path} after {time.monotonic() - run.start:.0f} s; failed: {', '.join(failed) or 'nothing'}"
    )
    return 1 if failed else 0
