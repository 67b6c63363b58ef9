// Reading and writing files on threads: memory on one side, a file descriptor on the other. No torch, no library beside
// the C library and the kernel. A C interface, so that one binary serves every Python and every torch.
//
// An operation is cut into blocks, and these among the threads. A thread keeps up to `queue_depth` blocks with the
// kernel, by io_uring; where the kernel does not allow io_uring, there are more threads, and each calls pread or pwrite.
#pragma once

#include <cstdint>

#define DS_IO_API extern "C" __attribute__((visibility("default")))

namespace ds_kernels {

// Bits of `flags` of ds_io_start.
constexpr int32_t kIoSingleSubmit = 1;  // each block by a system call of its own, not all at once
constexpr int32_t kIoOverlap = 2;       // a finished block is replaced at once, not when all have finished
constexpr int32_t kIoNoRing = 4;        // no io_uring

// What ds_io_wait gives for a read beyond the end of the file; every other error is a number of errno.h.
constexpr int32_t kIoEndOfFile = -1;

// Without io_uring, threads for each that was asked for: they stand for the depth of its queue.
constexpr int64_t kIoThreadsPerQueue = 4;

// Blocks begin and end with pages, so that no two of them share one.
constexpr int64_t kIoPage = 4096;

}  // namespace ds_kernels

// Starts `threads` threads that work in blocks of `block_size` bytes, rounded up to whole pages. Null if the system gives
// no more threads.
DS_IO_API void* ds_io_start(int64_t block_size, int64_t queue_depth, int64_t threads, int32_t flags);

// How many of the threads use io_uring: all or none.
DS_IO_API int64_t ds_io_rings(const void* io);

// Begins to read or to write `size` bytes at `offset` of the file `fd`. A block that fails or comes short there is
// completed through `fallback`, another descriptor of the same file without O_DIRECT: where the memory or the file
// system does not fit O_DIRECT, that serves. Memory and both descriptors must stay until ds_io_wait.
DS_IO_API void* ds_io_submit(void* io, int32_t fd, int32_t fallback, void* memory, int64_t size, int64_t offset,
                             int32_t write);

// Waits for an operation and forgets it. 0, or what went wrong first.
DS_IO_API int32_t ds_io_wait(void* io, void* operation);

// Ends the threads. All operations must have been waited for.
DS_IO_API void ds_io_stop(void* io);
