"""Every launcher that runs here, on two nodes with real ssh, Slurm and MPIs: what its ranks are, have and leave behind.

    make test-clusters                             all of them; as root, 15 minutes
    make test-clusters ARGS='--only mpich'         those whose name has this in it
    make test-clusters ARGS='--table docs/launchers.md'    also writes the page

Each launcher starts `clusters/rank.py` twice, the second time to lose a rank in the middle of its steps. A row that
says what DeepSpeed does wrong fails as soon as DeepSpeed does it right.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusters import nodes
from clusters.cases import CASES, NOT_RUN, REPOSITORY, Case
from ds_plugin_sdk import provenance

FOLDER = REPOSITORY / "build" / "clusters"
PLUGIN = "ds_plugin_cpu.accelerator"
SECONDS = 600  # for a job
# What a user has set where he starts the launcher; a shell, a list and an export option must leave it as it is.
SETTINGS = {
    "DS_ACCELERATOR": "cpu",
    "DS_PLUGINS": "cpu,cuda",
    "DS_PLUGIN_NOTE": 'two words, a $HOME, it\'s "quoted"',
    "CXXFLAGS": "-DLAUNCHED -g0",
}


@dataclass(frozen=True)
class Job:
    """A launcher that has ended."""

    status: int | None  # None: it was ended after its time
    seconds: float
    output: str
    left: list[str]  # processes and files


class Cluster:
    """The two nodes and what is on them."""

    def __init__(self) -> None:
        shutil.rmtree(FOLDER, ignore_errors=True)
        path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/sbin:/usr/bin:/sbin:/bin"])
        self.nodes = nodes.make(FOLDER / "daemons", REPOSITORY, path)
        self.hosts = FOLDER / "hosts"
        self.hosts.write_text("node1 slots=2\nnode2 slots=2\n", encoding="utf-8")
        self._before = set(self._files())
        self._daemons = set(processes())

    def run(self, command: list[str], environment: dict[str, str], folder: Path, seconds: float) -> Job:
        """Run a launcher to its end, and look at what it leaves."""
        begun = time.monotonic()
        with (folder / "output.log").open("w+", encoding="utf-8", errors="replace") as log:
            process = subprocess.Popen(
                command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            status: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(seconds)
            took = time.monotonic() - begun
            left = self._left(patience=15)
            log.seek(0)
            return Job(status, took, log.read(), left)

    def _left(self, patience: float) -> list[str]:
        """What was not there before, as soon as nothing is, or after some seconds; it is then removed."""
        end = time.monotonic() + patience
        while True:
            running = {pid: line for pid, line in processes().items() if pid not in self._daemons}
            files = [file for file in self._files() if file not in self._before]
            if not (running or files) or time.monotonic() > end:
                break
            time.sleep(0.5)
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name, file in files:
            next(node for node in self.nodes if node.name == name).run("rm", "-rf", file)
        return [*running.values(), *(f"{node}:{file}" for node, file in files)]

    def _files(self) -> Iterator[tuple[str, str]]:
        """What lies in /tmp, which both nodes see, and in the /dev/shm of each; but for torch's cache of code."""
        for node, folder in ((self.nodes[0], "/tmp"), *((node, "/dev/shm") for node in self.nodes)):
            for name in node.run("ls", "-A", folder).split():
                if not name.startswith("torchinductor_"):
                    yield node.name, f"{folder}/{name}"


def processes() -> dict[int, str]:
    """Command lines of all processes of these namespaces but this one and the kernel's remains of ended ones."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:  # the first process inherits all orphans
            pass
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if words and int(folder.name) != os.getpid():
                found[int(folder.name)] = words
    return found


@dataclass(frozen=True)
class Outcome:
    """A row: what the ranks say, how the job that lost one ended, and what is wrong with it."""

    case: Case
    version: str
    ranks: list[dict[str, Any]]
    wrong: dict[str, str]  # by check
    named: str
    ended: float  # seconds from the start of the job that lost a rank

    def result(self) -> tuple[bool, str]:
        """Whether it is as it has to be, and in words."""
        unexpected = [f"{check}: {what}" for check, what in self.wrong.items() if check not in self.case.defects]
        mended = [
            f"{check} is right now: {defect}"
            for check, defect in self.case.defects.items()
            if check not in self.wrong and "ranks" not in self.wrong  # without ranks nothing was looked at
        ]
        known = [str(defect) for check, defect in self.case.defects.items() if check in self.wrong]
        return not (unexpected or mended), "; ".join(dict.fromkeys(unexpected + mended + known)) or "ok"


def measure(case: Case, cluster: Cluster) -> Outcome:
    """Start a launcher twice, and judge both jobs."""
    folder = FOLDER / re.sub(r"\W+", "-", f"{case.name} {case.mpi}")
    environment = {**os.environ, **case.environment(), **SETTINGS}
    # In this repository's own environment other variables are the caller's, such as his cache.
    environment["DS_PLUGIN_CACHE_DIR"] = str(folder / "kernels, of its own")
    environment["DS_PLUGIN_PROVENANCE"] = str(folder / "loads.jsonl")
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(REPOSITORY / "tools"), case.environment().get("PYTHONPATH")])
    )
    if "srun" in case.command or "slurm" in case.command:
        environment.update(MASTER_ADDR="node1", MASTER_PORT="29500")
    command = [word.format(hosts=cluster.hosts) for word in case.command]
    said = subprocess.run(case.version, env=environment, capture_output=True, text=True, check=False)
    version = re.search(r"\d+(\.\d+)+", said.stdout + said.stderr)

    whole, lost = folder / "whole", folder / "lost"
    whole.mkdir(parents=True)
    lost.mkdir()
    job = cluster.run([*command, *case.program, str(whole)], environment, whole, SECONDS)
    ranks = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(whole.glob("rank-*.json"))]
    wrong = dict(judge(case, environment, job, ranks))
    killed = sum(case.ranks[:-1])  # the first of the last node
    named, ended = "", 0.0
    if len(ranks) == sum(case.ranks):  # else losing one says nothing
        job = cluster.run([*command, *case.program, str(lost), "--kill", str(killed)], environment, lost, SECONDS)
        named, ended = name_of(killed, job.output), job.seconds
        wrong.update(judge_loss(job, named))
    return Outcome(case, version[0] if version else "?", ranks, wrong, named, ended)


def judge(case: Case, environment: dict[str, str], job: Job, ranks: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """What is wrong with a job that ran to its end, by check."""
    if job.status != 0 or len(ranks) != sum(case.ranks):
        last = [line for line in job.output.splitlines() if line.strip()][-1:]
        yield (
            "ranks",
            f"{len(ranks)} of {sum(case.ranks)} ranks came to their end, status {job.status}: {''.join(last)}",
        )
        return
    wanted = [(node, local) for node, count in zip(nodes.HOSTS, case.ranks, strict=False) for local in range(count)]
    found = [(each["node"], each["local_rank"]) for each in ranks]
    if found != wanted or any(each["ranks"] != len(ranks) for each in ranks):
        yield "ranks", f"are at {found}"
    if any((each["argument"] is not None) != case.argument for each in ranks):
        yield "argument", f"--local_rank is {[each['argument'] for each in ranks]}"
    yield from judge_cores(case, ranks)
    if {each["accelerator"] for each in ranks} != {PLUGIN}:
        yield "plugin", f"is {[each['accelerator'] for each in ranks]}"
    ours = {name: value for name, value in environment.items() if name.startswith("DS_PLUGIN") or name in SETTINGS}
    for each in ranks:
        lost = {name for name, value in ours.items() if each["environment"].get(name) != value}
        if lost:
            yield "settings", f"{', '.join(sorted(lost))} did not reach rank {each['rank']}"
    loads = provenance.read(Path(environment["DS_PLUGIN_PROVENANCE"]))[0]
    compiled = collections.Counter(record.name for record in loads if record.origin == "compiled")
    if set(compiled.values()) != {1}:
        yield "compiled once", f"were {dict(compiled)}"
    if any(each["losses"] != ranks[0]["losses"] or not each["losses"][-1] < each["losses"][0] for each in ranks):
        yield "losses", f"are {[each['losses'] for each in ranks]}"
    if job.left:
        yield "left", str(job.left)


def judge_cores(case: Case, ranks: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Whether each rank's cores and threads are those that it should have."""
    machine = sorted(os.sched_getaffinity(0))
    for each in ranks:
        beside = [other for other in ranks if other["node"] == each["node"] and other["rank"] != each["rank"]]
        if case.cores == "own":
            right = not any(set(each["cores"]) & set(other["cores"]) for other in beside)
        else:
            right = each["cores"] == (machine if case.cores == "all" else [int(case.cores)])
        if not right:
            yield (
                "cores",
                f"of rank {each['rank']} are {each['cores']}, of others {[other['cores'] for other in beside]}",
            )
        threads = case.threads or min(len(each["cores"]), max(1, len(machine) // (1 + len(beside))))
        if each["threads"] != threads:
            yield "threads", f"of rank {each['rank']} are {each['threads']}, not {threads}"


def judge_loss(job: Job, named: str) -> Iterator[tuple[str, str]]:
    """What is wrong with the end of a job that lost a rank, by check."""
    if job.status is None:
        yield "ended", "the job goes on without the rank that was killed"
    elif job.status == 0:
        yield "status", "the job that lost a rank ended with status 0"
    if not named:
        yield "named", "nothing says which rank was lost"
    if job.left:
        yield "left after a loss", str(job.left)


def name_of(rank: int, output: str) -> str:
    """How the first line about an ended process calls the rank that is gone, which is the first of its node."""
    name = re.compile(rf"\brank *:? +{rank}\b|\btask +{rank}\b|\blocal_rank[=:] *0\b", re.IGNORECASE)
    gone = re.findall(r".*(?:exited|exits with|exitcode|\bKilled|RUNNING AT).*", output)
    found = next(filter(None, map(name.search, gone)), None)
    return found[0] if found else ""


PAGE = """# Launchers

The launchers with which DeepSpeed is started, on two nodes that are namespaces of one machine, each with its own name,
network, `/dev/shm`, sshd and slurmd, as `make test-clusters ARGS='--table docs/launchers.md'` found them when it wrote
this page: {versions}, {cores} cores, which both nodes see.
The command needs root, and installs Debian's packages for sshd, pdsh, munge and Slurm; the MPIs come from PyPI. All
that it has started is gone when it ends.

Each launcher runs a program twice. The first time its ranks train some steps and say where they are and what they have:

- **ranks**: on each node, each with the number that it should have; **threads** and **cores** of a rank;
- **plugin**: in how many of them `ds-plugin-cpu` is the accelerator;
- **settings**: whether `DS_ACCELERATOR`, `DS_PLUGINS`, `DS_PLUGIN_*` and `CXXFLAGS` are in every rank as they were
  where the launcher was started, their quotes, commas and spaces intact;
- **compiled**: how often each kernel was, for all ranks together, in a cache that was empty.

The second time the first rank of the last node is killed in the middle: **after a loss** has the seconds from the
launcher's start to its end, and what it says of that rank. Its status must be an error's, and nothing may be left of
either job: no process, no file in `/dev/shm` or `/tmp`.

{table}

Where DeepSpeed or torch does not do what it should, the row has the line that does not. A row fails as soon as what it
says of others is no longer so.

Not run here:

{not_run}
"""

COLUMNS = "launcher", "version", "ranks", "threads", "cores", "plugin", "settings", "compiled", "after a loss", "result"


def title(case: Case) -> str:
    """The first cell of a launcher's row: what a user types is set as code."""
    command, comma, rest = case.name.partition(",")
    words, of, mpi = command.partition(" of ")
    return f"`{words}`{of}{mpi}{comma}{rest}"


def row(outcome: Outcome) -> list[str]:
    """A row of the table."""
    case, ranks, wrong = outcome.case, outcome.ranks, outcome.wrong
    name = title(case)
    result = outcome.result()[1]
    if not ranks:
        return [name, outcome.version, *["-"] * 7, result]
    nodes_of_ranks = collections.Counter(each["node"] for each in ranks)
    return [
        name,
        outcome.version,
        " + ".join(map(str, nodes_of_ranks.values())),
        ", ".join(sorted({str(each["threads"]) for each in ranks})),
        ", ".join(dict.fromkeys("-".join(map(str, each["cores"])) for each in ranks)),
        f"{sum(each['accelerator'] == PLUGIN for each in ranks)} of {len(ranks)}",
        "lost" if "settings" in wrong else "intact",
        "not once" if "compiled once" in wrong else "once",
        f"{outcome.ended:.0f} s" + (f', "{outcome.named}"' if outcome.named else ""),
        result,
    ]


def page(outcomes: list[Outcome], before: str = "") -> str:
    """The documentation's page; rows of launchers that have no outcome now are taken from the page as it was."""
    rows = dict(re.findall(r"^\| (.*?) \|(.*)\|$", before, re.MULTILINE))
    rows.update((cells[0], " " + " | ".join(cells[1:]) + " ") for cells in map(row, outcomes))
    lines = [" | ".join(COLUMNS), " | ".join(["---"] * len(COLUMNS))]
    not_yet = " - |" * (len(COLUMNS) - 2) + " not run yet"
    lines += [f"{name} |{rows.get(name, not_yet)}".rstrip() for name in map(title, CASES)]
    return PAGE.format(
        versions=", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("deepspeed", "torch")),
        cores=os.cpu_count(),
        table="\n".join(f"| {line} |" for line in lines),
        not_run="\n".join(f"- {name}: {why};" for name, why in NOT_RUN.items())[:-1] + ".",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART", help="launchers with this in their names")
    parser.add_argument("--table", type=Path, help="the page whose rows of these launchers are written")
    options = parser.parse_args()
    if not any(part in case.name for case in CASES for part in options.only):
        parser.error(f"no launcher has {', '.join(options.only)} in its name")
    # The first process of its namespaces gets no signal that it does not handle.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    cluster = Cluster()
    outcomes = []
    for case in CASES:
        if any(part in case.name for part in options.only):
            outcomes.append(measure(case, cluster))
            print(" | ".join(row(outcomes[-1])), flush=True)
            if options.table is not None:
                before = options.table.read_text(encoding="utf-8") if options.table.exists() else ""
                options.table.write_text(page(outcomes, before), encoding="utf-8")
    failed = [outcome.case.name for outcome in outcomes if not outcome.result()[0]]
    print(f"{len(outcomes) - len(failed)} passed, {len(failed)} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
