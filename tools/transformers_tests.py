"""transformers' own tests of its models, with every model accelerated; what fails then runs again with plain models.

    git clone --depth 1 --branch v5.24.0 https://github.com/huggingface/transformers
    pip install datasets parameterized pytest-timeout pytest-xdist timeout-decorator
    python tools/transformers_tests.py transformers [--weights int8] llama qwen3 ...

The sources are those of the clone. Families without a name: all. Exit status 1: a test fails with accelerated models
alone, or a file cannot be imported. This file is also the plugin of pytest that accelerates what tests make, as soon
as they say ``eval()`` or ``to(...)``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

WEIGHTS = "TRANSFORMERS_TESTS_WEIGHTS"  # "plain", or the argument `weights` of `accelerate`; empty: their own dtype
RESULTS = "TRANSFORMERS_TESTS_RESULTS"
# Those of processes of their own, which this plugin does not reach, and those for what a CPU has not.
LEFT_OUT = "not fsdp and not tensor_parallel and not test_tp_ and not flash_attn"
SECONDS = 300

Ends = dict[str, str]


# ---------------------------------------------------------------------- in pytest
def pytest_configure() -> None:
    if os.environ[WEIGHTS] == "plain":
        return
    import torch
    from transformers import PreTrainedModel

    from ds_plugin_sdk.integrations.transformers import accelerate

    weights: Any = os.environ[WEIGHTS] or None
    module: Any = torch.nn.Module
    seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def with_ours(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def accelerated(*args: Any, **kwargs: Any) -> Any:
            given = method(*args, **kwargs)
            model = given[0] if isinstance(given, tuple) else given
            if isinstance(model, PreTrainedModel) and model not in seen and not _is_empty(model):
                seen.add(model)
                accelerate(model, weights)
            return given

        return accelerated

    module.eval = with_ours(module.eval)
    PreTrainedModel.to = with_ours(PreTrainedModel.to)
    PreTrainedModel.from_pretrained = classmethod(with_ours(PreTrainedModel.from_pretrained.__func__))


def _is_empty(model: Any) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how a test ended. One of its subtests that fails is its failure."""
    ended = type(report) is pytest.TestReport and (report.when == "call" or report.skipped)
    if ended or report.failed:
        _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file whose tests cannot be found."""
    if report.failed:
        _note(report)


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers hand their reports to the process that began them
        with Path(os.environ[RESULTS]).open("a", encoding="utf-8") as file:
            print(json.dumps([report.nodeid, report.outcome]), file=file)


# ---------------------------------------------------------------------- around pytest
def run(checkout: Path, what: Sequence[str], weights: str, jobs: int) -> Ends:
    """How each test ends: passed, failed or skipped."""
    with tempfile.TemporaryDirectory() as folder:
        results, asked = Path(folder, "results"), Path(folder, "asked")
        results.touch()
        asked.write_text("\n".join(what), encoding="utf-8")
        path = os.pathsep.join([str(Path(__file__).parent), str(checkout / "src"), os.environ.get("PYTHONPATH", "")])
        settings = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", WEIGHTS: weights, RESULTS: str(results)}
        options = ["-q", "-p", "no:cacheprovider", "--timeout", str(SECONDS), "-n", str(jobs), "-k", LEFT_OUT]
        command = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, *options, f"@{asked}"]
        done = subprocess.run(command, cwd=checkout, env={**os.environ, **settings}, stdout=sys.stderr, check=False)
        if done.returncode not in (0, 1):
            sys.exit(f"pytest ended with status {done.returncode}: not all tests have run")
        ends: Ends = {}
        for line in results.read_text(encoding="utf-8").splitlines():
            name, end = json.loads(line)
            if ends.get(name) != "failed":
                ends[name] = end
        return ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=lambda text: Path(text).resolve())
    parser.add_argument("families", nargs="*")
    parser.add_argument("--weights", default="", choices=["int8", "int4"])
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    folder = args.checkout / "tests" / "models"
    files = [file for name in args.families or ["*"] for file in sorted(folder.glob(f"{name}/test_modeling_*.py"))]
    if not files:
        parser.error(f"{folder} has no tests of {', '.join(args.families)}")
    ends = run(args.checkout, [str(file.relative_to(args.checkout)) for file in files], args.weights, args.jobs)
    if not ends:
        parser.error("no test ran; pytest says why above")
    unread = [name for name, end in ends.items() if end == "failed" and "::" not in name]
    failed = [name for name, end in ends.items() if end == "failed" and name not in unread]
    plain = run(args.checkout, failed, "plain", args.jobs) if failed else {}
    different = [name for name in failed if plain.get(name) != "failed"]
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for name, end in ends.items():
        said = end if end != "failed" or name in different else "unread" if name in unread else "fails plain too"
        counted[Path(name.partition("::")[0]).parent.name][said] += 1
    for family, counts in sorted(counted.items()):
        print(family, ", ".join(f"{number} {end}" for end, number in sorted(counts.items())))
    print("total", ", ".join(f"{number} {end}" for end, number in sorted(sum(counted.values(), Counter()).items())))
    print("\n".join(["does not fail with plain models:", *different]) if different else "none fails for the ops")
    if unread:
        print("cannot be imported:", *unread, sep="\n")
    raise SystemExit(bool(different or unread))


if __name__ == "__main__":
    main()
