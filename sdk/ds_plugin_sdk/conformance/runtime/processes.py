"""R11: ranks, launchers, fork and spawn."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from ds_plugin_sdk.conformance import programs
from ds_plugin_sdk.conformance.check import Clause, check, expect, expect_equal
from ds_plugin_sdk.conformance.runtime.support import expect_type, needs_indices, needs_two_devices
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.settings import child_environment

# 2 * (0 + 1 + 2 + 3): what the program computes on the device.
_SUM = 12.0


def _tell(target: Target, task: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    told: dict[str, Any] = programs.run("process", target, task, timeout=240.0, environment=environment)[0][0]
    return told


@check(
    "runtime.processes.rank",
    Clause(
        "R11.1",
        "In a process that a launcher started with `LOCAL_RANK`, `current_device()` is still what R1.6 says, and the "
        "device computes.",
        reason="Read from the environment it is easily a string, which torch takes for a device's name.",
    ),
    timeout=250.0,
)
def rank(target: Target) -> None:
    told = _tell(target, "rank", {"LOCAL_RANK": "0"})
    what = f"current_device() with LOCAL_RANK=0 is {told['current_device']}"
    expect(told["fits"], what, why=f"expected {told['expected']}")
    expect_equal(told["sum"], _SUM, "a sum computed by a rank")


@check(
    "runtime.processes.visible_devices",
    Clause(
        "R11.2",
        "`visible_devices_envs()` is a list of at least one variable's name; `set_visible_devices_envs(env, ids)` sets "
        "each of them in `env`, and in no other process's environment.",
        reason="The launcher reads and deletes the first, and logs each of them in every rank's environment.",
    ),
)
def visible_devices(target: Target) -> None:
    names = target.accelerator.visible_devices_envs()
    expect_type(names, list, "visible_devices_envs()")
    expect(bool(names) and all(type(name) is str and name for name in names), f"visible_devices_envs() is {names}")
    environment: dict[str, str] = {"UNRELATED": "1"}
    before = child_environment()
    target.accelerator.set_visible_devices_envs(environment, [0, 1])
    after = child_environment()
    changed = {name for name in names if after.get(name) != before.get(name)}
    expect(
        not changed, f"set_visible_devices_envs() changed {changed} of the process itself", why="expected of env alone"
    )
    expect_equal(environment.pop("UNRELATED", None), "1", "an unrelated variable after set_visible_devices_envs()")
    missing = [name for name in names if name not in environment]
    expect(not missing, f"set_visible_devices_envs() does not set {missing}", why=f"it set {environment}")
    strange = {name: environment[name] for name in names if environment[name] != "0,1"}
    expect(not strange, f"set_visible_devices_envs(env, [0, 1]) set {strange}", why="expected 0,1")


@check(
    "runtime.processes.hidden_devices",
    Clause(
        "R11.3",
        "A process that is started with one device visible has one device, and computes on it.",
        reason="`deepspeed --include` hides devices this way; a rank counts what it sees.",
    ),
    needs=needs_two_devices,
    timeout=250.0,
)
def hidden_devices(target: Target) -> None:
    environment: dict[str, str] = {}
    target.accelerator.set_visible_devices_envs(environment, [1])
    told = _tell(target, "rank", environment)
    expect_equal(told["device_count"], 1, f"device_count() of a process with {environment}")
    expect_equal(told["sum"], _SUM, f"a sum computed by a process with {environment}")


@check(
    "runtime.processes.exported",
    Clause(
        "R11.4",
        "`export_envs()` is a list of prefixes of variables' names, each of more than a letter.",
        reason="The launcher carries variables with these prefixes to other nodes; an empty one is all, a letter many.",
    ),
)
def exported(target: Target) -> None:
    given = target.accelerator.export_envs()
    expect_type(given, list, "export_envs()")
    strange = [prefix for prefix in given if type(prefix) is not str or len(prefix) < 2]
    expect(not strange, f"export_envs() has {strange}", why="expected names, or beginnings of names")


@check(
    "runtime.processes.data_loader",
    Clause(
        "R11.5",
        "A data loader with forked workers, and pinned memory where pinning locks memory, gives right batches after "
        "the device was used.",
        reason="Every training script has one.",
    ),
    isolated=True,
    timeout=120.0,
)
def data_loader(target: Target) -> None:
    (torch.ones(256, 256, device=target.device) @ torch.ones(256, 256, device=target.device)).sum().item()
    pins = bool(getattr(target.accelerator, "_torch_pins_host_memory", True))
    data = TensorDataset(torch.arange(32.0))
    loader = DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork", pin_memory=pins)
    seen = [value for (batch,) in loader for value in batch.to(target.device, non_blocking=True).cpu().tolist()]
    expect_equal(seen, [float(number) for number in range(32)], "values that a data loader brought to the device")


@check(
    "runtime.processes.fork_before_use",
    Clause(
        "R11.6",
        "A process that has only asked for counts, names and dtypes can be forked, and the child can use the device.",
        reason="DeepSpeed asks for these while it is imported; the launcher and tests fork afterwards.",
    ),
    timeout=250.0,
)
def fork_before_use(target: Target) -> None:
    told = _tell(target, "fork_before_use")
    expect_equal(told["child"].get("sum"), _SUM, f"a sum in a child forked before use ({told['child']})")
    expect_equal(told["sum"], _SUM, "a sum in the parent afterwards")


@check(
    "runtime.processes.fork_after_use",
    Clause(
        "R11.7",
        "In a child forked after the device was used, using the device works or raises; it neither hangs nor computes "
        "wrongly, and the parent continues.",
        reason="A data set that touches the device in a worker must end in an error that can be read.",
    ),
    timeout=250.0,
)
def fork_after_use(target: Target) -> None:
    told = _tell(target, "fork_after_use")
    child = told["child"]
    expect("hung" not in child, "a child forked after use hangs when it uses the device", why="expected an error")
    expect("died" not in child, f"a child forked after use died: {child}", why="expected an error")
    expect("raised" in child or child.get("sum") == _SUM, f"a child forked after use computed {child}")
    expect_equal(told["sum"], _SUM, "a sum in the parent afterwards")


@check(
    "runtime.processes.spawn",
    Clause(
        "R11.8",
        "A spawned child can use the device while its parent does.",
        reason="Ranks of one machine share its devices; ZenFlow's worker is spawned.",
    ),
    timeout=250.0,
)
def spawn(target: Target) -> None:
    told = _tell(target, "spawn")
    expect_equal(told["child"].get("sum"), _SUM, f"a sum in a spawned child ({told['child']})")
    expect_equal(told["sum"], _SUM, "a sum in the parent afterwards")


@check(
    "runtime.processes.all_ranks",
    Clause(
        "R11.9",
        "`set_device` takes the local rank of every process that a launcher starts: all below `device_count()`, in "
        "processes of their own.",
        reason="Each rank of a machine does so first of all.",
    ),
    needs=needs_indices,
    timeout=250.0,
)
def all_ranks(target: Target) -> None:
    ranks = int(target.accelerator.device_count())
    told = programs.run("process", target, "rank_device", timeout=240.0, ranks=min(ranks, 2))
    expect_equal([one[0]["current_device"] for one in told], [str(r) for r in range(len(told))], "each rank's device")
    expect_equal([one[0]["sum"] for one in told], [_SUM] * len(told), "sums computed by the ranks")


@check(
    "runtime.processes.settings",
    Clause(
        "R11.11",
        "Importing and making the accelerator leaves the process as it is: torch's default dtype and device, threads, "
        "precision and deterministic algorithms, the host's generator, the folder, handlers of signals, and the "
        "environment: no variable is changed, and none added but torch's own.",
        reason="`import deepspeed` does it for every script, which may have made these settings, and counts on them.",
    ),
    timeout=250.0,
)
def settings(target: Target) -> None:
    told = programs.run("process", target, "changed", timeout=240.0, untouched=True)
    changed: dict[str, Any] = told[0][0]
    for what, (before, after) in changed.items():
        expect(False, f"{what} is {after} once the accelerator was made", why=f"it was {before}")


@check(
    "runtime.processes.held_at_exit",
    Clause(
        "R11.10",
        "A process ends with status 0 while its globals still have tensors, views, pinned memory, streams with pending "
        "work, events, and a graph of gradients.",
        reason="Most scripts never drop their model; a launcher takes any other status for a failed job.",
    ),
    timeout=250.0,
)
def held_at_exit(target: Target) -> None:
    (outcome,) = programs.run_to_the_end("process", target, "held_at_exit", timeout=120.0)
    code, results, printed = outcome
    ended = "was killed after 120 s" if code is None else f"ended with status {code}"
    failed = next((result["failure"] for result in results if "failure" in result), "")
    expect(code == 0, f"a process that held objects of the device {ended}", why=f"{failed} It printed last:\n{printed}")
