"""R7: page-locked host memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from ds_plugin_sdk.conformance.check import Clause, check, expect, expect_equal
from ds_plugin_sdk.conformance.runtime.support import expect_raises, expect_type, host_waits, needs_streams, slow_work
from ds_plugin_sdk.conformance.target import Target


def _pins(target: Target) -> bool:
    return bool(getattr(target.accelerator, "_torch_pins_host_memory", True))


def _needs_pinning(target: Target) -> str | None:
    return None if _pins(target) else "the accelerator declares that pinning does nothing (_torch_pins_host_memory)"


def _needs(member: str, target: Target) -> str | None:
    return None if hasattr(target.accelerator, member) else f"the accelerator has no {member}() of its own"


def _host(shape: tuple[int, ...] = (3, 5)) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


@check(
    "runtime.pinned.content",
    Clause(
        "R7.1",
        "`pin_memory(tensor)` gives a host tensor of the same shape, dtype and content, however the tensor lies in "
        "memory, and also if it has no elements or is pinned already.",
        reason="Offloaded parameters and gradients live in it: parts and transposes of others, and ranks without any.",
    ),
)
def content(target: Target) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool):
        host = _host().to(dtype)
        pinned = target.accelerator.pin_memory(host)
        seen = (pinned.device.type, pinned.dtype, tuple(pinned.shape))
        expect_equal(seen, ("cpu", dtype, (3, 5)), f"device, dtype and shape of pin_memory() of a {dtype} tensor")
        expect(torch.equal(pinned, host), f"pin_memory() gave {pinned.tolist()}", why=f"expected {host.tolist()}")
    for label, host in _views().items():
        pinned = target.accelerator.pin_memory(host)
        expect_equal(tuple(pinned.shape), tuple(host.shape), f"shape of pin_memory() of {label}")
        same = torch.equal(pinned, host)
        expect(same, f"pin_memory() of {label} gave {pinned.tolist()}", why=f"expected {host.tolist()}")
        again = target.accelerator.pin_memory(pinned)
        same = torch.equal(again, host)
        expect(same, f"pin_memory() of {label} that is pinned gave {again.tolist()}", why=f"expected {host.tolist()}")


def _views() -> dict[str, torch.Tensor]:
    """Tensors that are no rows one after the other from the beginning of their memory on."""
    return {
        "a transposed tensor": _host().t(),
        "every other column": _host()[:, ::2],
        "the last rows": _host()[1:],
        "a tensor without elements": _host((0, 5)),
        "a number": _host()[0, 0],
    }


@check(
    "runtime.pinned.is_pinned",
    Clause(
        "R7.2",
        "`is_pinned(pin_memory(tensor))` is True, of its parts too, and `is_pinned(tensor)` of ordinary memory and of "
        "the device's False; all are bools.",
        reason="Offload copies without blocking only from memory that is pinned.",
    ),
)
def is_pinned(target: Target) -> None:
    ordinary = target.accelerator.is_pinned(_host())
    expect_type(ordinary, bool, "is_pinned(tensor)")
    expect_equal(ordinary, False, "is_pinned() of ordinary host memory")
    there = target.accelerator.is_pinned(torch.ones(4, device=target.device))
    expect_equal(there, False, "is_pinned() of a tensor of the device")
    if _pins(target):
        pinned = target.accelerator.pin_memory(_host())
        expect_equal(target.accelerator.is_pinned(pinned), True, "is_pinned(pinned)")
        expect_equal(
            target.accelerator.is_pinned(pinned.view(-1)[7:]), True, "is_pinned() of the end of a pinned tensor"
        )


@check(
    "runtime.pinned.is_a_copy",
    Clause(
        "R7.3",
        "Where pinning locks memory, `pin_memory(tensor)` is a copy: writing it leaves the original.",
        reason="Ordinary memory cannot be locked where it lies; the original may be reused meanwhile.",
    ),
    needs=_needs_pinning,
)
def is_a_copy(target: Target) -> None:
    host = _host()
    target.accelerator.pin_memory(host).fill_(-1.0)
    expect(torch.equal(host, _host()), "writing the pinned tensor changed the original")


@check(
    "runtime.pinned.make_copy",
    Clause(
        "R7.4",
        "`pin_memory(tensor, make_copy=False)` gives fresh memory of the tensor's shape and dtype: writing it leaves "
        "the original.",
        reason="Offloaded activations and the checkpoint writer make their staging buffers this way.",
    ),
)
def make_copy(target: Target) -> None:
    host = _host()
    fresh = target.accelerator.pin_memory(host, make_copy=False)
    seen = (fresh.device.type, fresh.dtype, tuple(fresh.shape))
    expect_equal(seen, ("cpu", torch.float32, (3, 5)), "device, dtype and shape of pin_memory(make_copy=False)")
    fresh.fill_(-1.0)
    expect(
        torch.equal(host, _host()),
        "writing pin_memory(tensor, make_copy=False) changed the tensor",
        why="it shares the tensor's memory",
    )
    if _pins(target):
        expect_equal(target.accelerator.is_pinned(fresh), True, "is_pinned() of pin_memory(make_copy=False)")


@check(
    "runtime.pinned.match_shape",
    Clause(
        "R7.5",
        "`pin_memory(tensor, make_copy=False, match_shape=False)` has one dimension with at least the tensor's number "
        "of elements.",
        reason="The checkpoint writer slices its flat buffer.",
    ),
)
def match_shape(target: Target) -> None:
    flat = target.accelerator.pin_memory(_host(), make_copy=False, match_shape=False)
    expect_equal(flat.dim(), 1, "dimensions of pin_memory(make_copy=False, match_shape=False)")
    expect(flat.numel() >= 15, f"it has {flat.numel()} elements", why="expected at least 15")


@check(
    "runtime.pinned.empty",
    Clause(
        "R7.6",
        "`pin_empty(*size, dtype=...)` and `pin_empty_like(tensor)` give fresh host memory of that shape and dtype, "
        "pinned where pinning locks memory; a device other than the CPU raises ValueError.",
        reason="Scratch buffers of offload and swapping.",
    ),
    needs=lambda target: _needs("pin_empty", target),
)
def empty(target: Target) -> None:
    accelerator = target.accelerator
    made = {
        "pin_empty(3, 5)": accelerator.pin_empty(3, 5, dtype=torch.float32),
        "pin_empty((3, 5))": accelerator.pin_empty((3, 5), dtype=torch.float32),
        "pin_empty_like(tensor)": accelerator.pin_empty_like(_host()),
        "pin_empty_like(int tensor, dtype=float32)": accelerator.pin_empty_like(_host().long(), dtype=torch.float32),
    }
    for call, tensor in made.items():
        seen = (tensor.device.type, tensor.dtype, tuple(tensor.shape))
        expect_equal(seen, ("cpu", torch.float32, (3, 5)), f"device, dtype and shape of {call}")
        expect_equal(accelerator.is_pinned(tensor), _pins(target), f"is_pinned() of {call}")
    expect_raises(lambda: accelerator.pin_empty(2, dtype=torch.float32, device="meta"), ValueError, "pin_empty(meta)")


@check(
    "runtime.pinned.unpin",
    Clause(
        "R7.7",
        "`unpin_memory(pinned)` returns, and the tensor can still be dropped and new memory be pinned.",
        reason="Offload releases its buffers early where it can.",
    ),
    needs=lambda target: _needs("unpin_memory", target),
)
def unpin(target: Target) -> None:
    pinned = target.accelerator.pin_memory(_host())
    target.accelerator.unpin_memory(pinned)
    del pinned
    again = target.accelerator.pin_memory(_host())
    expect(torch.equal(again, _host()), f"memory pinned after unpin_memory() holds {again.tolist()}")


@check(
    "runtime.pinned.copies",
    Clause(
        "R7.8",
        "Non-blocking copies from and to pinned memory, synchronized, bring the values; memory that is dropped "
        "meanwhile is not given out before its copy is done.",
        reason="Offload overlaps these copies with the computation.",
    ),
)
def copies(target: Target) -> None:
    accelerator = target.accelerator
    with slow_work(target) as keep_busy:
        source = accelerator.pin_memory(_host((1024,)))
        keep_busy()
        there = source.to(target.device, non_blocking=True)
        del source
        other = accelerator.pin_memory(torch.full((1024,), -1.0))
        back = accelerator.pin_memory(torch.zeros(1024))
        back.copy_(there.mul_(2), non_blocking=True)
        accelerator.synchronize()
        del other
    expect(torch.equal(back, 2 * _host((1024,))), f"what came back begins {back[:4].tolist()}", why="expected 0, 2, 4")


@check(
    "runtime.pinned.copies_in_the_background",
    Clause(
        "R7.10",
        "Non-blocking copies from and to pinned memory leave the host free: they return before the work before them "
        "is done.",
        reason="Offload starts the copies of a step while the device computes; one that waits undoes the overlap.",
    ),
    needs=lambda target: needs_streams(target) or (None if _pins(target) else "pinning locks no memory"),
    cases=lambda target: ({"by": by} for by in ("to(device)", "copy_ to the device", "copy_ to the host")),
)
def copies_in_the_background(target: Target, by: str) -> None:
    accelerator = target.accelerator
    host = accelerator.pin_memory(torch.zeros(1 << 10))
    there = torch.zeros(1 << 10, device=target.device)
    copies: dict[str, Callable[[], torch.Tensor]] = {
        "to(device)": lambda: host.to(target.device, non_blocking=True),
        "copy_ to the device": lambda: there.copy_(host, non_blocking=True),
        "copy_ to the host": lambda: host.copy_(there, non_blocking=True),
    }
    waits = host_waits(target, copies[by])
    expect(not waits, f"when {by} of pinned memory returned, all work before it was done", why="the host had to wait")


@check(
    "runtime.pinned.registration",
    Clause(
        "R7.9",
        "`register_host_memory` gives a bool, and `pin_memory_alignment()` a power of two.",
        reason="DeepSpeed's native pinning registers its own memory with the device's driver through them.",
    ),
    needs=lambda target: _needs("pin_memory_alignment", target),
)
def registration(target: Target) -> None:
    alignment = target.accelerator.pin_memory_alignment()
    expect_type(alignment, int, "pin_memory_alignment()")
    expect(alignment > 0 and alignment & (alignment - 1) == 0, f"pin_memory_alignment() is {alignment}")
    page = torch.empty(2 * alignment, dtype=torch.uint8)
    address = -(-page.data_ptr() // alignment) * alignment
    registered = target.accelerator.register_host_memory(address, alignment)
    expect_type(registered, bool, "register_host_memory()")
    if registered:
        target.accelerator.unregister_host_memory(address)


@check(
    "runtime.pinned.copies_of_a_stream",
    Clause(
        "R7.11",
        "Pinned memory that is dropped is not given out before the copies of all streams from it are done.",
        reason="Offload copies on side streams; the current one says nothing of them.",
    ),
    needs=needs_streams,
)
def copies_of_a_stream(target: Target) -> None:
    accelerator, side = target.accelerator, target.accelerator.Stream()
    with slow_work(target) as keep_busy:
        source = accelerator.pin_memory(_host((1024,)))
        with accelerator.stream(side):
            for _ in range(4):
                keep_busy()
            there = source.to(target.device, non_blocking=True)
        del source
        accelerator.current_stream().synchronize()
        other = accelerator.pin_memory(torch.full((1024,), -1.0))
        side.synchronize()
        seen = there.cpu()
        del other
    expect(
        torch.equal(seen, _host((1024,))), f"what a side stream copied begins {seen[:4].tolist()}", why="expected 0, 1"
    )


@check(
    "runtime.pinned.ordinary_copies",
    Clause(
        "R7.12",
        "A non-blocking copy to the device from memory that is not pinned has read it when it returns.",
        reason="Batches are moved by `to(device, non_blocking=True)`, pinned or not, and then filled again.",
    ),
    needs=lambda target: "a tensor of the host is not copied there" if target.device_type == "cpu" else None,
)
def ordinary_copies(target: Target) -> None:
    with slow_work(target) as keep_busy:
        source = _host((1024,))
        keep_busy()
        there = source.to(target.device, non_blocking=True)
        source.fill_(-1.0)
        seen = there.cpu()
    expect(torch.equal(seen, _host((1024,))), f"what was copied begins {seen[:4].tolist()}", why="expected 0, 1, 2")


@check(
    "runtime.pinned.converted_copies",
    Clause(
        "R7.13",
        "Non-blocking copies from and to pinned memory that convert numbers, or have gaps, bring the values too.",
        reason="Offloaded masters in float32 are copied into parameters in 16 bits, gradients back, part by part.",
    ),
    cases=lambda target: [*({"how": how} for how in _VIEWS), *({"how": how, "to": "the host"} for how in _VIEWS)],
)
def converted_copies(target: Target, how: str, to: str = "the device") -> None:
    accelerator = target.accelerator

    def full(number: float, shape: torch.Size, dtype: torch.dtype, *, on_device: bool) -> torch.Tensor:
        if on_device:
            return torch.full(shape, number, dtype=dtype, device=target.device)
        pinned: torch.Tensor = accelerator.pin_memory(torch.full(shape, number, dtype=dtype))
        return pinned

    numbers, back, dtype = _host((32, 32)), to == "the host", torch.int32 if how == "converted" else torch.float32
    expected = _VIEWS[how](numbers).to(dtype)
    there = full(0, expected.shape, dtype, on_device=not back)
    accelerator.synchronize()
    with slow_work(target) as keep_busy:
        source = numbers.to(target.device, copy=True) if back else accelerator.pin_memory(numbers)
        keep_busy()
        there.copy_(_VIEWS[how](source), non_blocking=True)
        del source
        others = [full(-1, numbers.shape, numbers.dtype, on_device=back) for _ in range(2)]
        accelerator.synchronize()
        del others
    seen = there.cpu()
    expect(
        torch.equal(seen, expected), f"what was copied begins {seen[0, :4].tolist()}", why=f"{expected[0, :4].tolist()}"
    )


_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "converted": lambda tensor: tensor,
    "with gaps": lambda tensor: tensor[:, ::2],
    "transposed": lambda tensor: tensor.t(),
}


@check(
    "runtime.pinned.blocking_copies",
    Clause(
        "R7.14",
        "A blocking copy from or to pinned memory is done when it returns.",
        reason="The host fills the memory again, or reads it, at once: only by `non_blocking=True` it says otherwise.",
    ),
    needs=_needs_pinning,
    cases=lambda target: ({"to": to} for to in ("the device", "the host")),
)
def blocking_copies(target: Target, to: str) -> None:
    accelerator, expected = target.accelerator, _host((1024,))
    there = expected.to(target.device) if to == "the host" else torch.zeros(1024, device=target.device)
    pinned = accelerator.pin_memory(torch.full((1024,), -1.0) if to == "the host" else expected)
    accelerator.synchronize()
    with slow_work(target) as keep_busy:
        keep_busy()
        if to == "the host":
            seen = pinned.copy_(there).clone()
        else:
            there.copy_(pinned)
            pinned.fill_(-1.0)
            seen = there.cpu()
    expect(torch.equal(seen, expected), f"what was copied begins {seen[:4].tolist()}", why="expected 0, 1, 2, 3")


@check(
    "runtime.pinned.copies_in_order",
    Clause(
        "R7.15",
        "Non-blocking copies from and to pinned memory keep their place among the work of their stream: they write "
        "after what was submitted before has read, and are read after they have written.",
        reason="Devices copy by engines of their own, and offload uses parameters right after it has copied them.",
    ),
    needs=_needs_pinning,
    cases=lambda target: ({"to": to} for to in ("the device", "the host")),
)
def copies_in_order(target: Target, to: str) -> None:
    accelerator, new = target.accelerator, _host((1024,))
    there = torch.full((1024,), -1.0, device=target.device)
    pinned = accelerator.pin_memory(new if to == "the device" else torch.full((1024,), -3.0))
    accelerator.synchronize()
    with slow_work(target) as keep_busy:
        keep_busy()
        before = there.clone()
        if to == "the device":
            there.copy_(pinned, non_blocking=True)
        else:
            there.add_(1.0)
            pinned.copy_(there, non_blocking=True)
            there.fill_(-2.0)
        after = there.clone()
        accelerator.synchronize()
    early = before.cpu()
    expect(bool((early == -1).all()), f"values read before the copy begin {early[:4].tolist()}", why="expected -1")
    if to == "the device":
        begin = after[:4].tolist()
        expect(torch.equal(after.cpu(), new), f"values read after the copy begin {begin}", why="expected 0, 1, 2, 3")
    else:
        expect(not pinned.any(), f"what was copied to the host begins {pinned[:4].tolist()}", why="expected 0")


def _resident_bytes() -> int:
    """Of this process, those that are locked among them."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@check(
    "runtime.pinned.given_back",
    Clause(
        "R7.16",
        "Pinned memory that is dropped after a copy from it is used again, or given back.",
        reason="A data loader pins a batch in each step; a host that keeps them all is full after hours.",
    ),
    needs=_needs_pinning,
)
def given_back(target: Target) -> None:
    accelerator, piece, times = target.accelerator, 8 << 20, 60
    side = accelerator.Stream() if accelerator.Stream is not None else None
    there = torch.zeros(piece, dtype=torch.uint8, device=target.device)
    accelerator.synchronize()

    def step() -> None:
        batch = accelerator.pin_memory(torch.ones(piece, dtype=torch.uint8))
        with accelerator.stream(side):
            there.copy_(batch, non_blocking=True)
        del batch
        accelerator.synchronize()

    for _ in range(4):  # a pool may grow first
        step()
    before = _resident_bytes()
    for _ in range(times):
        step()
    grown = _resident_bytes() - before
    what = f"after {times} pinned tensors of {piece >> 20} MiB, each dropped, the process has {grown >> 20} MiB more"
    expect(grown < times * piece // 4, what, why="they are neither used again nor given back")
