"""``async_io``: what DeepSpeed's swapping to NVMe, its fast checkpoints and its benchmarks of I/O call.

Files are read and written by `ds_plugin_sdk.ops.async_io`, whose errors are raised here: where DeepSpeed's own op
prints a line and gives -1, ends the process by an assertion, or does not notice. Sizes need not fit blocks or threads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ds_plugin_sdk.errors import FileError, InvalidTensorError, OpError
from ds_plugin_sdk.integrations.deepspeed.modules.pin_memory import PinnedMemory
from ds_plugin_sdk.ops.async_io import AsyncIO, File

_SECTOR = 512
_FLAGS = {"true": True, "false": False, "1": True, "0": False}


class aio_handle(PinnedMemory):  # noqa: N801  # DeepSpeed's name
    """Reads and writes under way. Names, order and defaults of arguments are DeepSpeed's; offsets are in bytes.

    The memory of `new_cpu_locked_tensor` is taken as it is; other tensors, on any device, come through a host buffer.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool | str = False,
        overlap_events: bool | str = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        single, overlap = _flag("single_submit", single_submit), _flag("overlap_events", overlap_events)
        self._options = (block_size, queue_depth, single, overlap, intra_op_parallelism)
        self._io = AsyncIO(
            block_size,
            queue_depth,
            single_submit=single,
            overlap_events=overlap,
            threads=intra_op_parallelism,
        )
        self._unchecked: list[tuple[Tensor, File, int]] = []

    def get_block_size(self) -> int:
        return self._options[0]

    def get_queue_depth(self) -> int:
        return self._options[1]

    def get_single_submit(self) -> bool:
        return self._options[2]

    def get_overlap_events(self) -> bool:
        return self._options[3]

    def get_intra_op_parallelism(self) -> int:
        return self._options[4]

    def get_alignment(self) -> int:
        """Bytes of which sizes and offsets are best multiples; they need not be."""
        return _SECTOR * self._options[4]

    def read(self, buffer: Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """Fill a tensor with all that a file has from the offset on. Gives 0.

        Raises:
            FileError: the file has more or less than that, or cannot be read.
        """
        _check_end(buffer, filename, file_offset)
        self.pread(buffer, filename, validate, False, file_offset)
        return 0

    def write(self, buffer: Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """Write a tensor. Gives 0. Raises FileError."""
        self.pwrite(buffer, filename, validate, False, file_offset)
        return 0

    def pread(self, buffer: Tensor, filename: str, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """Fill a tensor. Gives what `wait` gives, or 0 at once if asynchronous. Raises FileError."""
        return self._begin(self._io.read, buffer, filename, validate, async_, file_offset)

    def pwrite(self, buffer: Tensor, filename: str, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """Write a tensor. Gives what `wait` gives, or 0 at once if asynchronous. Raises FileError."""
        return self._begin(self._io.write, buffer, filename, validate, async_, file_offset)

    def sync_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Fill a tensor. Gives what `wait` gives. Raises FileError."""
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Write a tensor. Gives what `wait` gives. Raises FileError."""
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Begin to fill a tensor. Gives 0. Raises FileError."""
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(
        self, buffer: Tensor, filename: str | int | None = None, file_offset: int = 0, *, fd: int | None = None
    ) -> int:
        """Begin to write a tensor, to a path or to an open file's descriptor. Gives 0. Raises FileError."""
        file = fd if filename is None else filename
        if file is None:
            raise TypeError("async_pwrite() needs filename or fd")
        return self._begin(self._io.write, buffer, file, False, True, file_offset)

    def wait(self) -> int:
        """Wait for all that was begun.

        Returns:
            How many reads and writes that were; those that were not asynchronous have been waited for.

        Raises:
            FileError: one has failed; all have ended.
        """
        with self._io.alone():
            unchecked, self._unchecked = self._unchecked, []
            done = self._io.wait()
        for buffer, filename, file_offset in unchecked:
            _check_content(buffer, filename, file_offset)
        return done

    def _begin(
        self, begin: Callable[..., None], buffer: Tensor, file: File, validate: bool, async_: bool, file_offset: int
    ) -> int:
        with self._io.alone():
            begin(buffer, file, file_offset)
            if validate:
                self._unchecked.append((buffer, file, file_offset))
            return 0 if async_ else self.wait()


def aio_read(
    buffer: Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """`aio_handle.read` with a handle of its own, on one thread. Gives 0."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).read(buffer, filename, validate)


def aio_write(
    buffer: Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """`aio_handle.write` with a handle of its own, on one thread. Gives 0."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).write(buffer, filename, validate)


def deepspeed_memcpy(dest: Tensor, src: Tensor) -> int:
    """Copy a tensor's elements to another of as many and of the same dtype. Gives 0.

    DeepSpeed's own op copies the first dimension's number of float32, whatever the tensors are.

    Raises:
        InvalidTensorError: their numbers of elements or dtypes differ.
    """
    if dest.numel() != src.numel() or dest.dtype != src.dtype:
        raise InvalidTensorError(
            "the tensors do not fit each other",
            op="async_io",
            why=f"dest has {dest.numel()} elements of {dest.dtype}, src {src.numel()} of {src.dtype}",
        )
    dest.detach().copy_(src.detach().reshape(dest.shape))
    return 0


def _check_end(buffer: Tensor, filename: str, file_offset: int) -> None:
    """That the tensor is all that the file has from the offset on. A missing file is for the read to report."""
    path = Path(filename)
    size = path.stat().st_size if path.is_file() else file_offset + buffer.nbytes
    if size > file_offset + buffer.nbytes:
        raise FileError(
            f"reading {buffer.nbytes} bytes at offset {file_offset} of {filename} failed",
            op="async_io",
            why=f"the file has {size} bytes, and read() takes all of them",
            hint="sync_pread() reads a part of a file",
        )


def _flag(name: str, value: bool | str) -> bool:
    """A switch; the configuration that DeepSpeed's ``ds_nvme_tune`` prints has texts."""
    if not isinstance(value, str):
        return bool(value)
    found = _FLAGS.get(value.lower())
    if found is None:
        raise OpError(
            "there is no such way to read and write files",
            op="async_io",
            why=f"{name} is {value!r}; expected true or false",
        )
    return found


def _check_content(buffer: Tensor, file: File, file_offset: int) -> None:
    """That the file has the tensor's bytes."""
    wanted = buffer.detach().cpu().contiguous().view(-1).view(torch.uint8)
    with Path(str(file)).open("rb") as opened:  # only files with a name are validated
        opened.seek(file_offset)
        content = opened.read(wanted.numel())
    if content != wanted.numpy().tobytes():
        raise FileError(
            f"{file} does not have the content of the tensor",
            op="async_io",
            why=f"{wanted.numel()} bytes at offset {file_offset} were compared, as `validate` asked for",
            hint="another process may have written the file; else the disk or its driver is at fault",
        )


__all__ = ["aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"]
