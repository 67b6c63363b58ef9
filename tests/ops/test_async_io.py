"""Files read and written on threads: the library with io_uring and without, and the reference implementation."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_plugin_sdk.errors import FileError, OpError
from ds_plugin_sdk.ops import async_io, pin_memory
from ds_plugin_sdk.ops.async_io import AsyncIO

PAGE = 4096


@pytest.fixture(params=["io_uring", "threads", "python"])
def backend(request: pytest.FixtureRequest, native: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> str:
    """Each in turn: handles are of this kind."""
    native("async_io")
    defaults = {**AsyncIO.__init__.__kwdefaults__, "backend": request.param}
    monkeypatch.setattr(AsyncIO.__init__, "__kwdefaults__", defaults)
    found = AsyncIO().backend
    if (request.param, found) == ("io_uring", "threads"):
        pytest.skip("this kernel, or the container's filter, does not allow io_uring")
    assert found == request.param
    return request.param


def test_io_uring_can_be_switched_off(native: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    native("async_io")
    monkeypatch.setenv("DS_PLUGIN_IO_URING", "0")
    assert AsyncIO().backend == "threads"


def numbers(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("locked", [False, True], ids=["ordinary", "locked"])
def test_what_was_written_is_what_is_read(backend: str, locked: bool, tmp_path: Path) -> None:
    path, io = tmp_path / "file", AsyncIO(8192, 4, overlap_events=locked, threads=3)
    for size in (0, 1, PAGE, 3 * PAGE + 100, 300_001):
        for offset in (0, 1, 512, PAGE, 3 * PAGE + 7):
            x = numbers(size, seed=offset)
            source = pin_memory.empty(size, torch.uint8).copy_(x) if locked else x
            io.write(source, path, offset)
            assert io.wait() == 1
            assert path.read_bytes()[offset : offset + size] == x.numpy().tobytes()
            back, again = pin_memory.empty(size, torch.uint8), torch.zeros_like(x)
            io.read(back, path, offset)
            io.read(again, path, offset)
            assert io.wait() == 2
            assert torch.equal(back, x) and torch.equal(again, x)
    assert io.wait() == 0


def test_whole_pages_alone_go_past_the_page_cache() -> None:
    pieces = [*async_io._pieces(0, 100, 3 * PAGE, direct=True)]
    assert pieces == [(100, 3 * PAGE + 100, False)]  # memory and file do not begin alike
    pieces = [*async_io._pieces(512, 512, 3 * PAGE, direct=True)]
    assert pieces == [(512, PAGE, False), (PAGE, 3 * PAGE, True), (3 * PAGE, 3 * PAGE + 512, False)]
    assert [*async_io._pieces(0, 0, 2 * PAGE, direct=True)] == [(0, 2 * PAGE, True)]
    assert [*async_io._pieces(0, 0, 2 * PAGE, direct=False)] == [(0, 2 * PAGE, False)]
    assert [*async_io._pieces(0, 5, 0, direct=True)] == []


def test_writes_leave_the_rest_of_a_file(backend: str, tmp_path: Path) -> None:
    path, io, before = tmp_path / "file", AsyncIO(), numbers(5 * PAGE).numpy().tobytes()
    path.write_bytes(before)
    x = numbers(2 * PAGE, seed=1)
    io.write(x, path, PAGE + 5)
    io.wait()
    assert path.read_bytes() == before[: PAGE + 5] + x.numpy().tobytes() + before[3 * PAGE + 5 :]


def test_strides_dtypes_and_gradients(backend: str, tmp_path: Path) -> None:
    path, io = tmp_path / "file", AsyncIO()
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        x = numbers(2 * 100 * 77).view(100, 154).to(dtype)[:, ::2].t()
        io.write(x, path)
        io.wait()
        into = torch.zeros(77, 100, 2).to(dtype)[..., 0]
        io.read(into, path)
        io.wait()
        assert torch.equal(into, x)
    conjugate = torch.randn(3000, dtype=torch.complex64).conj()
    io.write(conjugate, path)
    io.wait()
    assert path.read_bytes()[: conjugate.nbytes] == conjugate.resolve_conj().numpy().tobytes()
    leaf = torch.zeros(3000, requires_grad=True)
    io.write(torch.arange(3000.0), path)
    io.wait()
    io.read(leaf, path)
    io.wait()
    assert torch.equal(leaf.detach(), torch.arange(3000.0))


@pytest.mark.parametrize("flags", [0, os.O_APPEND, getattr(os, "O_DIRECT", 0)], ids=["plain", "append", "direct"])
def test_an_open_file(backend: str, flags: int, tmp_path: Path) -> None:
    """Its own flags have no effect, it may be closed at once, and is not closed by us."""
    path, io, x = tmp_path / "file", AsyncIO(), numbers(3 * PAGE + 10)
    for offset in (0, PAGE, 100):
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | flags)
        io.write(x, descriptor, offset)
        os.close(descriptor)
        io.wait()
        assert path.read_bytes()[offset : offset + len(x)] == x.numpy().tobytes()


def failure(io: AsyncIO, act: Callable[[], None]) -> FileError:
    with pytest.raises(FileError) as caught:
        act()
        io.wait()
    assert io.wait() == 0  # nothing is left of it
    return caught.value


def test_errors_say_what_which_file_why_and_what_next(backend: str, tmp_path: Path) -> None:
    io, x, path = AsyncIO(PAGE, 2, threads=2), numbers(10_000), tmp_path / "file"
    path.write_bytes(b"1" * 9_999)
    short = failure(io, lambda: io.read(x, path))
    assert str(short) == (
        f"reading 10000 bytes at offset 0 of {path} failed (op 'async_io'): the file has 9999 bytes\n"
        "  -> it was written by another shape or dtype, or its writer was stopped: write it again"
    )
    missing = failure(io, lambda: io.read(x, tmp_path / "missing"))
    assert missing.errno == errno.ENOENT and "No such file or directory\n  -> check the path" in str(missing)
    assert failure(io, lambda: io.write(x, tmp_path / "no" / "file")).errno == errno.ENOENT
    assert failure(io, lambda: io.write(x, tmp_path)).errno == errno.EISDIR
    assert failure(io, lambda: io.read(x, tmp_path)).errno == errno.EISDIR
    assert failure(io, lambda: io.write(x, 777)).errno == errno.EBADF
    assert failure(io, lambda: io.read(x, path, -1)).errno == errno.EINVAL
    full = failure(io, lambda: io.write(x, "/dev/full"))
    assert full.errno == errno.ENOSPC
    assert re.search(r"writing 10000 bytes at offset 0 of /dev/full failed .*No space left.*\n  -> the file", str(full))
    assert str(pickle.loads(pickle.dumps(full))) == str(full)
    io.write(x, path)  # and it goes on
    assert io.wait() == 1


def test_one_of_several_fails(backend: str, tmp_path: Path) -> None:
    io, x, good = AsyncIO(), numbers(50_000), tmp_path / "good"
    io.write(x, "/dev/full")
    io.write(x, good)
    io.write(x, "/dev/full")
    with pytest.raises(FileError, match="No space left on device; 1 more of 3 have failed"):
        io.wait()
    assert good.read_bytes() == x.numpy().tobytes()


def test_a_tensor_that_does_not_take_what_was_read_is_an_error_of_that_read(backend: str, tmp_path: Path) -> None:
    """Resized meanwhile, say. What else was begun ends, and the handle can be used again."""
    first, second = tmp_path / "first", tmp_path / "second"
    io, x = AsyncIO(), numbers(5_000)
    first.write_bytes(x.numpy().tobytes())
    io.read(torch.zeros(1, dtype=torch.uint8).expand(5_000), first)
    io.write(x, second)
    with pytest.raises(FileError, match=r"reading 5000 bytes .*first failed .*: the tensor does not take what"):
        io.wait()
    assert second.read_bytes() == x.numpy().tobytes()
    io.write(x, second)
    assert io.wait() == 1
    io.close()


def test_autograd_notices_a_read(backend: str, tmp_path: Path) -> None:
    path, io = tmp_path / "file", AsyncIO()
    w = torch.ones(4, requires_grad=True)
    io.write(w, path)
    io.wait()
    y = (w * w).sum()
    io.read(w, path)
    io.wait()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_file_that_ends_while_it_is_read(backend: str, tmp_path: Path) -> None:
    """Shortened after its size was seen: an error, and not the memory's old content taken for the file's."""
    path = tmp_path / "file"
    path.write_bytes(b"1" * 20_000)
    io, memory = AsyncIO(), pin_memory.empty(30_000, torch.uint8)
    with path.open("rb") as file:
        operation = io._engine.submit(file.fileno(), file.fileno(), memory.data_ptr(), 30_000, 0, False)
        assert io._engine.wait(operation) == async_io._END_OF_FILE


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208  # threads are counted, no paths made


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # threads are counted, no paths made


@pytest.mark.usefixtures("backend")
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    x = numbers(100_000)
    AsyncIO().close()
    gc.collect()
    before = tasks(), descriptors()  # the kernel may still end a worker of the ring that was closed
    for _ in range(5):
        io = AsyncIO(threads=3)
        io.write(x, tmp_path / "file")
        io.wait()
        failure(io, lambda io=io: io.write(x, "/dev/full"))
        del io
    gc.collect()
    for _ in range(100):
        if tasks() <= before[0] and descriptors() == before[1]:
            break
        time.sleep(0.05)
    assert tasks() <= before[0] and descriptors() == before[1]


@pytest.mark.usefixtures("backend")
def test_who_does_not_wait_is_told_of_errors(tmp_path: Path) -> None:
    io = AsyncIO()
    io.write(numbers(10_000), tmp_path / "file")
    io.write(numbers(10_000), "/dev/full")
    with pytest.warns(RuntimeWarning, match="nobody waited for this: writing 10000 bytes at offset 0 of /dev/full"):
        io.close()
    assert (tmp_path / "file").stat().st_size == 10_000
    with pytest.raises(OpError, match="it was closed"):
        io.wait()


@pytest.mark.usefixtures("backend")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # a fork beside threads is what is tested
def test_a_forked_process_gets_an_error_and_ends(tmp_path: Path) -> None:
    io = AsyncIO(threads=2)
    io.write(numbers(10_000), tmp_path / "file")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            io.wait()
        except OpError as error:
            code = 42 if "forked" in str(error) else 2
        finally:
            io._end()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert io.wait() == 1


@pytest.mark.usefixtures("backend")
def test_signals_change_nothing(tmp_path: Path) -> None:
    seen = []
    handler = signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        io, x = AsyncIO(PAGE, 2, threads=2), numbers(4 << 20)
        back = torch.zeros_like(x)
        io.write(x, tmp_path / "file")
        io.wait()
        io.read(back, tmp_path / "file")
        io.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert seen and torch.equal(back, x)


@pytest.mark.usefixtures("backend")
def test_what_an_interruption_leaves_is_waited_for_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    io, x = AsyncIO(), torch.arange(3 * PAGE / 4)
    io.write(x, tmp_path / "file")
    io.wait()
    parts = [torch.zeros(PAGE // 4) for _ in range(3)]
    for number, part in enumerate(parts):
        io.read(part, tmp_path / "file", number * part.nbytes)
    original = io._engine.wait

    def interrupted(operation: Any) -> int:
        original(operation)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(io._engine, "wait", interrupted)
        io.wait()
    assert io.wait() == 3
    assert all(torch.equal(part, x[number * PAGE // 4 :][: PAGE // 4]) for number, part in enumerate(parts))


def test_options_that_make_no_sense() -> None:
    with pytest.raises(OpError, match="block_size is 4096, queue_depth 0, threads 1; expected at least 1"):
        AsyncIO(4096, 0)
    with pytest.raises(OpError, match="backend is 'libaio'; expected io_uring, threads, python"):
        AsyncIO(backend="libaio")  # type: ignore[arg-type]  # whoever does not check types


# ---- page-locked memory ----------------------------------------------------------------------------------------------
def locked_kb() -> int:
    return int(re.search(r"VmLck:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[1])


def test_locked_memory() -> None:
    before = locked_kb()
    x = pin_memory.empty(300_000, torch.float32)
    assert x.shape == (300_000,) and x.data_ptr() % PAGE == 0 and locked_kb() >= before + 1171
    assert pin_memory.contains(x) and pin_memory.contains(x[5:].view(5, -1)[2])
    assert not pin_memory.contains(torch.zeros(10)) and not pin_memory.contains(torch.zeros(1, device="meta"))
    part = x[10:]
    assert pin_memory.free(x.data_ptr()) and not pin_memory.free(x.data_ptr())
    assert not pin_memory.contains(x) and locked_kb() == before
    assert part.fill_(1).sum() == 299_990  # who still has it may use it
    assert pin_memory.empty(0, torch.int64).shape == (0,)


def test_locked_memory_goes_with_its_last_tensor() -> None:
    before = locked_kb()
    x = pin_memory.empty(1 << 20, torch.uint8)
    view = x[5:]
    del x
    assert locked_kb() > before
    del view
    assert locked_kb() == before


def test_memory_that_cannot_be_locked_is_used_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Limited:
        def mlock(self, *_: object) -> int:
            return -1

    monkeypatch.setattr(pin_memory, "_libc", Limited())
    monkeypatch.setattr(pin_memory, "_warned", False)
    with pytest.warns(RuntimeWarning, match=r"8192 bytes of host memory could not be locked: .*\n  -> raise the limit"):
        x = pin_memory.empty(8192, torch.uint8)
    assert pin_memory.contains(pin_memory.empty(8192, torch.uint8)) and pin_memory.contains(x)
