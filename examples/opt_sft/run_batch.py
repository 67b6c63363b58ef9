"""Run a training script over every hostfile of a folder, and judge each batch of nodes by its throughput.

    python examples/opt_sft/run_batch.py examples/opt_sft/hostfiles out/batches --threshold 10 --timeout 120 \\
        -- examples/opt_sft/train.py --config examples/opt_sft/zero3.json --steps 20

What stands after ``--`` goes to `deepspeed` behind the hostfile. The script prints ``throughput: N samples/s``. A batch
that fails, or does not end in time, is named with the reason, and the others go on. In the folder of results: a log of
each batch, results.csv and results.png. The exit status is 1 unless all batches pass.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from matplotlib.figure import Figure

THROUGHPUT = re.compile(r"throughput: ([\d.]+) samples/s")
ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?(?:\w+\.)*\w*(?:Error|Exception)\b.*")
COLOURS = {"passed": "#4c9f70", "slow": "#e0a030", "failed": "#c2452d", "hung": "#7d3c98"}
GRACE = 30  # seconds in which DeepSpeed's launcher ends the ranks, also those on other nodes


@dataclass(frozen=True)
class Result:
    """What came of a batch: its verdict (a key of `COLOURS`), samples a second, seconds, and why it is not more."""

    batch: str
    verdict: str
    throughput: float | None
    seconds: float
    why: str = ""


def main() -> int:
    args = parse_arguments()
    hostfiles = sorted(file for file in args.hostfiles.iterdir() if file.is_file())
    args.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(run, file, args.master_port + at, args) for at, file in enumerate(hostfiles)]
        results = [job.result() for job in jobs]
    write(results, args)
    return 0 if all(result.verdict == "passed" for result in results) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hostfiles", type=Path, help="folder of hostfiles, one for each batch of nodes")
    parser.add_argument("out", type=Path, help="folder for logs and results")
    parser.add_argument("--threshold", type=float, required=True, help="samples a second with which a batch passes")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each batch (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="batches at once (%(default)s)")
    parser.add_argument(
        "--master-port", type=int, default=29600, help="of the first batch; others count up (%(default)s)"
    )
    parser.add_argument("--launcher", default="", help="more arguments of `deepspeed`, as one word")
    parser.add_argument("script", nargs="+", help="the training script and its arguments, after --")
    return parser.parse_args()


def run(hostfile: Path, port: int, args: argparse.Namespace) -> Result:
    """One batch, bounded in time."""
    log = args.out / f"{hostfile.name}.log"
    command = ["deepspeed", "--hostfile", str(hostfile), "--master_port", str(port), *shlex.split(args.launcher)]
    command += [*args.script, "--out", str(args.out / hostfile.name)]
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        # A session of its own: what the launcher starts can be ended with it.
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(args.timeout)
            said = log.read_text(encoding="utf-8")  # now: the launcher will have something to say of being ended
            status = process.poll()
        finally:
            end(process)
    result = judge(hostfile.name, status, said, time.monotonic() - started, args)
    print(f"{result.batch}: {result.verdict} after {result.seconds:.0f} s   {result.why}", flush=True)
    return result


def end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher and what it started here: asked to first, so that it can tell other nodes, too."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE
        try:
            os.killpg(process.pid, sent)
            while time.monotonic() < deadline:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.1)
        except ProcessLookupError:
            return


def judge(batch: str, status: int | None, log: str, seconds: float, args: argparse.Namespace) -> Result:
    """The verdict on a batch whose launcher gave `status`; None if it did not end in time."""
    found = THROUGHPUT.findall(log)
    throughput = float(found[-1]) if found else None
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["it printed nothing"]
    errors = [line for line in lines if ERROR.match(line)]
    if status is None:
        why = f"no end in {args.timeout:.0f} s; last line: {lines[-1]}"
        return Result(batch, "hung", throughput, seconds, why)
    if status or throughput is None:
        why = errors[0] if errors else f"exit status {status}; last line: {lines[-1]}"
        return Result(batch, "failed", throughput, seconds, why)
    if throughput < args.threshold:
        return Result(batch, "slow", throughput, seconds, f"{throughput:.2f} of {args.threshold:g} samples/s")
    return Result(batch, "passed", throughput, seconds)


def write(results: list[Result], args: argparse.Namespace) -> None:
    """Print the table, and keep it and its plot."""
    with (args.out / "results.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [field.name for field in fields(Result)])
        table.writeheader()
        table.writerows(asdict(result) for result in results)
    draw(results, args.threshold, args.out / "results.png")
    width = max(len(result.batch) for result in results)
    print(f"\n{'batch':{width}}  verdict  samples/s  seconds  why")
    for one in results:
        rate = "-" if one.throughput is None else f"{one.throughput:.2f}"
        print(f"{one.batch:{width}}  {one.verdict:7}  {rate:>9}  {one.seconds:7.0f}  {one.why}")
    print(f"\n{sum(one.verdict == 'passed' for one in results)} of {len(results)} batches passed; see {args.out}/")


def draw(results: list[Result], threshold: float, file: Path) -> None:
    """Throughputs beside the threshold; a batch without one has its verdict instead."""
    figure = Figure(figsize=(8, 1.5 + 0.4 * len(results)), layout="constrained")
    axes = figure.subplots()
    names = [result.batch for result in results]
    rates = [result.throughput or 0.0 for result in results]
    axes.barh(names, rates, color=[COLOURS[result.verdict] for result in results])
    for row, result in enumerate(results):
        axes.text(rates[row], row, f" {result.verdict}", va="center")
    axes.axvline(threshold, color="gray", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set(xlabel="samples/s (dashed: the threshold)", xlim=(0, 1.25 * max([threshold, *rates])))
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    sys.exit(main())
