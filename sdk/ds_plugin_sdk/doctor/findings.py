"""What the facts of hosts mean for a run that goes over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ds_plugin_sdk.doctor.facts import Facts
from ds_plugin_sdk.doctor.hosts import Heard, Silent
from ds_plugin_sdk.errors import DOCUMENTATION
from ds_plugin_sdk.integrations.deepspeed import autoload
from ds_plugin_sdk.jit.machine import STABLE_TORCH, STABLE_TORCH_VERSION, release_of

Verdict = Literal["ok", "warning", "fails"]

# torchrun takes a node for dead whose last sign of life is this old by its own clock: keep_alive_interval times
# keep_alive_max_attempt of torch.distributed.elastic.rendezvous.dynamic_rendezvous.
CLOCK_SECONDS = 15

# What a container gets that asks for nothing; torch's README calls it too small for a data loader's workers.
SMALL_SHARED_MEMORY = 64 * 2**20

# Of the first rank of DeepSpeed with ZeRO-2 over gloo: 31 files alone, and 3 sockets more for each other rank (measured
# with 2, 4 and 8 ranks). Both doubled, for what a program opens itself.
OPEN_FILES, OPEN_FILES_EACH_RANK = 64, 6

_GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One check, and the hosts that it says the same of.

    Attributes:
        check: what was looked at.
        verdict: ``fails``: a run will end, or not begin; ``warning``: it will be slower, or may fail later.
        hosts: names, in the order of the hostfile.
        found: what is there.
        next: what to do; empty if all is well.
    """

    check: str
    verdict: Verdict
    hosts: tuple[str, ...]
    found: str
    next: str = ""


def compare(answers: Mapping[str, Heard | Silent], slots: Mapping[str, int]) -> list[Finding]:
    """The findings of all hosts, those that say the same in one.

    Args:
        answers: what each host said, in the order of the hostfile; the ranks meet at the first.
        slots: ranks on each host.
    """
    first = next((answer.facts for answer in answers.values() if isinstance(answer, Heard)), None)
    ranks = sum(slots.values())
    same: dict[tuple[str, Verdict, str, str], list[str]] = {}
    for place, (host, answer) in enumerate(answers.items()):
        for check, verdict, found, todo in _judge(answer, first, ranks, meets_here=place == 0):
            same.setdefault((check, verdict, found, todo), []).append(host)
    order = list(dict.fromkeys(check for check, *_ in same))
    findings = [
        Finding(check, verdict, tuple(hosts), found, todo) for (check, verdict, found, todo), hosts in same.items()
    ]
    return sorted(findings, key=lambda finding: order.index(finding.check))


_Row = tuple[str, Verdict, str, str]


def _judge(answer: Heard | Silent, first: Facts | None, ranks: int, *, meets_here: bool) -> Iterator[_Row]:
    if isinstance(answer, Silent):
        yield "host", "fails", answer.why, answer.next
        return
    facts = answer.facts
    first = first or facts
    yield "host", "ok", "answers", ""
    yield from _versions(facts, first)
    yield _plugin(facts, first)
    yield from _kernels(facts)
    yield _cache(facts)
    if meets_here:
        yield _port(facts)
    yield _loopback(facts)
    yield _open_files(facts, ranks)
    yield _locked_memory(facts)
    yield _shared_memory(facts)
    yield _clock(answer.clock_off)


def _versions(facts: Facts, first: Facts) -> Iterator[_Row]:
    for package in dict.fromkeys([*first.versions, *facts.versions]):
        here, there = facts.versions.get(package, "not installed"), first.versions.get(package, "not installed")
        if package == "torch" and here[0].isdigit() and release_of(here) < STABLE_TORCH:
            yield (
                package,
                "fails",
                f"{here}: kernels need {STABLE_TORCH_VERSION} or later",
                f"pip install 'torch>={STABLE_TORCH_VERSION}'",
            )
        elif here != there:
            todo = f"the first host has {there}: the same environment everywhere"
            if there[0].isdigit():
                todo += f", `pip install {package}=={there}`"
            if package in ("python", "machine"):
                todo = f"the first host has {there}: the same environment on machines of one kind"
            yield package, "fails", here, todo
        elif here == "not installed":
            yield package, "fails", here, f"pip install {package}"
        elif package == "deepspeed" and facts.deepspeed_why:
            todo = f"releases that fit each other: {DOCUMENTATION}/faq.md has those of DeepSpeed and torch"
            if "DS_ACCELERATOR" in facts.deepspeed_why:  # set to nothing, which DeepSpeed takes for a name
                todo = "unset DS_ACCELERATOR, or name an accelerator that is installed"
            yield package, "fails", f"{here} cannot be imported: {facts.deepspeed_why}", todo
        else:
            yield package, "ok", here, ""


def _plugin(facts: Facts, first: Facts) -> _Row:
    if facts.plugin != first.plugin:
        todo = f"the first host uses '{first.plugin or 'none'}': `sdk list --explain` on both, or DS_ACCELERATOR on all"
        return "plugin", "fails", facts.plugin or f"none: {facts.plugin_why}", todo
    if facts.deepspeeds_own:
        todo = "no plugin is needed: DeepSpeed uses an accelerator of its own; `sdk list --explain` says why"
        return "plugin", "warning", f"none: {facts.plugin_why}", todo
    if not facts.plugin:
        return "plugin", "fails", f"none: {facts.plugin_why}", facts.plugin_hint or "`sdk list --explain` there"
    if facts.autoload_why:
        return "plugin", "warning", f"{facts.plugin}, unseen by scripts: {facts.autoload_why}", autoload.WHERE_NOT
    return "plugin", "ok", facts.plugin, ""


def _kernels(facts: Facts) -> Iterator[_Row]:
    verdicts: dict[str, tuple[Verdict, str]] = {
        "compiles": ("warning", f"`sdk build {facts.plugin}` there before the run, or plugins' wheels with binaries"),
        "reference": (
            "warning" if facts.fallback else "fails",
            f"`sdk build {facts.plugin}` on a host with a compiler, into a cache that both see; or wheels",
        ),
        "missing": ("fails", "no implementation in plain torch serves in its place: `sdk report` there says why"),
        "failed": ("warning" if facts.fallback else "fails", "the log has the compiler's message; `sdk report` there"),
        "broken": ("fails", "`sdk report` there"),
    }
    for origin, ops in facts.kernels.items():
        verdict, todo = verdicts.get(origin, ("ok", ""))
        why = f" ({facts.kernels_why[origin]})" if verdict != "ok" else ""
        yield "kernels", verdict, f"{origin}: {_few(ops)}{why}", todo


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} ops, {names[0]} first"


def _cache(facts: Facts) -> _Row:
    if not facts.cache_why:
        return "cache", "ok", facts.cache, ""
    if not {"compiles", "failed", "missing", "reference"} & set(facts.kernels):
        return "cache", "ok", f"{facts.cache}: no build is needed, and none could go there: {facts.cache_why}", ""
    todo = "DS_PLUGIN_CACHE_DIR: a folder of one's own that all hosts see"
    return "cache", "warning", f"{facts.cache}: nothing can be built into it: {facts.cache_why}", todo


def _port(facts: Facts) -> _Row:
    if not facts.port_why:
        return "port", "ok", f"{facts.port} is free", ""
    return (
        "port",
        "fails",
        f"{facts.port}: {facts.port_why}",
        "another one: MASTER_PORT, or the launcher's --master_port",
    )


def _loopback(facts: Facts) -> _Row:
    if not facts.loopback_why:
        return "loopback", "ok", "127.0.0.1 answers", ""
    todo = "`ip link set lo up`, or a container with a network: the ranks of a machine meet there"
    return "loopback", "fails", f"127.0.0.1 cannot be reached: {facts.loopback_why}", todo


def _open_files(facts: Facts, ranks: int) -> _Row:
    if facts.open_files is None:
        return "open files", "ok", "unlimited", ""
    needed = OPEN_FILES + OPEN_FILES_EACH_RANK * ranks
    if facts.open_files >= needed:
        return "open files", "ok", str(facts.open_files), ""
    todo = f"`ulimit -n {needed}` or more, in /etc/security/limits.conf for those who come by ssh"
    return "open files", "fails", f"{facts.open_files}, and {ranks} ranks need about {needed}", todo


def _locked_memory(facts: Facts) -> _Row:
    if facts.locked_memory is None or facts.locked_memory >= facts.memory:
        return "locked memory", "ok", "unlimited" if facts.locked_memory is None else _size(facts.locked_memory), ""
    todo = (
        "`ulimit -l unlimited`, or memlock in /etc/security/limits.conf: page-locked memory and InfiniBand ask for it"
    )
    return "locked memory", "warning", _size(facts.locked_memory), todo


def _shared_memory(facts: Facts) -> _Row:
    if facts.shared_memory is None:
        todo = (
            "mount a tmpfs there: a data loader's workers need it, and the SDK's sums over ranks are gloo's without it"
        )
        return "/dev/shm", "warning", "not there, or cannot be written", todo
    total, free = facts.shared_memory
    found = f"{_size(free)} of {_size(total)} free"
    if free < SMALL_SHARED_MEMORY or total <= SMALL_SHARED_MEMORY:
        todo = "remove what is left there, or `--shm-size=1g` of the container: a data loader's workers fill it"
        return "/dev/shm", "warning", found, todo
    return "/dev/shm", "ok", found, ""


def _clock(off: float) -> _Row:
    if abs(off) < CLOCK_SECONDS:
        return "clock", "ok", f"less than {CLOCK_SECONDS} s from this machine's", ""
    found = f"{abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} this machine's"
    return "clock", "fails", found, "set it, by chrony or ntpd: torchrun takes such a node for dead"


def _size(number: int) -> str:
    return f"{number / _GIB:.1f} GiB" if number >= _GIB else f"{number / 2**20:.3g} MiB"
