"""`make gpu-check`: everything that needs a GPU, in one go: builds, native tests, conformance, benchmarks, a report.

    python benchmarks/gpu_check.py [--into benchmarks/results] [--wheels build/gpu-wheels]

It needs torch with CUDA, nvcc and a GPU, downloads nothing, and ends within nine minutes. What Python packages are
missing on the machine it takes from a folder of wheels, which `make gpu-wheels` fills on a machine with a network. A
step that fails does not stop the others. The report is ``<into>/cuda-<GPU>-<date>.json``, with a digest of the kernel
sources that were measured, and the same in Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "gpu-check"
PROJECTS = (ROOT, ROOT / "plugins" / "cpu", ROOT / "plugins" / "cuda")
SECONDS = 520  # of the whole run
RESERVE = 150  # of these, kept for the benchmarks


# ---- what was measured -------------------------------------------------------------------------------------------
def kernel_sources() -> list[Path]:
    """The files that the CUDA kernels are made of."""
    folders = (ROOT / "kernels" / "cuda", ROOT / "kernels" / "include")
    return sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())


def source_digests() -> dict[str, str]:
    """SHA-256 of each kernel source, by its path in the tree."""
    return {str(p.relative_to(ROOT)): hashlib.sha256(p.read_bytes()).hexdigest()[:16] for p in kernel_sources()}


def changed_since(report: dict[str, Any], digests: dict[str, str]) -> list[str]:
    """The sources that differ from those that a report measured, and those that came or went."""
    then = report["sources"]
    return sorted(path for path in {*then, *digests} if then.get(path) != digests.get(path))


def newest_report(folder: Path) -> Path | None:
    """The newest report of a folder."""
    reports = sorted(folder.glob("cuda-*.json"), key=lambda path: json.loads(path.read_text())["date"])
    return reports[-1] if reports else None


# ---- steps -------------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Running:
    """A command that was started; no process if it could not be."""

    name: str
    process: subprocess.Popen[bytes] | None
    log: Path
    begin: float


class Run:
    """The steps of a run, each a process with what is left of the time."""

    def __init__(self, into: Path, wheels: Path) -> None:
        self.into, self.wheels = into, wheels
        self.start = time.monotonic()
        self.steps: dict[str, dict[str, Any]] = {}
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (WORK / "site", ROOT / "sdk", *PROJECTS[1:]))),
            "DS_PLUGIN_CACHE_DIR": str(WORK / "cache"),
            "DS_PLUGIN_FALLBACK": "0",
            "TORCHINDUCTOR_CACHE_DIR": str(WORK / "inductor"),
            "PYTHONUNBUFFERED": "1",
        }

    def left(self) -> float:
        return SECONDS - (time.monotonic() - self.start)

    def step(self, name: str, command: Sequence[str | Path], *, limit: float) -> bool:
        """Run a command and note how it went; whether it succeeded."""
        return self.finish(self.begin(name, command), limit=limit)

    def begin(self, name: str, command: Sequence[str | Path], **environment: str) -> Running:
        """Start a command whose output goes to a file; `finish` notes how it went."""
        print(f"\n=== {name} ({self.left():.0f} s left): {' '.join(map(str, command))[:200]}", flush=True)
        log = WORK / "logs" / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        process = None
        with log.open("wb") as output:
            try:
                # In a session of its own: what it starts can be ended with it.
                process = subprocess.Popen(
                    list(map(str, command)),
                    cwd=ROOT,
                    env={**self.environment, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                output.write(str(error).encode())
        return Running(name, process, log, time.monotonic())

    def finish(self, running: Running, *, limit: float) -> bool:
        """Wait for a command, end it and all it started at the limit, and note how it went; whether it succeeded."""
        status = 127
        if running.process is not None:
            try:
                status = running.process.wait(max(1.0, min(limit, self.left())))
            except subprocess.TimeoutExpired:
                status = 124
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL)
            running.process.wait()
        tail = running.log.read_text(errors="replace").splitlines()[-25:]
        print("\n".join(tail), flush=True)
        self.note(running.name, status, running.begin, tail)
        return status == 0

    def note(self, name: str, status: int, begin: float, tail: list[str]) -> None:
        """Put a step into the report."""
        self.steps[name] = {"status": status, "seconds": round(time.monotonic() - begin, 1), "tail": tail}

    def python(self, name: str, *arguments: str | Path, limit: float) -> bool:
        return self.step(name, (sys.executable, *arguments), limit=limit)


def install(run: Run) -> None:
    """Make the site folder: the carried wheels, and the entry points of our own projects beside their sources."""
    site = WORK / "site"
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    wheels = sorted(run.wheels.glob("*.whl"))
    if wheels:
        options = ("--quiet", "--no-index", "--no-deps", "--no-compile", "--target", site)
        run.python("install", "-m", "pip", "install", *options, *wheels, limit=60)
    for project in PROJECTS:
        write_entry_points(site, (project / "pyproject.toml").read_text(encoding="utf-8"))


def write_entry_points(site: Path, pyproject: str) -> None:
    """What installing a project would leave for those who look for its entry points."""
    import tomllib

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
import json, time
from concurrent.futures import ThreadPoolExecutor
from ds_plugin_sdk import op_builder, prebuild
from ds_plugin_sdk.op_builder import CUDAOpBuilder
classes = op_builder.builders("ds_plugin_cuda.op_builder", "cuda").values()
builders = prebuild.distinct(cls() for cls in classes if issubclass(cls, CUDAOpBuilder))
start = time.perf_counter()
with ThreadPoolExecutor() as pool:
    for builder, made in zip(builders, pool.map(lambda builder: prebuild.build(builder, None), builders)):
        print(f"{builder.build_spec().name}: {made.seconds:.1f} s, {made.origin}", flush=True)
print(f"all {len(builders)} families: {time.perf_counter() - start:.1f} s")
"""


def build(run: Run) -> None:
    """Compile every family anew, in parallel."""
    shutil.rmtree(WORK / "cache", ignore_errors=True)
    run.python("build", "-c", BUILD, limit=200)


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


def native_tests(run: Run, nvcc: str, arch: str) -> None:
    """The launchers without torch, then under NVIDIA's sanitizer."""
    binary = WORK / "test_cuda"
    sources = [ROOT / "kernels" / "tests" / "test_cuda.cpp", *sorted((ROOT / "kernels" / "cuda").glob("*.cu"))]
    options = ("-std=c++17", "-O2", "-lineinfo", f"-arch={arch}", f"-I{ROOT / 'kernels' / 'include'}")
    if not run.python("native tests: build", "-c", NATIVE, nvcc, binary, *options, *sources, limit=150):
        return
    run.step("native tests", (binary,), limit=60)
    sanitizer = shutil.which("compute-sanitizer") or str(Path(nvcc).resolve().parents[1] / "bin" / "compute-sanitizer")
    for tool in ("memcheck", "racecheck"):
        command = (sanitizer, "--tool", tool, "--error-exitcode", "1", binary)
        run.step(f"native tests: {tool}", command, limit=min(60, run.left() - RESERVE))


def begin_deepspeed_ops(run: Run) -> Running:
    """Start building DeepSpeed's own CUDA ops by DeepSpeed, without this plugin; it takes a minute or two."""
    folder = WORK / "deepspeed_ops"
    folder.mkdir(parents=True, exist_ok=True)
    command = (sys.executable, ROOT / "benchmarks" / "deepspeed_cuda_ops.py", folder)
    return run.begin(
        "DeepSpeed's own ops", command, TORCH_DEVICE_BACKEND_AUTOLOAD="0", TORCH_EXTENSIONS_DIR=str(folder)
    )


def conformance(run: Run, deepspeed: bool) -> None:
    """The levels of the contract, as `sdk conformance` runs them."""
    for level in ("runtime", "ops", *(("training",) if deepspeed else ())):
        out = WORK / f"conformance-{level}.json"
        out.unlink(missing_ok=True)
        arguments = ("-m", "ds_plugin_sdk.cli", "conformance", "cuda", "--level", level, "--json", out)
        run.python(f"conformance: {level}", *arguments, limit=min(150, run.left() - RESERVE))


def benchmarks(run: Run) -> None:
    """`benchmarks/cuda_ops.py`, with what is left of the time."""
    out = WORK / "cuda_ops.json"
    out.unlink(missing_ok=True)
    seconds = max(20.0, run.left() - 60)
    program = ROOT / "benchmarks" / "cuda_ops.py"
    options = ("--json", out, "--seconds", str(seconds), "--deepspeed-ops", WORK / "deepspeed_ops")
    run.python("benchmarks", program, *options, limit=run.left() - 10)


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
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def deepspeed_version(wheels: Path) -> str | None:
    """The release that is installed or carried along."""
    import importlib.metadata

    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return next((path.name.split("-")[1] for path in wheels.glob("deepspeed-*.whl")), None)


def write_report(run: Run, environment: dict[str, Any]) -> Path:
    """Write the report, as JSON and as Markdown."""
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - run.start, 1),
        "environment": {name: value for name, value in environment.items() if name != "nvcc_path"},
        "sources": source_digests(),
        "steps": run.steps,
        "benchmarks": _json(WORK / "cuda_ops.json"),
    }
    slug = re.sub(r"[^a-z0-9]+", "-", environment["gpu"].lower()).strip("-")
    path = run.into / f"cuda-{slug}-{report['date'][:10]}.json"
    run.into.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
    return path


def markdown(report: dict[str, Any]) -> str:
    """The report for people."""
    facts = report["environment"]
    lines = [f"# CUDA kernels on {facts['gpu']}, {report['date'][:10]}", ""]
    lines += [", ".join(f"{name} {value}" for name, value in facts.items()), ""]
    lines += ["| step | status | seconds | last line |", "|---|---|---|---|"]
    for name, step in report["steps"].items():
        last = step["tail"][-1].strip() if step["tail"] else ""
        lines.append(f"| {name} | {'passed' if step['status'] == 0 else step['status']} | {step['seconds']} | {last} |")
    measured = report["benchmarks"]
    if measured:
        lines += [
            "",
            f"Copy: {measured['copy_gigabytes_per_second']:.0f} GB/s. Medians; ours is how many times as fast.",
            "",
        ]
        lines += ["| case | implementation | ms | GB/s | of copy | ours |", "|---|---|---|---|---|---|"]
        for row in measured["rows"]:
            lines.append(
                f"| {row['case']} | {row['implementation']} | {row['milliseconds']:.4f} | "
                f"{row['gigabytes_per_second']:.0f} | {row['times_copy']:.2f} | {row['speed_of_ours']:.2f} |"
            )
        lines += [f"\n{name}: {error}" for name, error in measured["errors"].items()]
    return "\n".join(lines) + "\n"


def _json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def check(run: Run, environment: dict[str, Any]) -> Path:
    """All steps, and the report, which is written anew after each: whatever ends the run, it says how far it came."""
    deepspeed = environment["deepspeed"] is not None
    begun: list[Running] = []
    steps: dict[str, Callable[[], object]] = {
        "install": lambda: install(run),
        "build": lambda: build(run),
        "begin DeepSpeed's own ops": lambda: begun.append(begin_deepspeed_ops(run)) if deepspeed else None,
        "native tests": lambda: native_tests(run, environment["nvcc_path"], environment["arch"]),
        "conformance": lambda: conformance(run, deepspeed),
        "DeepSpeed's own ops": lambda: [run.finish(running, limit=min(60, run.left() - 100)) for running in begun],
        "benchmarks": lambda: benchmarks(run),
    }
    for name, step in steps.items():
        begin = time.monotonic()
        try:
            step()
        except Exception:
            run.note(f"{name}: broke", 1, begin, traceback.format_exc().splitlines()[-25:])
        path = write_report(run, environment)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build" / "gpu-wheels")
    arguments = parser.parse_args()
    run = Run(arguments.into, arguments.wheels)
    environment = environment_of(run)
    print(", ".join(f"{name} {value}" for name, value in environment.items()), flush=True)
    path = check(run, environment)
    failed = [name for name, step in run.steps.items() if step["status"]]
    print(
        f"\nmake gpu-check: {path} after {time.monotonic() - run.start:.0f} s; failed: {', '.join(failed) or 'nothing'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
