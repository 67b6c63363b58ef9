"""The report of `make gpu-check`: which kernel sources it measured, and its text in Markdown."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"


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


def markdown(report: dict[str, Any]) -> str:
    """The report for people."""
    facts = report["environment"]
    lines = [f"# CUDA kernels on {facts['gpu']}, {report['date'][:10]}", ""]
    lines += [", ".join(f"{name} {value}" for name, value in facts.items()), ""]
    lines += ["| step | status | seconds | last line |", "|---|---|---|---|"]
    for name, step in report["steps"].items():
        last = step["tail"][-1].strip().replace("|", "/") if step["tail"] else ""
        lines.append(f"| {name} | {'passed' if step['status'] == 0 else step['status']} | {step['seconds']} | {last} |")
    for part, result in report["conformance"].items():
        if result is not None:
            counts = ", ".join(f"{count} {verdict}" for verdict, count in result["counts"].items())
            lines += ["", f"Conformance, {part}: {counts}."]
            lines += [f"- {failure['case']}: {failure['verdict']}" for failure in result["failures"]]
    measured = report["benchmarks"]
    if measured:
        lines += ["", f"Copy: {measured['copy_gigabytes_per_second']:.0f} GB/s. Medians; ours: how many times as fast."]
        lines += ["", "| case | implementation | ms | GB/s | of copy | ours |", "|---|---|---|---|---|---|"]
        for row in measured["rows"]:
            lines.append(
                f"| {row['case']} | {row['implementation']} | {row['milliseconds']:.4f} | "
                f"{shown(row['gigabytes_per_second'], '.0f')} | {shown(row['times_copy'], '.2f')} | "
                f"{shown(row['speed_of_ours'], '.2f')} |"
            )
        lines += [f"\n{name}: {error}" for name, error in measured["errors"].items()]
        if not measured["complete"]:
            lines += ["", "The time was over before all cases were measured."]
    return "\n".join(lines) + "\n"


def conformance_result(found: dict[str, Any] | None) -> dict[str, Any] | None:
    """What a report of `sdk conformance` says in short, with each failure in full."""
    if found is None:
        return None
    failures = [
        {"case": outcome["item"]["id"], "verdict": outcome["verdict"], **outcome["failure"]}
        for outcome in found["outcomes"]
        if outcome["failure"] and outcome["verdict"] != "expected failure"
    ]
    return {"counts": found["counts"], "seconds": found["seconds"], "failures": failures}


def shown(number: float | None, form: str) -> str:
    """A number, or a dash for none."""
    return "-" if number is None else format(number, form)
