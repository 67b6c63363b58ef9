"""R1: names, indices and the current device."""

from __future__ import annotations

import contextlib
import copy
import io
import time
from typing import Any

import torch

from ds_plugin_sdk.accelerator_names import misnamed
from ds_plugin_sdk.conformance.check import Clause, check, expect, expect_equal
from ds_plugin_sdk.conformance.runtime.support import (
    SLOW_SECONDS,
    current_device_kept,
    each_current,
    expect_raises,
    expect_type,
    in_threads,
    indexed,
    indices,
    made_current,
    needs_indices,
    needs_streams,
    needs_two_devices,
    place,
    slow_work,
)
from ds_plugin_sdk.conformance.target import Target


@check(
    "runtime.device.name",
    Clause(
        "R1.1",
        "`device_name()` is the torch device type: a string without an index that `torch.device` takes.",
        reason="DeepSpeed passes it to `torch.autocast`, `GradScaler` and `.to()`, compares it with names.",
    ),
)
def name(target: Target) -> None:
    given = target.accelerator.device_name()
    expect_type(given, str, "device_name()")
    parsed = torch.device(given)
    expect(parsed.index is None, f"device_name() is {given!r}, with an index", why="expected the type alone")
    expect_equal(parsed.type, given, "the device type that torch reads in device_name()")


@check(
    "runtime.device.private_name",
    Clause(
        "R1.2",
        "The attribute `_name` equals `device_name()`.",
        reason="ZeRO-3's partial offload uses it as a device, and `ds_report` prints it.",
    ),
)
def private_name(target: Target) -> None:
    expect_equal(getattr(target.accelerator, "_name", None), target.accelerator.device_name(), "the attribute _name")


@check(
    "runtime.device.name_of_index",
    Clause(
        "R1.3",
        "`device_name(i)` names device `i`: a tensor made there lies on the device of this type and index, or of this "
        "type where torch has no indices. `i` may be the text of a number.",
        reason="The engine's device is `torch.device(device_name(local_rank))`, and zero.Init's that of "
        '`os.environ["LOCAL_RANK"]`; all parameters go there.',
    ),
    cases=each_current,
)
def name_of_index(target: Target, current: str = "") -> None:
    with made_current(target, current):
        for index in indices(target):
            for given in (index, str(index)):
                text = target.accelerator.device_name(given)
                expect_type(text, str, f"device_name({given!r})")
                made = torch.empty(0, device=text)
                expect_equal(made.device, place(target, index), f"device of a tensor made on device_name({given!r})")


@check(
    "runtime.device.count",
    Clause(
        "R1.4",
        "`device_count()` is an int of at least 1, the same at each call.",
        reason="The launcher starts so many ranks; DeepSpeed divides the world size by it to count nodes.",
    ),
)
def count(target: Target) -> None:
    given = target.accelerator.device_count()
    expect_type(given, int, "device_count()")
    expect(given >= 1, f"device_count() is {given}", why="expected at least 1")
    expect_equal(target.accelerator.device_count(), given, "device_count() at a second call")


@check(
    "runtime.device.available",
    Clause(
        "R1.5",
        "`is_available()` is True where `device_count()` is at least 1.",
        reason="ZeRO and the fp16 optimizers raise SystemError where it is false.",
    ),
)
def available(target: Target) -> None:
    expect_type(target.accelerator.is_available(), bool, "is_available()")
    expect_equal(target.accelerator.is_available(), target.accelerator.device_count() >= 1, "is_available()")


@check(
    "runtime.device.current",
    Clause(
        "R1.6",
        "`current_device()` is an int, the index of the current device; where torch does not number devices, their "
        "`torch.device`.",
        reason="ZeRO and inference use it as an index and as a tensor's `device=`; generators are looked up by it.",
    ),
)
def current(target: Target) -> None:
    given = target.accelerator.current_device()
    if not indexed(target):
        expect_equal(given, place(target, 0), "current_device(), which torch must take as a device,")
        return
    expect_type(given, int, "current_device()")
    expect(given in indices(target), f"current_device() is {given} of {len(indices(target))} devices")
    made = torch.empty(0, device=target.device_type).device
    expect_equal(given, made.index, "current_device(), where new tensors without an index lie,")


@check(
    "runtime.device.current_name",
    Clause(
        "R1.7",
        "`current_device_name()` names the current device, with its index where torch has indices.",
        reason="DeepSpeed's most used member: the `device=` of every buffer.",
    ),
)
def current_name(target: Target) -> None:
    text = target.accelerator.current_device_name()
    expect_type(text, str, "current_device_name()")
    expected = torch.empty(0, device=target.device_type).device
    expect_equal(torch.device(text), expected, "the device that current_device_name() names")


@check(
    "runtime.device.object",
    Clause(
        "R1.8",
        "`device(i)` is device `i` as a `torch.device`, `device()` the current one.",
        reason="The engine's device where there is no launcher: parameters are moved to it.",
    ),
    cases=each_current,
)
def device_object(target: Target, current: str = "") -> None:
    with made_current(target, current):
        for arguments in ((), *((index,) for index in indices(target))):
            given = target.accelerator.device(*arguments)
            call = f"device({', '.join(map(str, arguments))})"
            expect(isinstance(given, torch.device), f"{call} is {given!r}", why="expected a torch.device")
            index = arguments[0] if arguments else target.accelerator.current_device()
            made = torch.empty(0, device=given)
            expect_equal(made.device, place(target, index), f"device of a tensor made on {call}")


@check(
    "runtime.device.set",
    Clause(
        "R1.9",
        "After `set_device(i)`, device `i` is current for `current_device()`, for `current_device_name()` and for new "
        "tensors. A device that torch does not number accepts any local rank. `i` may be a `torch.device`.",
        reason="The engine calls it with the local rank before anything is allocated, zero.Init with a device.",
    ),
)
def set_device(target: Target) -> None:
    with current_device_kept(target):
        given = list(reversed(indices(target)))
        for each in (*given, *(place(target, index) for index in given)):
            target.accelerator.set_device(each)
            if not indexed(target):
                continue
            index = each.index if isinstance(each, torch.device) else each
            after = f"after set_device({each!r})"
            expect_equal(target.accelerator.current_device(), index, f"current_device() {after}")
            expect_equal(
                torch.device(target.accelerator.current_device_name()).index, index, f"the named index {after}"
            )
            made = torch.empty(0, device=target.device_type)
            expect_equal(made.device.index, index, f"index of a new tensor's device {after}")


@check(
    "runtime.device.set_out_of_range",
    Clause(
        "R1.10",
        "`set_device(i)` raises where there is no device `i`, and the current device stays, as it does where `i` is "
        "negative.",
        reason="More ranks than devices would otherwise share one device without an error.",
    ),
    needs=needs_indices,
)
def set_out_of_range(target: Target) -> None:
    beyond = len(indices(target))
    with current_device_kept(target):
        before = target.accelerator.current_device()
        kinds = (RuntimeError, ValueError, AssertionError, IndexError)
        expect_raises(lambda: target.accelerator.set_device(beyond), kinds, f"set_device({beyond})")
        expect_equal(target.accelerator.current_device(), before, "current_device() after a rejected set_device()")
        with contextlib.suppress(*kinds):  # torch.cuda does nothing there
            target.accelerator.set_device(-1)
        expect_equal(target.accelerator.current_device(), before, "current_device() after set_device(-1)")


@check(
    "runtime.device.allocate_out_of_range",
    Clause(
        "R1.11",
        "A tensor cannot be made on a device that `device_count()` does not count.",
        reason="The count and the devices are one fact; the launcher trusts the count.",
    ),
    needs=needs_indices,
)
def allocate_out_of_range(target: Target) -> None:
    beyond = f"{target.device_type}:{len(indices(target))}"
    expect_raises(lambda: torch.ones(1, device=beyond), RuntimeError, f"torch.ones(1, device={beyond!r})")


@check(
    "runtime.device.synchronize",
    Clause(
        "R1.12",
        "`synchronize()` returns when all work given to the current device is done.",
        reason="Called before teardown, around timers and after non-blocking copies to the host.",
    ),
    cases=each_current,
)
def synchronize(target: Target, current: str = "") -> None:
    host = target.accelerator.pin_memory(torch.zeros(1 << 10))
    with made_current(target, current), slow_work(target) as keep_busy:
        values = torch.zeros(1 << 10, device=target.device)
        target.accelerator.synchronize()
        keep_busy()
        values.fill_(7.0)
        host.copy_(values, non_blocking=True)
        target.accelerator.synchronize()
        seen = set(host.tolist())
    expect_equal(seen, {7.0}, "values that a non-blocking copy had brought to the host when synchronize() returned")


@check(
    "runtime.device.synchronize_streams",
    Clause(
        "R1.20",
        "`synchronize()` waits for the work of all streams of the current device.",
        reason="Offload and communication work on side streams when a step ends or a checkpoint is written.",
    ),
    needs=needs_streams,
)
def synchronize_streams(target: Target) -> None:
    accelerator = target.accelerator
    host, values = accelerator.pin_memory(torch.zeros(1 << 10)), torch.zeros(1 << 10, device=target.device)
    accelerator.synchronize()
    with slow_work(target) as keep_busy:
        with accelerator.stream(accelerator.Stream()):
            keep_busy()
            values.fill_(7.0)
            host.copy_(values, non_blocking=True)
        accelerator.synchronize()
        seen = set(host.tolist())
    expect_equal(seen, {7.0}, "values that a side stream had copied to the host when synchronize() returned")


@check(
    "runtime.device.synchronize_index",
    Clause(
        "R1.13",
        "`synchronize(i)` waits for device `i`, whichever is current, and leaves the current device.",
        reason="DeepSpeed passes the index of a device that another thread may have left.",
    ),
    needs=needs_two_devices,
    cases=lambda target: [{}, {"of": "device 0"}],
)
def synchronize_index(target: Target, of: str = "") -> None:
    busy, current = (0, 1) if of else (1, 0)
    with current_device_kept(target):
        target.accelerator.set_device(busy)
        host = target.accelerator.pin_memory(torch.zeros(1 << 10))
        values = torch.zeros(1 << 10, device=f"{target.device_type}:{busy}")
        target.accelerator.synchronize(busy)
        with slow_work(target) as keep_busy:
            keep_busy()
            values.fill_(7.0)
            host.copy_(values, non_blocking=True)
            target.accelerator.set_device(current)
            target.accelerator.synchronize(busy)
            seen = set(host.tolist())
            after = f"current_device() after synchronize({busy}) on device {current}"
            expect_equal(target.accelerator.current_device(), current, after)
            target.accelerator.set_device(busy)
    expect_equal(seen, {7.0}, f"values that device {busy} had copied to the host when synchronize({busy}) returned")


@check(
    "runtime.device.synchronize_idle",
    Clause(
        "R1.14",
        "`synchronize()` of an idle device returns at once.",
        reason="DeepSpeed calls it at 46 places, several in each step.",
    ),
)
def synchronize_idle(target: Target) -> None:
    target.accelerator.synchronize()
    begin = time.perf_counter()
    for _ in range(10):
        target.accelerator.synchronize()
    seconds = (time.perf_counter() - begin) / 10
    expect(seconds < SLOW_SECONDS / 2, f"synchronize() of an idle device took {seconds * 1000:.0f} ms")


@check(
    "runtime.device.on_accelerator",
    Clause(
        "R1.15",
        "`on_accelerator(tensor)` is True for every tensor on this type of device, whatever its index, view or class, "
        "and False for all others.",
        reason="It guards `record_stream`, offload and kernels; a wrong answer takes the host's path.",
    ),
)
def on_accelerator(target: Target) -> None:
    base = torch.ones(4, 4, device=target.device)
    tensors = {
        "a tensor": base,
        "a view": base[1:, ::2],
        "an empty tensor": base[:0],
        "a parameter": torch.nn.Parameter(base.clone()),
        **{f"a tensor of device {i}": torch.ones(1, device=target.accelerator.device_name(i)) for i in indices(target)},
    }
    for what, tensor in tensors.items():
        expect_equal(target.accelerator.on_accelerator(tensor), True, f"on_accelerator({what} on {tensor.device})")
    meta = torch.ones(1, device="meta")
    expect_equal(target.accelerator.on_accelerator(meta), False, "on_accelerator(a tensor on meta)")
    host = target.accelerator.on_accelerator(torch.ones(1))
    expect_equal(host, target.device_type == "cpu", "on_accelerator(a tensor on the CPU)")


@check(
    "runtime.device.round_trip",
    Clause(
        "R1.16",
        "A tensor moved to any device and back is the same, in every dtype that DeepSpeed moves, view or not, to the "
        "smallest and the largest number.",
        reason="Checkpoints, offload and every batch make this trip.",
    ),
    cases=lambda target: (
        {"dtype": dtype}
        for dtype in ("float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool", "int8", "float64")
        if dtype != "float64" or target.accelerator.is_fp64_supported()
    ),
)
def round_trip(target: Target, dtype: str) -> None:
    generator = torch.Generator().manual_seed(1)
    host = (torch.randn(6, 10, generator=generator) * 3).to(getattr(torch, dtype))
    views = {"whole": host, "transposed": host.t(), "strided": host[:, ::2], "empty": host[:0], "scalar": host[2, 3]}
    views["full-range"] = _extremes(host.dtype)
    for index in indices(target):
        for what, view in views.items():
            back = view.to(target.accelerator.device_name(index)).cpu()
            expect(torch.equal(back, view), f"a {what} {dtype} tensor came back from device {index} as {back.tolist()}")


def _extremes(dtype: torch.dtype) -> torch.Tensor:
    """The ends of a dtype, and of int64 a number that is another one in 32 bits and in float32."""
    if dtype == torch.bool:
        return torch.tensor([True, False])
    if dtype.is_floating_point:
        ends = torch.finfo(dtype)
        return torch.tensor([ends.min, ends.max, ends.tiny, 1 + ends.eps, float("inf")], dtype=dtype)
    numbers = torch.iinfo(dtype)
    return torch.tensor([numbers.min, numbers.max, min(2**40 + 3, numbers.max)], dtype=dtype)


@check(
    "runtime.device.saved",
    Clause(
        "R1.26",
        "A tensor of each device that `torch.save` has written is read by `torch.load` as one of that device, or of "
        "the one that `map_location` names, the host among them, in its dtype, and what shared memory shares it again; "
        "its `copy.deepcopy` is a copy on its device.",
        reason="Checkpoints and best weights are saved and read this way, and averaged models are deep copies.",
    ),
)
def saved(target: Target) -> None:
    host = torch.arange(6.0).view(2, 3)
    for index in indices(target):
        there, file = torch.nn.Parameter(host.to(target.accelerator.device_name(index), copy=True)), io.BytesIO()
        torch.save({"weight": there}, file)
        places: list[Any] = [None, "cpu", *(place(target, other) for other in indices(target))]
        for given in places:
            file.seek(0)
            read = torch.load(file, map_location=given, weights_only=True)["weight"]
            seen = (read.device, read.tolist())
            expected = (there.device if given is None else torch.device(given), host.tolist())
            expect_equal(seen, expected, f"what torch.load(map_location={given!r}) read of a tensor of {there.device}")
        copied = copy.deepcopy(there)
        there.data.fill_(-1.0)
        expect_equal((copied.device, copied.tolist()), (there.device, host.tolist()), "a deep copy")
        expect_equal(copied.requires_grad, True, "requires_grad of a deep copy of a parameter")
    for dtype in (*target.dtypes, torch.int64, torch.uint8, torch.bool):
        _expect_saved(target, host.to(dtype).to(target.device))


def _expect_saved(target: Target, tensor: torch.Tensor) -> None:
    """Expect that a tensor, and a part of its memory that was saved with it, are read as they were."""
    file = io.BytesIO()
    torch.save({"all": tensor, "row": tensor[1]}, file)
    file.seek(0)
    read = torch.load(file, map_location=target.device, weights_only=True)
    for name, written in (("all", tensor), ("row", tensor[1])):
        seen, expected = ((each.dtype, each.tolist()) for each in (read[name], written))
        expect_equal(seen, expected, f"dtype and values of what torch.load read of {tensor.dtype}")
    read["all"].zero_()
    same = read["row"].tolist() == read["all"][1].tolist()
    expect(same, "what was saved as a row of a tensor is read with memory of its own", why="tied weights stay tied")


@check(
    "runtime.device.members_replaceable",
    Clause(
        "R1.17",
        "Methods can be replaced on the instance: it has a `__dict__`, and they are no properties.",
        reason="ZenFlow's worker replaces is_available, device_count and current_device.",
    ),
)
def members_replaceable(target: Target) -> None:
    for member in ("is_available", "device_count", "current_device"):
        try:
            setattr(target.accelerator, member, lambda: "replaced")
            expect_equal(getattr(target.accelerator, member)(), "replaced", f"{member}() after it was replaced")
        except AttributeError as error:
            expect(False, f"{member} cannot be replaced on the instance", why=str(error))
        finally:
            vars(target.accelerator).pop(member, None)


@check(
    "runtime.device.contextual",
    Clause(
        "R1.18",
        "The device type has torch's device module and autocast: `torch.get_device_module(device_name())` and "
        "`torch.autocast(device_type=device_name())` work; the latter also of what is float32 in linear layers, "
        "convolutions and batches of products, and not where it is switched off inside, nor after an error.",
        reason="DeepSpeed's torch_autocast and activation checkpointing go through both.",
    ),
    cases=lambda target: ({"dtype": str(dtype).removeprefix("torch.")} for dtype in _half_dtypes(target)),
)
def contextual(target: Target, dtype: str) -> None:
    torch.get_device_module(target.device_type)
    left = torch.ones(4, 4, device=target.device)
    with torch.autocast(device_type=target.device_type, dtype=getattr(torch, dtype)):
        product = left @ left
    expect_equal(str(product.dtype), f"torch.{dtype}", f"dtype of a matrix product under autocast to {dtype}")
    expect_equal(set(product.float().cpu().flatten().tolist()), {4.0}, "that product's values")
    functional, batch = torch.nn.functional, torch.ones(2, 4, 4, device=target.device)
    with torch.autocast(device_type=target.device_type, dtype=getattr(torch, dtype)):
        products = {
            "linear": functional.linear(batch.to(product.dtype), left, left[0]),
            "bmm": torch.bmm(batch, batch),
            "conv1d": functional.conv1d(batch, batch),
            "conv2d": functional.conv2d(batch[None], batch[:, None].expand(2, 2, 4, 4)),
        }
    for name, made in products.items():
        expect_equal(str(made.dtype), f"torch.{dtype}", f"dtype of {name} under autocast to {dtype}")
    with torch.autocast(device_type=target.device_type, dtype=getattr(torch, dtype)):
        with torch.autocast(device_type=target.device_type, enabled=False):
            exact = left @ left
        narrow = left @ left
    expect_equal(exact.dtype, torch.float32, "dtype of a matrix product where autocast is switched off inside autocast")
    expect_equal(str(narrow.dtype), f"torch.{dtype}", "dtype of a matrix product after that block")
    with contextlib.suppress(ArithmeticError), torch.autocast(device_type=target.device_type):
        raise ArithmeticError
    expect_equal((left @ left).dtype, torch.float32, "dtype of a matrix product after an error under autocast")


@check(
    "runtime.device.moved_module",
    Clause(
        "R1.19",
        "A module that is moved to the device, and back, keeps its parameters, and `tensor.data = other` takes a "
        "tensor of the host and of the device.",
        reason="Who holds the parameters, an optimizer or DeepSpeed's expert groups, would train what is no longer in "
        "the model; `offload_states` and AutoTP assign data of the other kind.",
    ),
)
def moved_module(target: Target) -> None:
    module = torch.nn.Linear(2, 2)
    weight = module.weight
    for device in (target.device, torch.device("cpu")):
        module.to(device)
        expect(
            module.weight is weight, f"module.to({str(device)!r}) made a new parameter", why="an optimizer has the old"
        )
        expect_equal(weight.device, device, f"where the parameter is after module.to({str(device)!r})")
    tensor = torch.zeros(2, device=target.device)
    for device in (torch.device("cpu"), target.device):
        tensor.data = torch.ones(3, device=device)
        expect_equal(
            (tensor.device, tensor.tolist()), (device, [1.0] * 3), f"data of {str(device)!r} after its assignment"
        )


def _half_dtypes(target: Target) -> list[torch.dtype]:
    return [dtype for dtype in target.dtypes if dtype in (torch.bfloat16, torch.float16)]


@check(
    "runtime.device.of_each_thread",
    Clause(
        "R1.21",
        "Each thread has a current device of its own: `set_device` in one leaves those of the others.",
        reason="torch's threads of the backward pass, and those that pin batches, set theirs while the step goes on.",
    ),
    needs=needs_two_devices,
)
def of_each_thread(target: Target) -> None:
    accelerator = target.accelerator

    def set_second() -> tuple[int, int | None]:
        accelerator.set_device(1)
        return int(accelerator.current_device()), torch.empty(1, device=target.device_type).device.index

    with current_device_kept(target):
        accelerator.set_device(0)
        (theirs,) = in_threads(set_second)
        expect_equal(theirs, (1, 1), "current_device(), and the device of a new tensor, in a thread that set device 1")
        expect_equal(accelerator.current_device(), 0, "current_device() after another thread set device 1")
        made = torch.empty(1, device=target.device_type)
        expect_equal(made.device.index, 0, "index of a new tensor's device after another thread set device 1")


@check(
    "runtime.device.autocast_losses",
    Clause(
        "R1.22",
        "Under autocast, losses of tensors in 16 bits are computed in float32.",
        reason="torch's autocast makes some ops narrower and others wider; a mean over a batch in 8 bits is coarse.",
    ),
    cases=lambda target: ({"dtype": str(dtype).removeprefix("torch.")} for dtype in _half_dtypes(target)),
)
def autocast_losses(target: Target, dtype: str) -> None:
    made = torch.linspace(-2, 2, 12).view(3, 4).to(target.device, getattr(torch, dtype))
    classes, functional = torch.tensor([0, 1, 3], device=target.device), torch.nn.functional
    with torch.autocast(device_type=target.device_type, dtype=getattr(torch, dtype)):
        losses = {
            "cross_entropy": functional.cross_entropy(made, classes),
            "mse_loss": functional.mse_loss(made, -made),
        }
    for name, loss in losses.items():
        expect_equal(str(loss.dtype), "torch.float32", f"dtype of {name} of {dtype} under autocast")


@check(
    "runtime.device.names",
    Clause(
        "R1.23",
        "The class has no method or attribute of nearly the name of one that is read; a leading underscore says that a "
        "name is the class's own.",
        reason="What is misspelt is never called, and what the class inherits answers instead of it.",
    ),
)
def names(target: Target) -> None:
    accelerator = type(target.accelerator)
    plugins = [cls for cls in accelerator.__mro__ if cls.__module__.partition(".")[0] not in _OTHERS]
    found = {f"{cls.__name__}.{name}": meant for cls in plugins for name, meant in misnamed(cls, accelerator).items()}
    expect(not found, f"nothing reads {', '.join(found)}", why=f"expected {', '.join(found.values())}")


_OTHERS = ("abc", "builtins", "deepspeed", "ds_plugin_sdk", "torch", "typing")  # whose classes are not the plugin's
