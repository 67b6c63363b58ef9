"""Two nodes of a cluster out of namespaces of this machine: own names, networks, /dev/shm, /run and daemons.

To be called by a process that is the first of its own namespaces of mounts, processes, network, names and IPC, as
`unshare --mount --pid --fork --kill-child --mount-proc --net --uts --ipc` starts it: when that process ends, whatever
ends it, the kernel ends all that it has started, and nothing of it was ever in the machine's own folders.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HOSTS = ("node1", "node2")
# DeepSpeed's launcher of Open MPI asks for an interface of this name.
INTERFACE = "eth0"

SSHD = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
PermitRootLogin yes
UsePAM no
SetEnv PATH={path}
"""
SSH = """
Host *
  IdentityFile {folder}/key
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
SLURM = """
ClusterName=namespaces
SlurmctldHost=node1
SlurmUser=root
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
KillWait=5
NodeName=node[1-2] CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Node:
    """One of them; `enter` is what a command begins with to run there."""

    name: str
    enter: tuple[str, ...]

    def run(self, *command: str) -> str:
        """A command's output on this node."""
        return subprocess.run([*self.enter, *command], check=True, capture_output=True, text=True).stdout

    def start(self, log: Path, *command: str) -> None:
        """A daemon, which stays in the foreground and writes into `log`."""
        with log.open("a", encoding="utf-8") as file:
            subprocess.Popen([*self.enter, *command], stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def make(folder: Path, repository: Path, path: str) -> list[Node]:
    """Both nodes with sshd and munged, and a Slurm over them, as soon as it can take jobs.

    Args:
        folder: the daemons' files and logs; must be empty.
        repository: what stays visible if it lies in /tmp, which the nodes have for themselves.
        path: PATH of a login.
    """
    if os.getpid() != 1:
        sys.exit("the nodes need namespaces of their own: see the Makefile's test-clusters")
    _own_temporary_folder(repository)
    folder.mkdir(parents=True)
    _configure(folder, path)
    nodes = [Node("node1", ()), _second_node()]
    _connect(nodes)
    for node in nodes:
        node.run("hostname", node.name)
        for place in ("/dev/shm", "/run", "/var/lib/munge", "/var/log/munge"):
            node.run("mount", "-t", "tmpfs", "tmpfs", place)
        node.run("mkdir", "-p", "/run/sshd", "/run/munge", "/run/slurmd", "/run/slurmctld")
        node.start(folder / f"sshd-{node.name}.log", "/usr/sbin/sshd", "-D", "-e")
        node.start(folder / f"munged-{node.name}.log", "munged", "--foreground", "--force")
    nodes[0].start(folder / "slurmctld.log", "slurmctld", "-D")
    for node in nodes:
        _wait(f"munged on {node.name}", lambda node=node: node.run("sh", "-c", "munge -n | unmunge"))
        node.start(folder / f"slurmd-{node.name}.log", "slurmd", "-D", "-N", node.name)
        _wait(f"sshd on {node.name}", lambda node=node: node.run("ssh", node.name, "true"))
    _wait("Slurm", lambda: nodes[0].run("srun", "--nodes=2", "true"))
    return nodes


def _own_temporary_folder(repository: Path) -> None:
    inside = repository.is_relative_to("/tmp")
    if inside:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
        Path("/run/repository").mkdir()
        subprocess.run(["mount", "--bind", str(repository), "/run/repository"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/tmp"], check=True)
    if inside:
        repository.mkdir(parents=True)
        subprocess.run(["mount", "--bind", "/run/repository", str(repository)], check=True)


def _configure(folder: Path, path: str) -> None:
    """The daemons' own configurations, seen by these namespaces alone in place of the machine's."""
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    texts = {
        "/etc/ssh/sshd_config": SSHD.format(folder=folder, path=path),
        "/etc/ssh/ssh_config": SSH.format(folder=folder),
        "/etc/slurm/slurm.conf": SLURM.format(cores=os.cpu_count()),
        "/etc/munge/munge.key": "k" * 64,
        "/etc/hosts": "127.0.0.1 localhost\n10.1.0.1 node1\n10.1.0.2 node2\n",
    }
    for place in ("/etc/ssh", "/etc/slurm", "/etc/munge"):
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=700", "tmpfs", place], check=True)
    for place, text in texts.items():
        file = folder / Path(place).name
        file.write_text(text, encoding="utf-8")
        file.chmod(0o600 if place.endswith(".key") else 0o644)
        Path(place).touch()
        subprocess.run(["mount", "--bind", str(file), place], check=True)


def _second_node() -> Node:
    """A process that holds the second node's namespaces of network, name and mounts."""
    held = ["unshare", "--net", "--uts", "--mount", "sh", "-c", "echo; exec sleep infinity"]
    process = subprocess.Popen(held, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # it is there
    return Node("node2", ("nsenter", f"--target={process.pid}", "--net", "--uts", "--mount"))


def _connect(nodes: list[Node]) -> None:
    """A cable between the two."""
    second = nodes[1].enter[1].partition("=")[2]
    nodes[0].run("ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", second)
    for number, node in enumerate(nodes, start=1):
        node.run("ip", "address", "add", f"10.1.0.{number}/24", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            node.run("ip", "link", "set", interface, "up")


def _wait(what: str, succeeds: Callable[[], object], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            succeeds()
        except subprocess.CalledProcessError as error:
            if time.monotonic() > end:
                sys.exit(f"{what} did not come up in {seconds:.0f} s: {error.stderr}")
            time.sleep(0.2)
        else:
            return
