"""What a device must do, one function a theme; ``python device_checks.py NAME...`` runs them in this process.

Each function, those of model_checks.py too, raises where the device does not hold. test_mistakes.py builds devices that
some of them must catch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import model_checks
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_plugin_sdk import privateuse1, simulator
from ds_plugin_sdk.nn import TransformerLayer
from ds_plugin_sdk.privateuse1 import build

NAME = "zap"
# Long against what a busy machine keeps a thread waiting.
DELAY_US = 50_000


# ---------------------------------------------------------------------- tensors
def tensors_make_the_round_trip() -> None:
    generator = torch.Generator().manual_seed(1)
    for name in ("float32", "bfloat16", "float16", "float64", "int64", "bool", "complex64"):
        dtype = getattr(torch, name)
        host = (torch.randn(4, 6, generator=generator) * 3).to(dtype)
        for view in (host, host.t(), host[:, ::2], host[1:, 1:], host[:0], host[2, 3], host.expand(2, 4, 6)):
            there = view.to(NAME)
            assert there.device == torch.device(NAME, 0)
            assert torch.equal(there.cpu(), view)
            assert torch.equal(there.clone().cpu(), view)
            assert torch.equal(there.to(f"{NAME}:1").cpu(), view)
            assert torch.equal(there.to(torch.complex128).cpu(), view.to(torch.complex128))


def a_number_may_come_first() -> None:
    host = torch.tensor([1.0, 2.0, 3.0])
    there = host.to(f"{NAME}:1")
    number = torch.tensor(2.0)
    for here, result in (
        (1 - host, 1 - there),
        (2 / host, 2 / there),
        (2**host, 2**there),
        (number - host, number - there),
    ):
        assert result.device == there.device
        assert torch.equal(result.cpu(), here)


def copies_between_layouts_are_right() -> None:
    host = torch.arange(24.0).view(4, 6)
    for source in (host.to(NAME).t(), host.to(NAME), host.to(f"{NAME}:1")[:, ::2], host, host.t()):
        for make in (torch.zeros_like, lambda like: torch.zeros(*like.shape, 2, device=NAME)[..., 1]):
            target = make(source).to(NAME)
            target.copy_(source)
            assert torch.equal(target.cpu(), source.cpu())
    broadcast = torch.zeros(3, 6, device=NAME)
    broadcast.copy_(host[0])
    assert torch.equal(broadcast.cpu(), host[0].expand(3, 6))
    complex_ = torch.tensor([1 + 2j, 3 - 4j])
    there = complex_.to(NAME)
    assert torch.equal(there.conj().cpu(), complex_.conj().resolve_conj())
    assert torch.equal(there.conj().imag.clone().cpu(), complex_.conj().imag.resolve_neg())


def what_a_copy_writes_does_not_overlap() -> None:
    """As on the CPU; what would be there then depends on the order in which elements are copied."""
    for device in ("cpu", NAME):
        square = torch.arange(9.0, device=device).view(3, 3)
        line, wide = square.view(-1), torch.zeros(3, device=device).expand(3, 3)
        for to, source in ((square, square.t()), (line[1:], line[:-1]), (wide, square)):
            try:
                to.copy_(source)
            except RuntimeError as error:
                assert "unsupported operation" in str(error), error
            else:
                raise AssertionError(f"a copy to {to.stride()} of {source.stride()} on {device}")
        square.t().copy_(square.t())
        assert square.flatten().tolist() == list(range(9))


def storages_grow_and_shrink() -> None:
    tensor = torch.arange(6.0, device=NAME)
    storage = tensor.untyped_storage()
    storage.resize_(12 * 4)
    assert storage.size() == 48
    assert tensor.tolist() == list(range(6))
    tensor.resize_(2, 5)
    assert tensor.flatten()[:6].tolist() == list(range(6))
    storage.resize_(0)
    assert storage.size() == 0
    flat = torch.arange(8.0, device=NAME)
    view = torch.empty(0, device=NAME)
    view.set_(flat.untyped_storage(), 2, (2, 2), (3, 1))
    view.add_(10)
    assert flat.tolist() == [0, 1, 12, 13, 4, 15, 16, 7]
    assert flat.is_set_to(flat[:]) and not flat.is_set_to(view)
    view.set_()
    view.resize_(3).fill_(9)
    assert flat.tolist() == [0, 1, 12, 13, 4, 15, 16, 7]
    parameter = nn.Parameter(torch.zeros(4, device=NAME))
    parameter.data = flat[4:]  # as ZeRO flattens parameters
    flat.zero_()
    assert parameter.tolist() == [0, 0, 0, 0]


def tensors_of_two_devices_are_rejected() -> None:
    here, there, host = (torch.ones(3, device=device) for device in (f"{NAME}:0", f"{NAME}:1", "cpu"))
    for other in (there, host):
        for call in (lambda other=other: here + other, lambda other=other: torch.cat([here, other])):
            try:
                call()
            except RuntimeError as error:
                assert "same device" in str(error)
            else:
                raise AssertionError(f"{here.device} and {other.device} were mixed")
    total = torch.tensor(1.0)
    try:
        total += here.sum()
    except RuntimeError as error:
        assert "same device" in str(error)
    else:
        raise AssertionError("the device wrote to a number of the host")
    assert total.item() == 1
    assert (here + torch.tensor(2.0)).tolist() == [3, 3, 3]
    assert here[torch.tensor([0, 2])].tolist() == [1, 1]


# ---------------------------------------------------------------------- devices
def devices_have_memory_of_their_own() -> None:
    before = [torch.accelerator.get_memory_info(index)[0] for index in range(2)]
    block = torch.full((1 << 20,), 7.0, device=f"{NAME}:1")
    after = [torch.accelerator.get_memory_info(index)[0] for index in range(2)]
    assert before[0] == after[0]
    assert before[1] - after[1] >= block.nbytes
    other = torch.full((1 << 20,), 8.0, device=f"{NAME}:0")
    assert (block.max().item(), other.max().item()) == (7.0, 8.0)
    assert torch.zap.memory_allocated(1) >= block.nbytes


def the_current_device_is_a_thread_s_own() -> None:
    assert torch.accelerator.current_device_index() == 0
    with torch.zap.device(1):
        assert torch.empty(1, device=NAME).device.index == 1
        assert torch.zap.current_device() == 1
    assert torch.empty(1, device=NAME).device.index == 0
    torch.zap.set_device(1)
    assert torch.zeros(2, device=NAME).device.index == 1
    torch.zap.set_device(0)
    try:
        torch.zap.set_device(2)
    except RuntimeError as error:
        assert "invalid device 2" in str(error)
    else:
        raise AssertionError("there is no device 2")


def torch_finds_the_device() -> None:
    assert torch.accelerator.current_accelerator() == torch.device(NAME)
    assert torch.accelerator.device_count() == torch.zap.device_count() == 2
    assert torch.accelerator.is_available()
    assert torch.zap.is_available()
    assert torch.get_device_module(NAME) is torch.zap
    assert torch.ones(1).zap().is_zap
    assert torch.zap.get_device_properties(1).total_memory == 512 << 20
    assert torch.bfloat16 in torch.accelerator.get_device_capability()["supported_dtypes"]


def the_visible_devices_are_read_each_time() -> None:
    try:
        for value, count in (("1", 1), ("0,1", 2), ("", 0), ("-1", 0), ("1,1", 1), ("0,5,1", 1)):
            os.environ["ZAP_VISIBLE_DEVICES"] = value
            assert torch.accelerator.device_count() == count, (value, torch.accelerator.device_count())
    finally:
        del os.environ["ZAP_VISIBLE_DEVICES"]
    assert torch.accelerator.device_count() == 2


# ---------------------------------------------------------------------- memory
def memory_statistics_rise_and_fall() -> None:
    torch.accelerator.empty_cache()
    zap, size = torch.zap, 4 << 20
    base, reserved = zap.memory_allocated(), zap.memory_reserved()
    zap.reset_peak_memory_stats()
    block = torch.empty(size, dtype=torch.uint8, device=NAME)
    assert zap.memory_allocated() - base == size
    assert zap.memory_reserved() - reserved == size
    del block
    assert zap.memory_allocated() == base
    assert zap.max_memory_allocated() - base == size
    assert zap.memory_reserved() - reserved == size, "freed memory stays cached"
    zap.reset_peak_memory_stats()
    assert zap.max_memory_allocated() == base
    allocations = zap.memory_stats()["num_device_alloc"]
    block = torch.empty(size, dtype=torch.uint8, device=NAME)
    assert zap.memory_stats()["num_device_alloc"] == allocations, "the cached block serves again"
    del block
    zap.empty_cache()
    assert zap.memory_reserved() == reserved


def memory_that_is_given_back_takes_no_other_along() -> None:
    torch.accelerator.empty_cache()
    tensors = [torch.full((3,), float(index), device=NAME) for index in range(64)]
    kept = tensors[1::2]
    del tensors
    torch.accelerator.empty_cache()
    assert [tensor.tolist() for tensor in kept] == [[2 * index + 1.0] * 3 for index in range(32)]


def too_much_memory_is_rejected_and_the_cache_gives_way() -> None:
    free, total = torch.zap.mem_get_info()
    most = int(total * 0.6)
    first = torch.empty(most, dtype=torch.uint8, device=NAME)
    try:
        torch.empty(most, dtype=torch.uint8, device=NAME)
    except torch.OutOfMemoryError as error:
        assert "out of memory on zap:0" in str(error)
    else:
        raise AssertionError(f"{2 * most} bytes of {free} were given")
    del first
    torch.empty(most + (1 << 20), dtype=torch.uint8, device=NAME)  # fits only once the cached block is gone
    torch.zap.empty_cache()


def record_stream_keeps_memory_from_being_reused() -> None:
    def overwritten(record: bool) -> bool:
        """Let another stream read a tensor that dies meanwhile; tell whether its memory was written before."""
        tensor = torch.ones(1 << 16, device=NAME)
        stream = torch.zap.Stream()
        stream.wait_stream(torch.zap.current_stream())
        torch.zap.synchronize()
        with simulator.delay(DELAY_US):
            with torch.zap.stream(stream):
                _keep_busy()
                result = tensor.clone()
            if record:
                tensor.record_stream(stream)
            address = tensor.data_ptr()
            del tensor
            new = torch.empty(1 << 16, device=NAME)
            new.fill_(9.0)
            reused = new.data_ptr() == address
            torch.zap.synchronize()
        assert reused != record
        return bool(result[0].item() == 9.0)

    assert overwritten(record=False), "the simulator hides a missing record_stream()"
    assert not overwritten(record=True)


# ---------------------------------------------------------------------- streams and events
PIECES = 20  # of work, a delay each: a second, in which a busy machine lets the host come to what it does meanwhile


def _keep_busy() -> None:
    """Give the current stream work for so many delays."""
    for _ in range(PIECES):
        torch.empty(1, device=NAME).fill_(0)


def a_stream_is_current_while_asked_for() -> None:
    """With its device, though it is current there before; in a context within its own, too."""
    with torch.zap.stream(torch.zap.default_stream(1)):
        assert torch.zap.current_device() == 1
    assert torch.zap.current_device() == 0
    stream, before = torch.zap.Stream(), torch.zap.current_stream()
    with torch.zap.stream(stream):
        with torch.zap.stream(stream):
            assert torch.zap.current_stream() == stream
        assert torch.zap.current_stream() == stream
    assert torch.zap.current_stream() == before


def a_missing_wait_gives_a_wrong_result() -> None:
    tensor, stream = torch.zeros(4, device=NAME), torch.zap.Stream()
    torch.zap.synchronize()
    with simulator.delay(DELAY_US):
        with torch.zap.stream(stream):
            _keep_busy()
            tensor.fill_(1.0)
        assert tensor.tolist() == [0, 0, 0, 0]
        with torch.zap.stream(stream):
            _keep_busy()
            tensor.fill_(2.0)
        torch.zap.current_stream().wait_stream(stream)
        assert tensor.tolist() == [2, 2, 2, 2]


def a_copy_waits_its_turn_on_the_stream() -> None:
    tensor = torch.zeros(4, device=NAME)
    torch.zap.synchronize()
    with simulator.delay(DELAY_US):
        tensor.fill_(3.0)
        copied = tensor.clone()
        begin = time.perf_counter()
        assert copied.tolist() == [3, 3, 3, 3]
        assert time.perf_counter() - begin > DELAY_US / 1e6, "the host did not have to wait for it"


def events_follow_the_work_before_them() -> None:
    tensor = torch.zeros(4, device=NAME)
    begin, end = (torch.zap.Event(enable_timing=True) for _ in range(2))
    torch.zap.synchronize()
    with simulator.delay(DELAY_US):
        submitted = time.perf_counter()
        begin.record()
        for _ in range(PIECES):
            tensor.fill_(1.0)
        end.record()
        assert not end.query()
        try:
            begin.elapsed_time(end)
        except RuntimeError as error:
            assert "completed" in str(error)
        else:
            raise AssertionError("an event that is not done has no time")
        started = time.perf_counter()
        end.synchronize()
        done = time.perf_counter()
        waited = done - started
        assert end.query()
    milliseconds = begin.elapsed_time(end)
    assert PIECES * DELAY_US / 1000 * 0.9 < milliseconds < (done - submitted) * 1000 + 1, milliseconds
    assert waited > DELAY_US / 1e6
    assert torch.zap.Event().query(), "an event never recorded is done"


def an_event_makes_another_stream_wait() -> None:
    tensor, event = torch.zeros(4, device=NAME), torch.zap.Event()
    first, second = torch.zap.Stream(), torch.zap.Stream()
    torch.zap.synchronize()
    with simulator.delay(DELAY_US):
        with torch.zap.stream(first):
            _keep_busy()
            tensor.fill_(1.0)
            event.record()
        with torch.zap.stream(second):
            event.wait()
            result = tensor.clone()
        second.synchronize()
        assert result.tolist() == [1, 1, 1, 1]
    assert first != second
    assert first.query()


def a_copy_between_devices_is_ordered_on_both() -> None:
    tensor = torch.zeros(4, device=f"{NAME}:0")
    torch.zap.synchronize()
    with simulator.delay(DELAY_US):
        tensor.fill_(1.0)
        there = tensor.to(f"{NAME}:1")
        tensor.fill_(2.0)
        assert there.tolist() == [1, 1, 1, 1]


def what_fails_on_the_device_is_told_at_the_next_wait() -> None:
    tensor = torch.zeros(2, dtype=torch.uint8, device=NAME)
    torch.zap.synchronize()
    tensor.fill_(300)
    try:
        torch.zap.synchronize()
    except RuntimeError as error:
        assert "'fill_' failed on device 0, stream 0" in str(error)
    else:
        raise AssertionError("300 does not fit into a byte")
    torch.zap.synchronize()


def pinned_copies_do_not_keep_the_host_waiting() -> None:
    def enqueue(host: torch.Tensor) -> tuple[torch.Tensor, float]:
        begin = time.perf_counter()
        there = host.to(NAME, non_blocking=True)
        return there, time.perf_counter() - begin

    pinned = torch.arange(4.0).pin_memory()
    assert pinned.is_pinned()
    assert not torch.arange(4.0).is_pinned()
    first = torch.empty(100_000, dtype=torch.uint8).pin_memory()
    address = first.data_ptr()
    del first
    assert torch.empty(90_000, dtype=torch.uint8).pin_memory().data_ptr() == address, "batches differ in length"
    enqueue(pinned)
    torch.zap.synchronize()
    with simulator.delay(10 * DELAY_US):  # half a second: a busy machine keeps a host waiting, too
        there, seconds = enqueue(pinned)
        assert seconds < 10 * DELAY_US / 1e6, seconds
        address = pinned.data_ptr()
        del pinned
        other = torch.full((4,), 9.0).pin_memory()
        assert other.data_ptr() != address, "pinned memory was reused before the copy was done"
        assert there.tolist() == [0, 1, 2, 3]
        there, seconds = enqueue(torch.arange(4.0))
        assert seconds >= 10 * DELAY_US / 1e6, "memory that is not pinned has to be waited for"
        back = torch.empty(4).pin_memory()
        back.copy_(there.mul_(2), non_blocking=True)
        torch.zap.synchronize()
        assert back.tolist() == [0, 2, 4, 6]


def children_forked_in_the_middle_of_work_end() -> None:
    """They drop the tensors that they inherited, whatever the other threads were doing."""
    side, stop = torch.zap.Stream(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            with torch.zap.stream(side):
                (torch.ones(1000, device=NAME) + 1).record_stream(torch.zap.default_stream())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert all(_child_drops_a_tensor(side) for _ in range(60)), "a forked child hangs"
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _child_drops_a_tensor(stream: torch.Stream) -> bool:
    """Whether it has ended in time."""
    tensor = torch.ones(5000, device=NAME)
    tensor.record_stream(stream)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's own, of a fork beside threads
        child = os.fork()
    if child == 0:
        del tensor
        os._exit(0)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


# ---------------------------------------------------------------------- random numbers
def each_device_has_its_own_random_numbers() -> None:
    torch.zap.manual_seed_all(5)
    first = torch.rand(4, device=f"{NAME}:0").cpu()
    assert torch.equal(torch.rand(4, device=f"{NAME}:1").cpu(), first), "one device's draw moved the other's state"
    torch.rand(3, device=f"{NAME}:0")
    states = [torch.zap.get_rng_state(index) for index in range(2)]
    assert not torch.equal(states[0], states[1])
    torch.manual_seed(5)
    host = torch.rand(4)
    torch.manual_seed(5)
    torch.rand(4, device=NAME)
    assert torch.equal(torch.rand(4), host), "the device's draw moved the CPU's state"


def random_states_can_be_saved() -> None:
    state = torch.zap.get_rng_state(1)
    first = torch.randn(5, device=f"{NAME}:1").cpu()
    torch.zap.set_rng_state(state, 1)
    assert torch.equal(torch.randn(5, device=f"{NAME}:1").cpu(), first)
    with torch.random.fork_rng(devices=[0, 1], device_type=NAME):
        torch.randn(5, device=f"{NAME}:1")
    generator = torch.Generator(device=NAME).manual_seed(3)
    again = generator.clone_state()
    draw = torch.rand(5, device=NAME, generator=generator).cpu()
    assert torch.equal(torch.rand(5, device=NAME, generator=again).cpu(), draw)
    assert generator.device == torch.device(NAME, 0)
    torch.manual_seed(11)
    dropped = nn.functional.dropout(torch.ones(64, device=NAME), 0.5)
    torch.manual_seed(11)
    assert torch.equal(nn.functional.dropout(torch.ones(64, device=NAME), 0.5).cpu(), dropped.cpu())
    assert 8 < int((dropped == 0).sum()) < 56


def draws_leave_the_cpu_alone() -> None:
    expected, stop = _host_draws(), threading.Event()

    def draw() -> None:
        while not stop.is_set():
            nn.functional.dropout(torch.ones(5000, device=NAME), 0.5)
            torch.randn(5000, device=NAME)

    thread = threading.Thread(target=draw)
    thread.start()
    found = _host_draws()
    stop.set()
    thread.join()
    assert found == expected, "the device's draws took numbers of the CPU's generator"


def _host_draws() -> list[float]:
    torch.manual_seed(0)
    return [float(torch.rand(2000).sum()) for _ in range(1500)]


def recomputed_activations_drop_the_same() -> None:
    x = torch.randn(2, 4, 8, device=NAME, requires_grad=True)
    for made in (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), TransformerLayer(8, 2)):
        model, gradients = made.to(NAME), []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            y = checkpoint(model, x, use_reentrant=False) if gradients else model(x)
            gradients.append(torch.autograd.grad(y.square().sum(), x)[0].cpu())
        assert torch.equal(gradients[0], gradients[1]), f"{model} dropped others the second time"
        assert not torch.equal(gradients[0], gradients[2])


def what_a_layer_drops_moves_no_state_of_the_host() -> None:
    layer, x = TransformerLayer(8, 2).to(NAME), torch.randn(2, 4, 8, device=NAME)
    state = torch.get_rng_state()
    layer(x)
    assert torch.equal(torch.get_rng_state(), state), "a copy from the host would wait for the device"


# ---------------------------------------------------------------------- ops without a kernel
def fallbacks_are_counted() -> None:
    x = torch.ones(3, device=NAME)
    privateuse1.reset_fallback_counts()
    y = x + x
    (y + y).add_(1).sum().item()
    torch.zeros(3, device=NAME).copy_(y)
    counts = privateuse1.fallback_counts()
    assert counts == {"aten::add.Tensor": 2, "aten::add_.Tensor": 1, "aten::sum.dim_IntList": 1}, counts


# ---------------------------------------------------------------------- running them
def take_sources_from(folder: Path) -> None:
    """Build the libraries from the sources in ``folder/runtime`` and ``folder/torch``, where there are such folders."""
    for builder, name in ((simulator.SimulatedRuntime, "runtime"), (build.BackendBuilder, "torch")):
        changed = [str(path) for path in sorted((folder / name).glob("*.cpp"))]
        if changed:
            builder.sources = lambda self, changed=changed: changed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sources", type=Path)
    parser.add_argument("names", nargs="+")
    arguments = parser.parse_args()
    if arguments.sources is not None:
        take_sources_from(arguments.sources)
    warnings.filterwarnings("ignore", "ds-plugin-sdk: .* the plugin has no native kernel")  # this device has none
    simulator.install(NAME, devices=2, memory_mb=512)
    for name in arguments.names:
        try:
            {**globals(), **vars(model_checks)}[name]()
            outcome = ""
        except Exception:
            outcome = traceback.format_exc()
        sys.stdout.write(json.dumps({"check": name, "failure": outcome}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
