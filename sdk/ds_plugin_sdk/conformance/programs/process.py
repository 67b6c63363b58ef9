"""What a process of its own tells of the accelerator; its argument is one of the tasks at the end of this file."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ds_plugin_sdk.conformance.programs import give
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.settings import child_environment, settings

# What a child that works takes at most, with the import of torch where it is spawned.
_CHILD_SECONDS = 60.0


def _use(target: Target) -> float:
    """Compute something on the device and bring it to the host."""
    values = torch.arange(4.0).to(target.accelerator.current_device_name())
    target.accelerator.synchronize()
    return float((values * 2).sum().item())


def _rank(target: Target) -> dict[str, Any]:
    """What a rank that a launcher started sees."""
    accelerator = target.accelerator
    index = accelerator.current_device()
    count = accelerator.device_count()
    numbered = torch.empty(0, device=target.device_type).device.index is not None
    kind = int if numbered else torch.device
    return {
        "current_device": repr(index),
        "fits": type(index) is kind,
        "expected": kind.__name__,
        "device_count": count,
        "sum": _use(target),
    }


def _rank_device(target: Target) -> dict[str, Any]:
    """The same, once the rank has taken its device."""
    target.accelerator.set_device(settings.local_rank)
    return _rank(target)


def _child(connection: Connection, name: str, target: Target | None) -> None:
    """Use the device in a child; a forked one has the target already."""
    torch.set_num_threads(1)  # as torch's data loader does: threads do not survive a fork
    try:
        connection.send({"sum": _use(target or Target.find(name))})
    except Exception as error:
        connection.send({"raised": f"{type(error).__name__}: {error}"})
    connection.close()


def _in_child(method: str, name: str, target: Target | None) -> dict[str, Any]:
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(theirs, name, target), daemon=True)
    child.start()
    theirs.close()
    try:
        answer: dict[str, Any] = ours.recv() if ours.poll(_CHILD_SECONDS) else {"hung": True}
    except EOFError:
        answer = {"died": True}
    child.join(5)
    answer["exit"] = child.exitcode
    child.kill()
    return answer


def _fork_before_use(target: Target) -> dict[str, Any]:
    """Ask what DeepSpeed asks while it is imported, then fork; both processes use the device."""
    accelerator = target.accelerator
    accelerator.is_available()
    accelerator.device_count()
    accelerator.communication_backend_name()
    accelerator.is_bf16_supported()
    return {"child": _in_child("fork", target.name, target), "sum": _use(target)}


def _fork_after_use(target: Target) -> dict[str, Any]:
    first = _use(target)
    return {"child": _in_child("fork", target.name, target), "sum": _use(target), "first": first}


def _spawn(target: Target) -> dict[str, Any]:
    first = _use(target)
    return {"child": _in_child("spawn", target.name, None), "sum": _use(target), "first": first}


def _take_and_give_back(connection: Connection, name: str) -> None:
    """Allocate as many bytes as are asked for, and give them back at the next message; until it is 0."""
    target = Target.find(name)
    connection.send("ready")
    while size := connection.recv():
        held = torch.full((size,), 1, dtype=torch.uint8, device=target.accelerator.current_device_name())
        target.accelerator.synchronize()
        connection.send("taken")
        connection.recv()
        del held
        target.accelerator.empty_cache()
        connection.send("given back")


def _beside_another(target: Target) -> dict[str, Any]:
    """By how much `available_memory()` falls while another process holds some of the device's memory."""
    context: Any = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_take_and_give_back, args=(theirs, target.name), daemon=True)
    child.start()
    theirs.close()
    accelerator = target.accelerator
    size = min(512 << 20, accelerator.available_memory() // 8)
    falls = []
    ours.recv()
    for _ in range(5):
        before = accelerator.available_memory()
        for message in (size, "give back"):
            ours.send(message)
            ours.recv()
            if message == size:
                falls.append(before - accelerator.available_memory())
    ours.send(0)
    child.join(30)
    child.kill()
    return {"size": size, "falls": falls}


# What a script has in its globals when it ends.
_held: list[Any] = []


def _held_at_exit(target: Target) -> dict[str, Any]:
    """End while a script's globals have what a device gives, with work that is not done."""
    accelerator = target.accelerator
    device = accelerator.current_device_name()
    layer = torch.nn.Linear(256, 256).to(device)
    values = torch.ones(256, 256, device=device, requires_grad=True)
    loss = layer(values).square().sum()
    torch.autograd.backward(loss)
    _held.extend([layer, values, values[3:, 5:], loss, accelerator.pin_memory(torch.ones(1024))])
    if accelerator.Stream is not None:
        stream = accelerator.Stream()
        stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(stream):
            for _ in range(20):
                _held.append(values.detach() @ values.detach())
            _held.append(accelerator.current_stream().record_event())
        _held.append(stream)
    return {}


# Variables that torch reads: a plugin may choose for its device what a user has left open.
_OF_TORCH = tuple(f"the variable {name}" for name in ("TORCH", "PYTORCH_", "THP_"))

# What a script has set before it imports a plugin, or at least expects.
_before: dict[str, str] = {}


def _settings() -> dict[str, str]:
    """Settings of the process that are a script's to make."""
    return {
        "torch's default dtype": str(torch.get_default_dtype()),
        "torch's default device": str(torch.get_default_device()),
        "torch's number of threads": str(torch.get_num_threads()),
        "torch's deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "whether gradients are computed": str(torch.is_grad_enabled()),
        "torch's precision of float32 products": torch.get_float32_matmul_precision(),
        "the host's generator": str(hash(bytes(torch.get_rng_state().tolist()))),
        "the current folder": str(Path.cwd()),
        **{f"the handler of {each.name}": str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM)},
        **{f"the variable {name}": value for name, value in child_environment().items()},
    }


def _changed(target: Target) -> dict[str, Any]:
    """What importing and making the accelerator, and asking for its devices, has changed of them."""
    target.accelerator.device_count()
    after = _settings()
    added = [what for what in after if what not in _before and not what.startswith(_OF_TORCH)]
    every = [*_before, *added]
    return {what: [_before.get(what), after.get(what)] for what in every if after.get(what) != _before.get(what)}


_TASKS: dict[str, Callable[[Target], dict[str, Any]]] = {
    "rank": _rank,
    "rank_device": _rank_device,
    "fork_before_use": _fork_before_use,
    "fork_after_use": _fork_after_use,
    "spawn": _spawn,
    "held_at_exit": _held_at_exit,
    "changed": _changed,
    "beside_another": _beside_another,
}


def main() -> None:
    _before.update(_settings())
    try:
        give(_TASKS[sys.argv[2]](Target.find(sys.argv[1])))
    except Exception as error:
        traceback.print_exc()
        give({"failure": f"{type(error).__name__}: {error}"})
        sys.exit(1)


if __name__ == "__main__":
    main()
