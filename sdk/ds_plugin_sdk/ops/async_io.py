"""Tensors to files and back, on threads: what ZeRO-Infinity keeps on NVMe.

    io = AsyncIO(block_size=1 << 20, queue_depth=32, threads=4)
    io.write(state, "/nvme/state.bin")
    io.read(weights, "/nvme/weights.bin", offset=4096)
    io.wait()                                # both have ended, or an error is raised

Whole pages go past the system's page cache (``O_DIRECT``) where file system and memory allow it; what comes before and
after them, and all else, goes through it. There is no torch op: an op has no threads that go on after its call, and no
file. The native library knows memory and file descriptors, this module tensors and paths. Without the library threads
of Python's do the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import threading
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from torch import Tensor
from torch.autograd.graph import increment_version

from ds_plugin_sdk.errors import FileError, OpError
from ds_plugin_sdk.ops import _first_call, pin_memory
from ds_plugin_sdk.settings import settings

File = str | os.PathLike[str] | int
Backend = Literal["io_uring", "threads", "python"]

_PAGE = 4096  # kIoPage of kernels/host/async_io.h
_SECTOR = 512  # what direct I/O asks of an address in memory
_END_OF_FILE = -1
_O_DIRECT = getattr(os, "O_DIRECT", 0)

_HINTS = {
    errno.ENOSPC: "the file is incomplete: free some space, or choose another disk (DeepSpeed's `nvme_path`)",
    errno.EDQUOT: "the file is incomplete: your quota on this disk is used up",
    errno.EFBIG: "the file is incomplete: `ulimit -f` or the file system forbid files of this size",
    errno.ENOENT: "check the path: its folder must be there, and a file that is read",
    errno.EACCES: "check the permissions of the file and of the folders above it",
    errno.EROFS: "the file system is mounted for reading only",
    errno.EIO: "the disk could not do it: see the system's log (`dmesg`)",
    errno.EMFILE: "raise the limit of open files, `ulimit -n`",
}

_LARGEST_BLOCK = 1 << 30  # the kernel does at most 2 GiB by one request
_library: ctypes.CDLL | None = None


class AsyncIO:
    """Reads and writes under way, and the threads that do them.

    Methods may be called from several threads. A process that was forked from this one cannot use it.

    Args:
        block_size: bytes of one request to the kernel, rounded up to whole pages.
        queue_depth: how many requests a thread keeps with the kernel.
        single_submit: hand over each request by a system call of its own.
        overlap_events: replace a request as soon as it has finished, rather than all when all have.
        threads: how many threads an operation is divided among.
        backend: no faster one than this of ``io_uring``, ``threads`` and ``python``.

    Raises:
        OpError: a size is not positive, there is no such backend, or the system gives no more threads.
        BuildError: there is no native library, and ``DS_PLUGIN_FALLBACK=0`` forbids doing without.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        *,
        single_submit: bool = False,
        overlap_events: bool = False,
        threads: int = 1,
        backend: Backend = "io_uring",
    ) -> None:
        if min(block_size, queue_depth, threads) < 1:
            why = f"block_size is {block_size}, queue_depth {queue_depth}, threads {threads}; expected at least 1"
            raise OpError("there is no such way to read and write files", op="async_io", why=why)
        if backend not in get_args(Backend):
            why = f"backend is {backend!r}; expected {', '.join(get_args(Backend))}"
            raise OpError("there is no such way to read and write files", op="async_io", why=why)
        _first_call.load("async_io", "cpu")
        self._engine: _Engine
        if _library is None or backend == "python":
            self._engine = _Python(block_size, threads)
        else:
            ring = backend == "io_uring" and settings.io_uring
            flags = 1 * single_submit + 2 * overlap_events + 4 * (not ring)  # kIoSingleSubmit and the others
            self._engine = _Native(_library, min(block_size, _LARGEST_BLOCK), queue_depth, threads, flags)
        self._pending: list[_Transfer] = []
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._end = weakref.finalize(self, _end, self._engine, self._pending, self._process)

    @property
    def backend(self) -> str:
        """How files are read and written: ``io_uring``, ``threads``, or ``python`` without the native library."""
        return self._engine.backend

    def read(self, tensor: Tensor, file: File, offset: int = 0) -> None:
        """Begin to fill a tensor from a file. Until `wait` it must not be used.

        Args:
            tensor: any device, dtype and strides. Where direct I/O cannot use its memory, the data comes through a host
                buffer.
            file: a path, or the descriptor of an open file; that may be closed at once.
            offset: of its first byte in the file.

        Raises:
            FileError: the file is missing, not to be read, or shorter than what is wanted.
        """
        self._begin(tensor, file, offset, write=False)

    def write(self, tensor: Tensor, file: File, offset: int = 0) -> None:
        """Begin to write a tensor's elements, in their order. Until `wait` they must not change. The file is made where
        there is none, and what it has beyond stays.

        Arguments are those of `read`.

        Raises:
            FileError: the file cannot be made or written.
        """
        self._begin(tensor, file, offset, write=True)

    def wait(self) -> int:
        """Wait for all that was begun.

        Returns:
            How many reads and writes that were.

        Raises:
            FileError: one has failed; the others have ended. After a read the tensor has no defined content, after a
                write the file.
        """
        with self._lock:
            self._check_process()
            count, errors = len(self._pending), []
            while self._pending:  # where a signal's handler raises, those that are left wait for the next call
                error = self._pending[0].finish(self._engine)
                self._pending.pop(0)
                errors += [error] if error is not None else []
        if errors:
            if len(errors) > 1:
                errors[0].why += f"; {len(errors) - 1} more of {count} have failed"
            raise errors[0]
        return count

    def alone(self) -> contextlib.AbstractContextManager[Any]:
        """Within its scope other threads cannot begin or wait: a read and the wait for it in one."""
        return self._lock

    def close(self) -> None:
        """Wait for what is under way, and end the threads. Errors become warnings. So does letting go of the object."""
        with self._lock:
            self._end()

    def _begin(self, tensor: Tensor, file: File, offset: int, *, write: bool) -> None:
        with self._lock:
            self._check_process()
            transfer = _Transfer(tensor, file, offset, write)
            self._pending.append(transfer)
            try:
                transfer.begin(self._engine)
            except BaseException as error:
                self._pending.remove(transfer)
                transfer.finish(self._engine)
                if isinstance(error, OSError) and not isinstance(error, FileError):
                    raise transfer.error(error.errno or errno.EIO) from error
                raise

    def _check_process(self) -> None:
        if os.getpid() != self._process or not self._end.alive:
            ended = (
                "it was closed"
                if os.getpid() == self._process
                else "its threads are in the process that forked this one"
            )
            raise OpError("this AsyncIO cannot be used", op="async_io", why=ended, hint="make one in this process")


class _Engine(Protocol):
    """Moves bytes between memory and file descriptors; the functions of kernels/host/async_io.h."""

    backend: str

    def submit(self, fd: int, fallback: int, memory: int, size: int, offset: int, write: bool) -> Any: ...
    def wait(self, operation: Any) -> int: ...
    def stop(self) -> None: ...


class _Native:
    def __init__(self, calls: ctypes.CDLL, block_size: int, queue_depth: int, threads: int, flags: int) -> None:
        self._calls = calls
        self._io = self._calls.ds_io_start(block_size, queue_depth, threads, flags)
        if not self._io:
            raise OpError(
                "the threads that read and write files could not be started",
                op="async_io",
                why=f"the system does not give {threads} more",
                hint="lower intra_op_parallelism, or raise `ulimit -u`",
            )
        self.backend = "io_uring" if self._calls.ds_io_rings(self._io) else "threads"

    def submit(self, fd: int, fallback: int, memory: int, size: int, offset: int, write: bool) -> Any:
        return self._calls.ds_io_submit(self._io, fd, fallback, memory, size, offset, write)

    def wait(self, operation: Any) -> int:
        error: int = self._calls.ds_io_wait(self._io, operation)
        return error

    def stop(self) -> None:
        self._calls.ds_io_stop(self._io)


class _Python:
    """The reference implementation. The queue's depth has no meaning: each thread has one request with the kernel."""

    backend = "python"

    def __init__(self, block_size: int, threads: int) -> None:
        self._block = -(-block_size // _PAGE) * _PAGE
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ds-async-io")

    def submit(self, fd: int, fallback: int, memory: int, size: int, offset: int, write: bool) -> list[Future[int]]:
        view = memoryview((ctypes.c_char * size).from_address(memory)).cast("B")
        share = -(-size // (self._threads * self._block)) * self._block
        return [
            self._pool.submit(self._run, fd, fallback, view[start : start + share], offset + start, write)
            for start in range(0, size, share)
        ]

    def wait(self, operation: list[Future[int]]) -> int:
        try:
            return next(filter(None, [part.result() for part in operation]), 0)
        except BaseException:  # a signal's handler raises: the threads still use the memory
            wait(operation)
            raise

    def stop(self) -> None:
        self._pool.shutdown()

    def _run(self, fd: int, fallback: int, view: memoryview, offset: int, write: bool) -> int:
        """Transfer a thread's share, a block at a time. 0, or what went wrong."""
        transfer = os.pwritev if write else os.preadv
        for start in range(0, len(view), self._block):
            block, at, through = view[start : start + self._block], offset + start, fd
            while block:
                try:
                    done = transfer(through, [block], at)
                except OSError as error:
                    if through == fallback:
                        return error.errno or errno.EIO
                    done = 0
                if done == 0 and through == fallback:
                    return errno.EIO if write else _END_OF_FILE
                # What did not go through the first descriptor goes through the other, whose answer counts.
                block, at, through = block[done:], at + done, fallback
        return 0


@dataclass(eq=False)
class _Transfer:
    """One read or write of a tensor."""

    tensor: Tensor
    file: File
    offset: int
    write: bool
    memory: Tensor | None = None  # where the kernel reads or writes: the tensor, or a host buffer for it
    descriptors: list[int] = field(default_factory=list)
    operations: list[Any] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # what the operations have answered

    def begin(self, engine: _Engine) -> None:
        """Open the file and hand the pieces to the engine. Raises FileError and OSError; `finish` must follow."""
        size = self.tensor.nbytes
        if self.offset < 0:
            raise self.error(errno.EINVAL)
        plain, direct = self._open()
        self._check_size(plain, size)
        self.memory = self._host_memory(direct is not None)
        address = self.memory.data_ptr()
        for begin, end, whole_pages in _pieces(address, self.offset, size, direct is not None):
            fd = direct if whole_pages and direct is not None else plain
            start = begin - self.offset
            self.operations.append(engine.submit(fd, plain, address + start, end - begin, begin, self.write))

    def finish(self, engine: _Engine) -> FileError | None:
        """Wait for it, and let go of everything. What went wrong, or None. Called again if it was interrupted."""
        while self.operations:
            self.numbers.append(engine.wait(self.operations.pop(0)))
        while self.descriptors:
            try:
                os.close(self.descriptors.pop(0))
            except OSError as error:  # a network's file system may say only now that a write failed
                self.numbers.append(error.errno or errno.EIO)
        number = next(filter(None, self.numbers), 0)
        memory, self.memory = self.memory, None
        if number:
            return self.error(number)
        return None if self.write or memory is None else self._fill(memory)

    def _fill(self, memory: Tensor) -> FileError | None:
        """Put what was read into the tensor. What went wrong, or None."""
        if memory is self.tensor:
            if not self.tensor.is_inference():
                increment_version(self.tensor)  # so that autograd notices
            return None
        try:
            self.tensor.detach().copy_(memory.view(self.tensor.shape))
        except Exception as error:  # of another shape or device by now, or out of memory there
            failed = self._error(f"the tensor does not take what was read: {error}", "", 0)
            failed.__cause__ = error
            return failed
        return None

    def error(self, number: int) -> FileError:
        """The error for a number of `errno`."""
        why = "the file ends before that" if number == _END_OF_FILE else os.strerror(number)
        return self._error(why, _HINTS.get(number, ""), number)

    def _error(self, why: str, hint: str, number: int) -> FileError:
        verb, where = "writing" if self.write else "reading", f"at offset {self.offset} of {self._name()}"
        what = f"{verb} {self.tensor.nbytes} bytes {where} failed"
        error = FileError(what, op="async_io", why=why, hint=hint)
        error.errno = number if number > 0 else None
        return error

    def _name(self) -> str:
        if not isinstance(self.file, int):
            return os.fspath(self.file)
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/self/fd/{self.file}")  # noqa: PTH115  # as text: it may name no file
        return f"file descriptor {self.file}"

    def _open(self) -> tuple[int, int | None]:
        """A descriptor of the file, and one for direct I/O where the file system has it."""
        flags = os.O_CLOEXEC | (os.O_WRONLY | os.O_CREAT if self.write else os.O_RDONLY)
        if isinstance(self.file, int):
            return self._open_again(self.file, flags & ~os.O_CREAT)
        plain = self._keep(os.open(self.file, flags, 0o600))
        return plain, self._direct(self.file, flags & ~os.O_CREAT)

    def _open_again(self, descriptor: int, flags: int) -> tuple[int, int | None]:
        """Of an open file: its own flags, O_APPEND or O_DIRECT, need not be ours."""
        name = f"/proc/self/fd/{descriptor}"
        fcntl.fcntl(descriptor, fcntl.F_GETFD)  # whether it is open at all
        try:
            plain = self._keep(os.open(name, flags))
        except OSError:  # no /proc, or the file no longer allows it
            return self._keep(os.dup(descriptor)), None
        return plain, self._direct(name, flags)

    def _direct(self, name: str | os.PathLike[str], flags: int) -> int | None:
        if not _O_DIRECT or self.tensor.nbytes < _PAGE:
            return None
        try:
            return self._keep(os.open(name, flags | _O_DIRECT))
        except OSError:
            return None

    def _keep(self, descriptor: int) -> int:
        self.descriptors.append(descriptor)
        return descriptor

    def _check_size(self, descriptor: int, size: int) -> None:
        state = os.fstat(descriptor)
        if stat.S_ISDIR(state.st_mode):
            raise self.error(errno.EISDIR)
        if size and not self.write and stat.S_ISREG(state.st_mode) and state.st_size < self.offset + size:
            raise self._error(
                f"the file has {state.st_size} bytes",
                "it was written by another shape or dtype, or its writer was stopped: write it again",
                _END_OF_FILE,
            )

    def _host_memory(self, direct: bool) -> Tensor:
        """The tensor itself where the kernel can use its memory, else a host buffer of its content."""
        tensor = self.tensor.detach()
        fits = not direct or tensor.data_ptr() % _SECTOR == 0
        as_it_stands = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if tensor.device.type == "cpu" and as_it_stands and fits:
            return self.tensor
        buffer = pin_memory.aligned(tensor.numel(), tensor.dtype)
        if self.write:
            buffer.view(tensor.shape).copy_(tensor)
        return buffer


def _pieces(address: int, offset: int, size: int, direct: bool) -> Iterator[tuple[int, int, bool]]:
    """Parts of the file, begin and end, and whether direct I/O takes them: the whole pages, or nothing.

    A page that is not ours alone goes through the page cache, so that nothing on it is written twice.
    """
    end = offset + size
    first, last = -(-offset // _PAGE) * _PAGE, end // _PAGE * _PAGE
    if not direct or first >= last or (address + first - offset) % _SECTOR:
        first = last = end
    for begin, until, whole_pages in ((offset, first, False), (first, last, True), (last, end, False)):
        if begin < until:
            yield begin, until, whole_pages


def _end(engine: _Engine, pending: list[_Transfer], process: int) -> None:
    if os.getpid() != process:
        return  # forked: the threads are not here
    try:
        for transfer in pending:
            error = transfer.finish(engine)
            if error is not None:
                warnings.warn(f"ds-plugin-sdk: nobody waited for this: {error}", RuntimeWarning, stacklevel=2)
        pending.clear()
    finally:
        engine.stop()


def use_library(library: ctypes.CDLL) -> None:
    """Let what is made from now on use the native library, ``kernels/host/async_io.cpp``."""
    global _library
    pointer, wide, narrow = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "ds_io_start": (pointer, [wide, wide, wide, narrow]),
        "ds_io_rings": (wide, [pointer]),
        "ds_io_submit": (pointer, [pointer, narrow, narrow, pointer, wide, wide, narrow]),
        "ds_io_wait": (narrow, [pointer, pointer]),
        "ds_io_stop": (None, [pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    _library = library


__all__ = ["AsyncIO", "use_library"]
