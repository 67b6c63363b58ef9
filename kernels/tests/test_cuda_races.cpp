// Whether ThreadSanitizer sees a barrier that a CUDA kernel on the host lacks.
//
//     test_cuda_races              every barrier is there
//     test_cuda_races block|warp   one is not: this must be reported, in place of the right result
#include <cuda_runtime.h>

#include <cstring>

#include "check.h"

namespace {

constexpr int kThreads = 64;

// Every thread gets its neighbour's number, in the block by shared memory, then in its warp.
__global__ void turn_twice(int* numbers, bool block_waits, bool warp_waits) {
  __shared__ int shared[kThreads];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32 * 32;
  shared[thread] = thread;
  if (block_waits) __syncthreads();
  const int neighbour = shared[(thread + 1) % kThreads];
  __syncthreads();
  shared[thread] = neighbour;
  const int unused = __shfl_xor_sync(0xffffffffu, neighbour, 1);  // orders no memory
  if (warp_waits) __syncwarp();
  numbers[thread] = shared[warp + (thread + 1) % 32] + (unused < 0);
}

}  // namespace

int main(int, char** arguments) {
  const auto lacks = [&](const char* what) { return arguments[1] && !std::strcmp(arguments[1], what); };
  int numbers[kThreads];
  for (int round = 0; round < 2; ++round) {
    on_host::run(turn_twice, dim3(3), kThreads, static_cast<int*>(numbers), !lacks("block"), !lacks("warp"));
    for (int i = 0; i < kThreads; ++i) {
      const int wanted = (i / 32 * 32 + (i + 1) % 32 + 1) % kThreads;
      CHECK(numbers[i] == wanted, "%d: %d, expected %d", i, numbers[i], wanted);
    }
  }
  // A wrong result is no report: with a barrier missing, only ThreadSanitizer may end this program with an error.
  return arguments[1] ? 0 : report();
}
