// Runs CUDA kernels on the host, where there is no GPU: what it takes of CUDA's language and runtime for our .cu files,
// in place of CUDA's own header. It is for tests: indices, tails, reductions and numbers are those of the GPU, speed is
// not.
//
// Blocks run one after the other. The threads of a block are fibers, which take turns at __syncthreads() and at what
// synchronises a warp; a barrier that some thread never reaches is an error and not a deadlock.
//
//     g++ -x c++ -DDS_KERNELS_CUDA_ON_HOST -Ikernels/tests/cuda_on_host ... kernels/cuda/adam.cu
//
// With -fsanitize=thread each fiber is a thread for ThreadSanitizer, ordered with those of its block by barriers alone,
// as on a GPU: a barrier that is missing is reported, whichever turn the fibers took. Shuffles order no memory.
#pragma once

#include <setjmp.h>
#include <ucontext.h>
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>

#ifndef DS_KERNELS_CUDA_ON_HOST
#error "this header is for -DDS_KERNELS_CUDA_ON_HOST"
#endif

// What stands in for the GPU itself is no access of a kernel.
#ifdef __SANITIZE_THREAD__
#define ON_HOST_UNSEEN __attribute__((no_sanitize("thread"), noinline))
#else
#define ON_HOST_UNSEEN
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

// ---- types -----------------------------------------------------------------------------------------------------

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

enum cudaError_t { cudaSuccess, cudaErrorUnknown };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "unknown"; }

// A small one, so that grids of as many blocks as it takes at once loop over rows.
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 2;
  return cudaSuccess;
}

enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
inline cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  return posix_memalign(pointer, 256, bytes) ? cudaErrorUnknown : cudaSuccess;
}
inline cudaError_t cudaFree(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (bytes) std::memcpy(to, from, bytes);  // empty arrays may be null
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

// ---- a block of threads ----------------------------------------------------------------------------------------

namespace on_host {

#ifndef DS_KERNELS_WARP_THREADS
#define DS_KERNELS_WARP_THREADS 32
#endif
constexpr int kWarp = DS_KERNELS_WARP_THREADS, kMostThreads = 1024;
constexpr size_t kStackBytes = 256 << 10;

enum class State { runnable, at_warp, at_block, done };

// What ThreadSanitizer is told: which thread runs, and what orders threads.
#ifdef __SANITIZE_THREAD__
inline void* new_thread() { return __tsan_create_fiber(0); }
inline void* this_thread() { return __tsan_get_current_fiber(); }
inline void runs(void* thread) { __tsan_switch_to_fiber(thread, __tsan_switch_to_fiber_no_sync); }
inline void before(void* order) { __tsan_release(order); }
inline void after(void* order) { __tsan_acquire(order); }
#else
inline void* new_thread() { return nullptr; }
inline void* this_thread() { return nullptr; }
inline void runs(void*) {}
inline void before(void*) {}
inline void after(void*) {}
#endif

// Where a fiber goes on. A jump takes nanoseconds; swapcontext asks the system for the signal mask, twice.
struct Place {
  jmp_buf registers;
  void* thread;
};

struct Fiber {
  Place place;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  State state = State::done;
  int shuffles = 0;
  int warp_barriers = 0, block_barriers = 0;
  uint64_t slot[2];  // what it offers to the shuffle under way, and to the one before
};

struct Block {
  Place scheduler;
  Fiber* fibers[kMostThreads];
  std::function<void()> kernel;
  int made = 0, threads = 0, current = 0;
  // Addresses that stand for what threads wait for. A barrier has two, in turns: who is already at the next one has not
  // let anybody pass this one.
  char begin, end, block_barrier[2], warp_barrier[kMostThreads / kWarp][2];
};

inline Block block;
inline dim3 thread_index, block_index, block_dimensions, grid_dimensions;

[[noreturn]] inline void die(const char* what) {
  std::fprintf(stderr, "CUDA on host: %s (block %u, thread %d)\n", what, block_index.x, block.current);
  std::abort();
}

ON_HOST_UNSEEN inline Fiber& current() { return *block.fibers[block.current]; }

__attribute__((noinline)) ON_HOST_UNSEEN inline void go(Place& from, Place& to) {
  if (_setjmp(from.registers)) return;
  runs(to.thread);
  _longjmp(to.registers, 1);
}

ON_HOST_UNSEEN inline void wait(State state) {
  const int me = block.current;
  current().state = state;
  go(current().place, block.scheduler);
  block.current = me;  // the scheduler has set thread_index with it
}

ON_HOST_UNSEEN inline void barrier(State state, int& barriers, char (&orders)[2]) {
  char* order = &orders[barriers++ & 1];
  before(order);
  wait(state);
  after(order);
}

// A fiber runs the thread of its index in one block after the other.
inline void live() {
  for (;;) {
    wait(State::done);
    after(&block.begin);
    block.kernel();
    before(&block.end);
  }
}

ON_HOST_UNSEEN inline void resume(int thread) {
  block.current = thread;
  thread_index = dim3(static_cast<unsigned>(thread), 0, 0);
  go(block.scheduler, current().place);
}

// Makes a fiber, up to its first wait.
__attribute__((noinline)) ON_HOST_UNSEEN inline void add_fiber() {
  block.current = block.made++;
  block.fibers[block.current] = new Fiber;
  current().place.thread = new_thread();
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = current().stack.get();
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, live, 0);
  if (_setjmp(block.scheduler.registers)) return;
  runs(current().place.thread);
  setcontext(&context);
}

// Lets the threads [first, last) go on if all of them that still run wait for each other. Whether any did.
ON_HOST_UNSEEN inline bool release(int first, int last, State state) {
  int waiting = 0;
  for (int i = first; i < last; ++i) {
    const State now = block.fibers[i]->state;
    if (now != state && now != State::done) return false;
    waiting += now == state;
  }
  for (int i = first; i < last; ++i) {
    if (block.fibers[i]->state == state) block.fibers[i]->state = State::runnable;
  }
  return waiting > 0;
}

ON_HOST_UNSEEN inline void start(int threads) {
  if (threads > kMostThreads) die("a block of more threads than a GPU takes");
  block.scheduler.thread = this_thread();
  while (block.made < threads) add_fiber();
  block.threads = threads;
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = *block.fibers[i];
    fiber.state = State::runnable;
    fiber.shuffles = fiber.warp_barriers = fiber.block_barriers = 0;
  }
}

ON_HOST_UNSEEN inline void run_block() {
  before(&block.begin);
  for (;;) {
    bool ran = false, all_done = true;
    for (int i = 0; i < block.threads; ++i) {
      if (block.fibers[i]->state == State::runnable) resume(i), ran = true;
      all_done = all_done && block.fibers[i]->state == State::done;
    }
    if (all_done) break;
    for (int i = 0; i < block.threads; i += kWarp) {
      ran |= release(i, i + kWarp < block.threads ? i + kWarp : block.threads, State::at_warp);
    }
    ran |= release(0, block.threads, State::at_block);
    if (!ran) die("a barrier that not all threads reach");
  }
  after(&block.end);
}

template <class... Parameters, class... Arguments>
void run(void (*kernel)(Parameters...), dim3 blocks, unsigned threads, const Arguments&... arguments) {
  block_dimensions = dim3(threads);
  grid_dimensions = blocks;
  block.kernel = [&] { kernel(arguments...); };
  for (unsigned y = 0; y < blocks.y; ++y) {
    for (unsigned x = 0; x < blocks.x; ++x) {
      block_index = dim3(x, y, 0);
      start(static_cast<int>(threads));
      run_block();
    }
  }
}

// The value that the thread of another lane offers; one's own where that lane has no thread or has ended.
template <class T>
ON_HOST_UNSEEN T shuffle(T value, int lane) {
  static_assert(sizeof(T) <= 8, "one register or two");
  const int me = block.current, parity = current().shuffles++ & 1;
  __builtin_memcpy(&current().slot[parity], &value, sizeof(T));
  wait(State::at_warp);
  const int other = me / kWarp * kWarp + lane;
  // It may have taken part and ended since.
  if (lane >= kWarp || other >= block.threads || block.fibers[other]->shuffles < current().shuffles) return value;
  __builtin_memcpy(&value, &block.fibers[other]->slot[parity], sizeof(T));
  return value;
}

// ---- numbers ---------------------------------------------------------------------------------------------------

// A result that is so many units in the last place too large.
inline float inexact(float x, float units) { return x == 0 ? x : x * (1.f + units * 0x1p-23f); }

// ---- half precision, one bit pattern at a time -------------------------------------------------------------------

inline float widen_float16(uint16_t half) {
  const int exponent = (half & 0x7fff) >> 10, fraction = half & 0x3ff;
  float magnitude = exponent ? std::ldexp(1024.f + fraction, exponent - 25) : std::ldexp(1.f * fraction, -24);
  if (exponent == 31) magnitude = fraction ? NAN : INFINITY;
  return half & 0x8000 ? -magnitude : magnitude;
}

// Rounds to nearest even, as the current rounding mode has it.
inline uint16_t narrow_float16(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float magnitude = std::fabs(x);
  if (x != x) return sign | 0x7fff;
  if (magnitude >= 65520.f) return sign | 0x7c00;
  int exponent = magnitude > 0 ? std::ilogb(magnitude) : -15;
  if (exponent < -14) exponent = -14;
  const auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  // A mantissa of 2048 carries into the exponent by itself.
  return static_cast<uint16_t>(sign | (steps < 1024 ? steps : ((exponent + 14) << 10) + steps));
}

}  // namespace on_host

#define threadIdx (::on_host::thread_index)
#define blockIdx (::on_host::block_index)
#define blockDim (::on_host::block_dimensions)
#define gridDim (::on_host::grid_dimensions)

// ---- what kernels call -----------------------------------------------------------------------------------------

inline void __syncthreads() {
  on_host::barrier(on_host::State::at_block, on_host::current().block_barriers, on_host::block.block_barrier);
}
inline void __syncwarp(uint64_t = 0) {
  const int warp = on_host::block.current / on_host::kWarp;
  on_host::barrier(on_host::State::at_warp, on_host::current().warp_barriers, on_host::block.warp_barrier[warp]);
}

template <class T>
T __shfl_sync(uint64_t, T value, int lane) {
  return on_host::shuffle(value, lane);
}
template <class T>
T __shfl_xor_sync(uint64_t, T value, int mask) {
  return on_host::shuffle(value, (on_host::block.current % on_host::kWarp) ^ mask);
}
template <class T>
T __shfl_up_sync(uint64_t, T value, int delta) {
  const int lane = on_host::block.current % on_host::kWarp;
  return on_host::shuffle(value, lane >= delta ? lane - delta : lane);
}
template <class T>
T __shfl_down_sync(uint64_t, T value, int delta) {
  return on_host::shuffle(value, on_host::block.current % on_host::kWarp + delta);
}

inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
// As far from the true result as CUDA's may be, by its programming guide.
inline float __expf(float x) { return on_host::inexact(std::exp(x), 2 + std::floor(std::fabs(1.173f * x))); }
inline float __fdividef(float a, float b) { return on_host::inexact(a / b, 2); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class T>
void __stwb(T* to, T value) {
  *to = value;
}
// Of whole numbers; the order in which they happen is open, but orders no other memory.
template <class T>
T atomicAdd(T* to, T value) {
  return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicMax(T* to, T value) {
  T before = __atomic_load_n(to, __ATOMIC_RELAXED);
  while (before < value && !__atomic_compare_exchange_n(to, &before, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return before;
}
template <class T>
T atomicMin(T* to, T value) {
  T before = __atomic_load_n(to, __ATOMIC_RELAXED);
  while (value < before && !__atomic_compare_exchange_n(to, &before, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return before;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
// Four bytes of eight: those of `a` are 0 to 3, those of `b` 4 to 7.
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = a | uint64_t(b) << 32;
  uint32_t chosen = 0;
  for (int i = 0; i < 4; ++i) chosen |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return chosen;
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>((uint64_t(a) * b) >> 32); }
