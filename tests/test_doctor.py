"""``sdk doctor``: what will fail is said before the run, of every host, with what to do about it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_plugin_sdk.doctor import Facts, Finding, Heard, Silent, ask_all, compare, read_hostfile
from ds_plugin_sdk.errors import HostfileError
from launchers import free_port
from plugin_site import Install

GIB = 2**30
WELL = Facts(
    versions={"python": "3.11.7", "torch": "2.13.0", "deepspeed": "0.19.8"},
    plugin="zap",
    plugin_why="the best available",
    plugin_hint="",
    autoload_why="",
    deepspeeds_own=False,
    deepspeed_why="",
    kernels={"cache": ["cpu_adam"]},
    kernels_why={"cache": "same sources"},
    fallback=True,
    cache="/cache",
    cache_why="",
    port=29500,
    port_why="",
    loopback_why="",
    open_files=4096,
    locked_memory=None,
    memory=64 * GIB,
    shared_memory=(32 * GIB, 32 * GIB),
    clock=(0.0, 0.0),
)


def findings(*changes: dict[str, Any], ranks: int = 8, clock_off: float = 0.0) -> list[Finding]:
    """What is found on a host that is well and on others that differ from it."""
    hosts = {"first": Heard(WELL)}
    hosts |= {f"host-{at}": Heard(replace(WELL, **change), clock_off) for at, change in enumerate(changes)}
    return compare(hosts, dict.fromkeys(hosts, ranks))


def bad(found: list[Finding]) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(finding.check, finding.verdict, finding.hosts) for finding in found if finding.verdict != "ok"]


def test_hosts_that_are_well_and_alike_have_one_line_a_check() -> None:
    found = findings({}, {})
    assert bad(found) == []
    # Only the first host's port matters: the ranks meet there.
    assert {finding.hosts for finding in found if finding.check != "port"} == {("first", "host-0", "host-1")}
    assert [finding.hosts for finding in found if finding.check == "port"] == [("first",)]


@pytest.mark.parametrize(
    ("change", "check", "verdict", "todo"),
    [
        ({"versions": {**WELL.versions, "torch": "2.11.0"}}, "torch", "fails", "pip install torch==2.13.0"),
        ({"versions": {**WELL.versions, "python": "3.10.1"}}, "python", "fails", "the first host has 3.11.7"),
        ({"deepspeed_why": "ImportError: no 'log'"}, "deepspeed", "fails", "releases that fit each other"),
        ({"deepspeed_why": "ValueError: DS_ACCELERATOR must be"}, "deepspeed", "fails", "unset DS_ACCELERATOR"),
        ({"plugin": "cpu"}, "plugin", "fails", "the first host uses 'zap': `sdk list --explain` on both"),
        ({"plugin": "", "plugin_why": "no /dev/zap"}, "plugin", "fails", "`sdk list --explain` on both"),
        ({"plugin": "", "deepspeeds_own": True}, "plugin", "fails", "`sdk list --explain` on both"),
        ({"kernels": {"compiles": ["cpu_adam"]}}, "kernels", "warning", "`sdk build zap` there before the run"),
        ({"kernels": {"reference": ["cpu_adam"]}}, "kernels", "warning", "on a host with a compiler"),
        ({"kernels": {"reference": ["a"]}, "fallback": False}, "kernels", "fails", "on a host with a compiler"),
        ({"kernels": {"failed": ["a"]}, "fallback": False}, "kernels", "fails", "the log has the compiler's message"),
        ({"kernels": {"broken": ["cpu_adam"]}}, "kernels", "fails", "`sdk report` there"),
        ({"loopback_why": "Network is unreachable"}, "loopback", "fails", "`ip link set lo up`"),
        ({"open_files": 100}, "open files", "fails", "limits.conf"),
        ({"locked_memory": 8 * 2**20}, "locked memory", "warning", "`ulimit -l unlimited`"),
        ({"shared_memory": None}, "/dev/shm", "warning", "tmpfs"),
        ({"shared_memory": (2**26, 2**26)}, "/dev/shm", "warning", "--shm-size"),
        ({"shared_memory": (32 * GIB, 2**20)}, "/dev/shm", "warning", "remove what is left there"),
    ],
)
def test_what_is_wrong_on_a_host_is_found_with_what_to_do(
    change: dict[str, Any], check: str, verdict: str, todo: str
) -> None:
    reasons = {"kernels_why": dict.fromkeys(change.get("kernels", ()), "no compiler")}
    found = findings(change | reasons)
    assert bad(found) == [(check, verdict, ("host-0",))]
    (wrong,) = (finding for finding in found if finding.verdict != "ok")
    assert todo in wrong.next
    if check == "kernels":
        assert "(no compiler)" in wrong.found


def test_a_torch_that_no_kernel_is_compiled_for_is_told() -> None:
    old = replace(WELL, versions={**WELL.versions, "torch": "2.9.1+cu128"})
    found = compare({"first": Heard(old)}, {"first": 8})
    assert bad(found) == [("torch", "fails", ("first",))]
    assert "pip install 'torch>=2.11'" in {finding.next for finding in found}
    found = compare({"first": Heard(old), "second": Heard(WELL)}, {"first": 8, "second": 8})
    assert [finding.next for finding in found if finding.check == "torch" and finding.hosts == ("first",)] == [
        "pip install 'torch>=2.11'"
    ]


def test_a_machine_that_needs_no_plugin_is_no_failure() -> None:
    why = "cpu: not used, 'cuda' was found, which needs no plugin"
    hosts = {"first": Heard(replace(WELL, plugin="", plugin_why=why, deepspeeds_own=True))}
    (found,) = (each for each in compare(hosts, {"first": 1}) if each.verdict != "ok")
    assert (found.check, found.verdict, found.found) == ("plugin", "warning", f"none: {why}")


def test_a_plugin_that_torch_does_not_load_is_told() -> None:
    changed = {"autoload_why": "TORCH_DEVICE_BACKEND_AUTOLOAD is not 1: torch calls no entry points"}
    assert bad(findings(changed)) == [("plugin", "warning", ("host-0",))]


def test_a_cache_that_cannot_be_written_matters_where_something_is_to_be_built() -> None:
    exposed = {"cache_why": "/cache can be written by everybody"}
    assert bad(findings(exposed)) == []
    (unneeded,) = (finding.found for finding in findings(exposed) if finding.hosts == ("host-0",))
    assert unneeded == "/cache: no build is needed, and none could go there: /cache can be written by everybody"
    for origin in ("compiles", "reference"):
        unbuilt = {"kernels": {origin: ["cpu_adam"]}, "kernels_why": {origin: "never built"}}
        assert ("cache", "warning", ("host-0",)) in bad(findings(exposed | unbuilt))


def test_open_files_must_suffice_for_all_ranks() -> None:
    assert bad(findings({"open_files": 1024}, ranks=8)) == []
    wrong = [finding for finding in findings({"open_files": 1024}, ranks=100) if finding.verdict != "ok"]
    assert [(finding.check, finding.hosts) for finding in wrong] == [("open files", ("host-0",))]
    assert wrong[0].found == "1024, and 200 ranks need about 1264"


def test_a_clock_may_be_off_by_seconds() -> None:
    assert bad(findings({}, clock_off=3.0)) == []
    for off, said in ((40.0, "40 s ahead of"), (-40.0, "40 s behind")):
        found = findings({}, clock_off=off)
        assert bad(found) == [("clock", "fails", ("host-0",))]
        assert any(finding.found.startswith(said) for finding in found)


def test_a_silent_host_does_not_hide_what_the_others_say() -> None:
    found = compare({"a": Silent("no answer in 5 s", "is it up?"), "b": Heard(WELL)}, {"a": 1, "b": 1})
    assert bad(found) == [("host", "fails", ("a",))]
    assert len({finding.check for finding in found}) > 5


# --- Hostfiles --------------------------------------------------------------------------------------------------------


def test_a_hostfile_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two nodes\n\nworker-0 slots=4\n  worker-1   slots=2  # the small one\n", encoding="utf-8")
    assert read_hostfile(file) == {"worker-0": 4, "worker-1": 2}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("worker-0 slot=4\n", "line 1 of .*: 'worker-0 slot=4' is no host and its slots"),
        ("a slots=1\na slots=1\n", "line 2 of .*: a is there twice"),
        ("# nobody\n", "has no host"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_hostfile_that_cannot_be_used(tmp_path: Path, text: str | None, why: str) -> None:
    file = tmp_path / "hosts"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(HostfileError, match=f"{why}[^$]*\n  -> a line for each host"):
        read_hostfile(file)


# --- By a stand-in for ssh, which runs the command here, in another environment --------------------------------------

SSH = """\
#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
case $host in
    closed) echo "ssh: connect to host closed port 22: Connection refused" >&2; exit 255 ;;
    asleep) sleep 600 & wait ;;
    helped) setsid sleep 90 >&2 & exec sh -c "$*" ;;
    bare) exec sh -c 'echo "bash: line 1: python: No such file or directory" >&2; exit 127' ;;
    *) printf 'Gr\\374\\337e von %s, in Latin-1\\n' "$host"; PYTHONPATH={sites}/$host exec sh -c "$*" ;;
esac
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts: twin, as here; old, with another torch; late, whose clock is an hour behind; others do not answer."""
    script = tmp_path / "bin" / "ssh"
    script.parent.mkdir()
    script.write_text(SSH.replace("{sites}", str(tmp_path)), encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    metadata = tmp_path / "old" / "torch-2.11.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n", encoding="utf-8")
    (tmp_path / "late").mkdir()
    slow = "import time\nnow = time.time\ntime.time = lambda: now() - 3600\n"
    (tmp_path / "late" / "sitecustomize.py").write_text(slow, encoding="utf-8")


def hostfile(tmp_path: Path, *hosts: str) -> str:
    file = tmp_path / "hosts"
    file.write_text("".join(f"{host} slots=2\n" for host in hosts), encoding="utf-8")
    return str(file)


@pytest.mark.usefixtures("ssh", "compiled_once")
def test_hosts_are_asked_and_compared(sdk: Callable[..., str], tmp_path: Path) -> None:
    text = sdk(
        "doctor", "--port", free_port(), "--hosts", hostfile(tmp_path, "twin", "old", "late", "closed"), status=1
    )
    lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    failing = {line[1]: line[2:] for line in lines if line[0] == "fails"}
    assert set(failing) == {"torch", "clock", "host"}
    assert failing["torch"][:2] == ["old", "2.11.0"]
    assert "pip install torch==" in failing["torch"][2]
    assert failing["clock"][0] == "late"
    behind = re.fullmatch(r"(\d+) s behind this machine's", failing["clock"][1])
    assert behind is not None
    # "At least": how long the host has taken to start is not told apart from its clock.
    assert 3500 <= int(behind[1]) <= 3600
    assert failing["host"][:2] == ["closed", "ssh: connect to host closed port 22: Connection refused"]
    assert "`ssh closed true` must work without a password" in failing["host"][2]
    assert ["ok", "plugin", "twin, old, late", "cpu"] in lines
    assert "It will fail" in text


@pytest.mark.usefixtures("ssh")
def test_a_host_that_cannot_be_reached_costs_the_time_allowed() -> None:
    began = time.monotonic()
    (asleep,) = ask_all(["asleep"], 29500, ["ssh"], timeout=1).values()
    assert time.monotonic() - began < 300  # it sleeps for twice as long
    assert asleep == Silent("no answer in 1 s", "is it up? Try `ssh asleep true`, and --timeout")


@pytest.mark.usefixtures("ssh", "compiled_once")
def test_what_ssh_leaves_behind_is_not_waited_for() -> None:
    """A master connection that holds on to its standard error, say."""
    began = time.monotonic()
    (helped,) = ask_all(["helped"], 29500, ["ssh"], timeout=80).values()
    assert isinstance(helped, Heard)
    assert time.monotonic() - began < 80


@pytest.mark.usefixtures("ssh")
def test_who_interrupts_waits_for_no_host() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    threading.Timer(2, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            ask_all(["asleep"] * 3, 29500, ["ssh"], timeout=100)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 60


@pytest.mark.usefixtures("ssh")
def test_a_host_without_this_environment_is_told() -> None:
    (bare,) = ask_all(["bare"], 29500, ["ssh"], timeout=120).values()
    assert isinstance(bare, Silent)
    assert "No such file" in bare.why
    assert "the same environment on all hosts, at the same path" in bare.next


def test_without_ssh_it_says_so() -> None:
    (answer,) = ask_all(["a"], 29500, ["no-such-ssh"], timeout=5).values()
    assert answer == Silent("no-such-ssh: No such file or directory", "install an ssh client, or name one by --ssh")


@pytest.mark.usefixtures("compiled_once")
def test_this_machine_and_a_port_that_is_taken(sdk: Callable[..., str]) -> None:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = str(server.getsockname()[1])
        text = sdk("doctor", "--port", port, "--json", status=1)
    found = {entry["check"]: entry for entry in json.loads(text)}
    assert found["port"]["verdict"] == "fails"
    assert found["port"]["found"] == f"{port}: Address already in use"
    assert "--master_port" in found["port"]["next"]
    assert found["plugin"]["found"] == "cpu"
    assert {entry["verdict"] for entry in found.values() if entry["check"] != "port"} <= {"ok", "warning"}


@pytest.mark.usefixtures("compiled_once")
def test_a_deepspeed_that_cannot_be_imported_is_not_well(
    sdk: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it wants another torch')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = {entry["check"]: entry for entry in json.loads(sdk("doctor", "--port", free_port(), "--json", status=1))}
    assert found["deepspeed"]["verdict"] == "fails"
    assert found["deepspeed"]["found"].endswith(" cannot be imported: ImportError: it wants another torch")


@pytest.mark.usefixtures("compiled_once")
def test_a_name_of_deepspeeds_that_it_cannot_use_here(sdk: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "npu")
    found = {entry["check"]: entry for entry in json.loads(sdk("doctor", "--port", free_port(), "--json", status=1))}
    assert found["plugin"]["found"] == "none: npu: left to DeepSpeed, DS_ACCELERATOR=npu, and no plugin has that name"
    assert found["deepspeed"]["verdict"] == "fails"
    assert "NPU_Accelerator requires torch_npu" in found["deepspeed"]["found"]


@pytest.mark.usefixtures("compiled_once")
def test_a_plugin_without_its_accelerator_is_not_well(sdk: Callable[..., str], install: Install) -> None:
    """Its manifest is fine, by which it is chosen."""
    install("zap", priority=5, accelerator="nowhere:Missing")
    found = {entry["check"]: entry for entry in json.loads(sdk("doctor", "--port", free_port(), "--json", status=1))}
    assert found["plugin"]["verdict"] == "fails"
    why = "none: 'zap': a plugin's accelerator cannot be loaded: nowhere:Missing of ds-plugin-zap 1.0: ModuleNotFound"
    assert found["plugin"]["found"].startswith(why)
    advice = (
        "python -c 'from nowhere import Missing; Missing()' shows where; pip install --force-reinstall ds-plugin-zap "
    )
    assert found["plugin"]["next"].startswith(advice)
    assert found["cache"]["verdict"] == "ok"


@pytest.mark.usefixtures("compiled_once")
def test_a_machine_without_any_network() -> None:
    prefix = ["unshare", "-n", *([] if os.geteuid() == 0 else ["-r"])]
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespaces in this sandbox")
    command = [*prefix, sys.executable, "-m", "ds_plugin_sdk", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {entry["check"]: entry for entry in json.loads(done.stdout)}
    assert (done.returncode, found["loopback"]["verdict"]) == (1, "fails"), done.stderr
    assert found["loopback"]["found"].startswith("127.0.0.1 cannot be reached: ")


def test_a_port_that_is_none_is_wrong_use(sdk: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "equal to 65535" in sdk("doctor", "--port", "99999", status=2)
    monkeypatch.setenv("MASTER_PORT", "99999")
    assert "expected a port, from 1 to 65535" in sdk("doctor", status=1)
