"""What DeepSpeed swaps to NVMe and writes as fast checkpoints: `aio_handle` and the classes that call it."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ds_plugin_sdk.conformance.front_ends.front_end import FrontEnd, Result

_SIZES = (1, 4096, 100_003)  # bytes: less than a sector, a page, many pages and a bit
_OFFSETS = (0, 4096, 777)


def _module(name: str = "AsyncIOBuilder") -> Any:
    return getattr(importlib.import_module("deepspeed.ops.op_builder"), name)().load()


def _bytes(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _handle(device: torch.device) -> Iterator[Result]:
    """Round trips between the device and files, beside what Python reads of them."""
    module = _module()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tensor")
        for overlap, threads in ((False, 1), (True, 3)):
            handle = module.aio_handle(8192, 4, False, overlap, threads)
            for size in _SIZES:
                for offset in _OFFSETS:
                    x = _bytes(size, seed=offset)
                    path.unlink(missing_ok=True)
                    part = torch.cat([_bytes(64), x, _bytes(64)]).to(device)[64:-64]  # of a flat buffer
                    yield _number("sync_pwrite()", handle.sync_pwrite(part, str(path), offset), 1)
                    written = path.read_bytes()[offset:]
                    yield Result("the file", torch.tensor(list(written)), x.double(), 0.0)
                    back = torch.zeros_like(x, device=device)
                    yield _number("async_pread()", handle.async_pread(back, str(path), offset), 0)
                    again = handle.new_cpu_locked_tensor(size, x)
                    yield _number("a second async_pread()", handle.async_pread(again, str(path), offset), 0)
                    yield _number("wait()", handle.wait(), 2)
                    yield Result("what is read", back, x.double(), 0.0)
                    yield Result("what is read into locked memory", again, x.double(), 0.0)
                    yield _number("free_cpu_locked_tensor()", handle.free_cpu_locked_tensor(again), True)
            yield from _piece(handle, path, device)
            yield from _errors(handle, path, device)
        yield from _large_blocks(module, path, device)
        x = _bytes(5000).to(device)
        yield _number("aio_write()", module.aio_write(x, f"{path}2", 4096, 2, True, False, True), 0)
        back = torch.zeros_like(x)
        yield _number("aio_read()", module.aio_read(back, f"{path}2", 4096, 2, True, False, True), 0)
        yield Result("what aio_read() reads", back, x.cpu().double(), 0.0)
        copy = torch.zeros(100, device=device)
        module.deepspeed_memcpy(copy, torch.arange(100.0, device=device))
        yield Result("deepspeed_memcpy()", copy, torch.arange(100).double(), 0.0)


def _large_blocks(module: Any, path: Path, device: torch.device) -> Iterator[Result]:
    """Blocks larger than any file, and deep queues: what is asked for is the most, not what there is."""
    x, back = _bytes(100_003), torch.zeros(100_003, dtype=torch.uint8, device=device)
    path.unlink(missing_ok=True)
    handle = module.aio_handle(1 << 30, 4096, False, True, 2)
    yield _number("sync_pwrite() in blocks of 1 GiB", handle.sync_pwrite(x.to(device), str(path)), 1)
    yield _number("sync_pread() in blocks of 1 GiB", handle.sync_pread(back, str(path)), 1)
    yield Result("what is read in blocks of 1 GiB", back, x.double(), 0.0)


def _piece(handle: Any, path: Path, device: torch.device) -> Iterator[Result]:
    """A piece that is written again in the middle of a file leaves the rest."""
    x, piece = _bytes(20_000), _bytes(4096, seed=1)
    path.write_bytes(bytes(x.tolist()))
    yield _number("sync_pwrite() of a piece", handle.sync_pwrite(piece.to(device), str(path), 8192), 1)
    x[8192 : 8192 + 4096] = piece
    yield Result("the file with a piece written again", torch.tensor(list(path.read_bytes())), x.double(), 0.0)


def _errors(handle: Any, path: Path, device: torch.device) -> Iterator[Result]:
    """What fails says so, and leaves nothing behind: neither a descriptor nor a number for the next `wait`."""
    x = torch.zeros(8192, dtype=torch.uint8, device=device)
    short = Path(f"{path}-short")
    short.write_bytes(b"7" * 5000)
    calls: dict[str, Callable[[], object]] = {
        "reading a file that is too short": lambda: handle.sync_pread(x, str(short)),
        "reading a file that is not there": lambda: handle.async_pread(x, f"{path}-missing"),
        "writing where there is no folder": lambda: handle.sync_pwrite(x, f"{path}-folder/file"),
        "writing to a full disk": lambda: handle.sync_pwrite(x, "/dev/full"),
    }
    for what, call in calls.items():
        try:
            call()
            raised = False
        except OSError:
            raised = True
        yield _number(f"an error at {what}", raised, True)
    x.fill_(3)
    yield _number("the next sync_pwrite()", handle.sync_pwrite(x, str(path)), 1)


def _swap_pool(device: torch.device) -> Iterator[Result]:
    """Optimizer states on their way out and in again: several in a locked buffer, a file each."""
    utils = importlib.import_module("deepspeed.runtime.swap_tensor.utils")
    handle = _module().aio_handle(1 << 20, 8, False, True, 2)
    states = [torch.arange(numel, dtype=torch.float32).mul(i + 1.0) for i, numel in enumerate((1000, 70_000, 5))]
    example = torch.empty(0)
    buffers = [handle.new_cpu_locked_tensor(1 << 17, example) for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        for i, state in enumerate(states):
            paths = str(Path(folder, f"state{i}"))
            aligned = -(-state.numel() // 512) * 512
            pool = utils.SwapBufferPool(buffers, handle)
            pool.insert_tensor(state.to(device), paths, aligned)
            pool.swap_out(handle)
        for buffer in buffers:
            buffer.zero_()
        pool = utils.SwapBufferPool(buffers, handle)
        found = [
            pool.allocate_tensor(state.numel(), str(Path(folder, f"state{i}")), -(-state.numel() // 512) * 512)[1]
            for i, state in enumerate(states)
        ]
        pool.swap_in(handle)
        for i, state in enumerate(states):
            yield Result(f"state {i}", found[i], state.double(), 0.0)


def _writer(device: torch.device) -> Iterator[Result]:
    """A checkpoint by descriptor, its end of no whole number of sectors."""
    io = importlib.import_module("deepspeed.io")
    handle = _module().aio_handle(4096, 8, False, False, 1)
    pinned = _module("PinMemoryBuilder").pin_handle().new_cpu_locked_tensor(4 * 4096, _bytes(1))
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        for double in (True, False):
            path = str(Path(folder, f"checkpoint{double}"))
            writer = io.FastFileWriter(path, io.FastFileWriterConfig(handle, pinned, double_buffer=double))
            torch.save({"x": x.to(device)}, writer, _use_new_zipfile_serialization=False)
            writer.close()
            yield Result("the checkpoint", torch.load(path, map_location="cpu")["x"], x.double(), 0.0)


def _number(what: str, actual: float, expected: float) -> Result:
    return Result(what, torch.tensor(float(actual)), torch.tensor(float(expected)).double(), 0.0)


FILES = (
    FrontEnd("aio_handle", "AsyncIOBuilder", _handle),
    FrontEnd("SwapBufferPool", "AsyncIOBuilder", _swap_pool),
    FrontEnd("FastFileWriter", "AsyncIOBuilder", _writer),
)
