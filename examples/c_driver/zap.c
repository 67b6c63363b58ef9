/* Two devices, made of host memory and threads. */
#define _GNU_SOURCE
#include "zap.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { DEVICES = 2, ALIGNMENT = 512, CHUNK = 1 << 14 };
static const size_t kTotal = (size_t)2 << 30;

const char* zap_text(int status) {
  static const char* const texts[] = {"ok", "busy", "no such device", "not enough memory",
                                      "this process is a fork of one that used the device; start it with spawn",
                                      "a rank of the group does not answer", "a kernel failed"};
  return texts[status];
}

static double now_ms(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e3 * (double)time.tv_sec + 1e-6 * (double)time.tv_nsec;
}

/* ---- devices */
int zap_device_count(void) {
  const char* visible = getenv("ZAP_VISIBLE_DEVICES");
  if (!visible) return DEVICES;
  int seen[DEVICES] = {0}, count = 0;
  for (char* end; *visible; visible = *end ? end + 1 : end) {
    const long device = strtol(visible, &end, 10);
    if (end == visible || device < 0 || device >= DEVICES || seen[device]++) break;
    ++count;
  }
  return count;
}

static _Atomic pid_t user; /* the process that used a device first */
int zap_lost(void) { return user != 0 && user != getpid(); }

/* ---- memory: an address is the host's, with the device's number in its highest byte; its size stands before it */
static _Atomic size_t used[DEVICES];

int zap_memory(int device, size_t* available, size_t* total) {
  if (device < 0 || device >= zap_device_count()) return ZAP_NO_DEVICE;
  *available = kTotal - used[device];
  *total = kTotal;
  return ZAP_OK;
}

int zap_malloc(int device, size_t bytes, zap_address* address) {
  if (device < 0 || device >= zap_device_count()) return ZAP_NO_DEVICE;
  if (bytes > kTotal || atomic_fetch_add(&used[device], bytes) + bytes > kTotal) {
    if (bytes <= kTotal) used[device] -= bytes;
    return ZAP_NO_MEMORY;
  }
  char* block = aligned_alloc(ALIGNMENT, ALIGNMENT + (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
  memcpy(block, &bytes, sizeof bytes);
  *address = (zap_address)(device + 1) << 56 | (uintptr_t)(block + ALIGNMENT);
  return ZAP_OK;
}

void* zap_at(zap_address address) { return (void*)(uintptr_t)(address & (((zap_address)1 << 56) - 1)); }
int zap_device_of(zap_address address) { return (int)(address >> 56) - 1; }

int zap_free(zap_address address) {
  if (zap_lost()) return ZAP_LOST;
  zap_device_wait(zap_device_of(address));
  char* block = (char*)zap_at(address) - ALIGNMENT;
  size_t bytes;
  memcpy(&bytes, block, sizeof bytes);
  used[zap_device_of(address)] -= bytes;
  free(block);
  return ZAP_OK;
}

void* zap_host_malloc(size_t bytes) { return aligned_alloc(4096, (bytes + 4095) / 4096 * 4096); }
void zap_host_free(void* memory) { free(memory); }

/* ---- queues: a list of tasks and a thread each */
struct task {
  struct task* next;
  zap_kernel* run;
  int delayed;
  _Alignas(16) char arguments[];
};
struct zap_queue {
  int device, started, failure;
  pthread_mutex_t lock;
  pthread_cond_t change;
  struct task *first, **last;
  uint64_t submitted, done;
  zap_queue* next; /* of the same device */
};
static pthread_mutex_t queues_lock = PTHREAD_MUTEX_INITIALIZER;
static zap_queue *queues[DEVICES], *defaults[DEVICES];
static _Atomic int64_t delay_us;
void zap_delay(int64_t microseconds) { delay_us = microseconds; }

static zap_queue* new_queue(int device) {
  zap_queue* queue = calloc(1, sizeof *queue);
  queue->device = device;
  queue->last = &queue->first;
  pthread_mutex_init(&queue->lock, NULL);
  pthread_cond_init(&queue->change, NULL);
  queue->next = queues[device];
  return queues[device] = queue;
}

int zap_queue_create(int device, zap_queue** queue) {
  if (device < 0 || device >= zap_device_count()) return ZAP_NO_DEVICE;
  pthread_mutex_lock(&queues_lock);
  *queue = new_queue(device);
  pthread_mutex_unlock(&queues_lock);
  return ZAP_OK;
}

int zap_default_queue(int device, zap_queue** queue) {
  if (device < 0 || device >= DEVICES || (!defaults[device] && device >= zap_device_count())) return ZAP_NO_DEVICE;
  pthread_mutex_lock(&queues_lock);
  if (!defaults[device]) defaults[device] = new_queue(device);
  *queue = defaults[device];
  pthread_mutex_unlock(&queues_lock);
  return ZAP_OK;
}

static void* work(void* pointer) {
  zap_queue* queue = pointer;
  pthread_mutex_lock(&queue->lock);
  for (;;) {
    while (!queue->first) pthread_cond_wait(&queue->change, &queue->lock);
    struct task* task = queue->first;
    if (!(queue->first = task->next)) queue->last = &queue->first;
    pthread_mutex_unlock(&queue->lock);
    if (task->delayed && delay_us > 0) usleep((useconds_t)delay_us);
    const int failure = task->run(task->arguments);
    free(task);
    pthread_mutex_lock(&queue->lock);
    if (!queue->failure) queue->failure = failure;
    ++queue->done;
    pthread_cond_broadcast(&queue->change);
  }
  return NULL;
}

static int submit(zap_queue* queue, zap_kernel* run, const void* arguments, size_t bytes, int delayed) {
  if (zap_lost()) return ZAP_LOST;
  user = getpid();
  struct task* task = malloc(sizeof *task + bytes);
  task->next = NULL, task->run = run, task->delayed = delayed;
  memcpy(task->arguments, arguments, bytes);
  pthread_mutex_lock(&queue->lock);
  *queue->last = task;
  queue->last = &task->next;
  ++queue->submitted;
  pthread_t thread;
  if (!queue->started++ && pthread_create(&thread, NULL, work, queue) == 0) pthread_detach(thread);
  pthread_cond_broadcast(&queue->change);
  pthread_mutex_unlock(&queue->lock);
  return ZAP_OK;
}

int zap_query(zap_queue* queue) {
  pthread_mutex_lock(&queue->lock);
  const int busy = queue->done < queue->submitted;
  pthread_mutex_unlock(&queue->lock);
  return busy ? ZAP_BUSY : ZAP_OK;
}

int zap_wait(zap_queue* queue) {
  if (zap_lost()) return ZAP_LOST;
  pthread_mutex_lock(&queue->lock);
  const uint64_t goal = queue->submitted;
  while (queue->done < goal) pthread_cond_wait(&queue->change, &queue->lock);
  const int failure = queue->failure;
  queue->failure = ZAP_OK;
  pthread_mutex_unlock(&queue->lock);
  return failure;
}

int zap_device_wait(int device) {
  if (device < 0 || device >= DEVICES || (!queues[device] && device >= zap_device_count())) return ZAP_NO_DEVICE;
  pthread_mutex_lock(&queues_lock);
  zap_queue* queue = queues[device];
  pthread_mutex_unlock(&queues_lock);
  int failure = ZAP_OK;
  for (; queue; queue = queue->next) {
    const int status = zap_wait(queue);
    if (!failure) failure = status;
  }
  return failure;
}

/* ---- work */
struct copy { zap_address to, from; size_t bytes; };
static int copy(void* p) {
  const struct copy* c = p;
  memmove(zap_at(c->to), zap_at(c->from), c->bytes);
  return ZAP_OK;
}
int zap_copy(zap_queue* queue, zap_address to, zap_address from, size_t bytes) {
  const struct copy c = {to, from, bytes};
  return submit(queue, copy, &c, sizeof c, 1);
}

struct fill { zap_address to; size_t bytes; unsigned char value; };
static int fill(void* p) {
  const struct fill* f = p;
  memset(zap_at(f->to), f->value, f->bytes);
  return ZAP_OK;
}
int zap_fill(zap_queue* queue, zap_address to, unsigned char value, size_t bytes) {
  const struct fill f = {to, bytes, value};
  return submit(queue, fill, &f, sizeof f, 1);
}

int zap_launch(zap_queue* queue, zap_kernel* kernel, const void* arguments, size_t bytes) {
  return submit(queue, kernel, arguments, bytes, 1);
}

/* ---- marks: each recording is a point, which lives until nobody refers to it */
struct point { int references, reached; double ms; };
struct zap_mark { struct point* point; };
static pthread_mutex_t points_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t point_reached = PTHREAD_COND_INITIALIZER;

static void release(struct point* point) { /* with the lock held */
  if (point && --point->references == 0) free(point);
}
static struct point* point_of(zap_mark* mark) {
  pthread_mutex_lock(&points_lock);
  struct point* point = mark->point;
  if (point) ++point->references;
  pthread_mutex_unlock(&points_lock);
  return point;
}
static int reach(void* p) {
  struct point* point = *(struct point**)p;
  pthread_mutex_lock(&points_lock);
  point->reached = 1, point->ms = now_ms();
  release(point);
  pthread_cond_broadcast(&point_reached);
  pthread_mutex_unlock(&points_lock);
  return ZAP_OK;
}
static int await(void* p) {
  struct point* point = *(struct point**)p;
  pthread_mutex_lock(&points_lock);
  while (!point->reached) pthread_cond_wait(&point_reached, &points_lock);
  release(point);
  pthread_mutex_unlock(&points_lock);
  return ZAP_OK;
}

zap_mark* zap_mark_create(void) { return calloc(1, sizeof(zap_mark)); }
void zap_mark_destroy(zap_mark* mark) {
  pthread_mutex_lock(&points_lock);
  release(mark->point);
  pthread_mutex_unlock(&points_lock);
  free(mark);
}
int zap_mark_record(zap_mark* mark, zap_queue* queue) {
  if (zap_lost()) return ZAP_LOST;
  struct point* point = calloc(1, sizeof *point);
  point->references = 2; /* the mark's and the queue's */
  pthread_mutex_lock(&points_lock);
  release(mark->point);
  mark->point = point;
  pthread_mutex_unlock(&points_lock);
  return submit(queue, reach, &point, sizeof point, 0);
}
int zap_mark_query(zap_mark* mark) {
  pthread_mutex_lock(&points_lock);
  const int busy = mark->point && !mark->point->reached;
  pthread_mutex_unlock(&points_lock);
  return busy ? ZAP_BUSY : ZAP_OK;
}
int zap_mark_wait(zap_mark* mark) {
  if (zap_lost()) return ZAP_LOST;
  struct point* point = point_of(mark);
  return point ? await(&point) : ZAP_OK;
}
int zap_queue_wait(zap_queue* queue, zap_mark* mark) {
  struct point* point = zap_lost() ? NULL : point_of(mark);
  return point ? submit(queue, await, &point, sizeof point, 0) : ZAP_OK;
}
int zap_mark_time(zap_mark* mark, double* milliseconds) {
  if (!mark->point || zap_mark_query(mark) == ZAP_BUSY) return ZAP_BUSY;
  *milliseconds = mark->point->ms;
  return ZAP_OK;
}

/* ---- groups: a piece of shared memory with a slot for each rank */
struct shared { _Atomic uint32_t arrived; _Alignas(64) float slots[][CHUNK]; };
struct zap_group { int rank, ranks; double timeout_ms; uint32_t meetings; struct shared* shared; };

static int meet(zap_group* group) {
  const uint32_t goal = ++group->meetings * (uint32_t)group->ranks;
  const double end = now_ms() + group->timeout_ms;
  atomic_fetch_add(&group->shared->arrived, 1);
  while ((int32_t)(group->shared->arrived - goal) < 0) {
    if (now_ms() > end) return ZAP_TIMEOUT;
    sched_yield();
  }
  return ZAP_OK;
}

int zap_group_create(const char* name, int rank, int ranks, double timeout_ms, zap_group** group) {
  const size_t bytes = sizeof(struct shared) + (size_t)ranks * CHUNK * sizeof(float);
  const int file = shm_open(name, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, (off_t)bytes) != 0) return ZAP_FAILED;
  void* memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return ZAP_NO_MEMORY;
  zap_group made = {rank, ranks, timeout_ms, 0, memory};
  const int status = meet(&made);
  if (rank == 0) shm_unlink(name);
  *group = malloc(sizeof made);
  **group = made;
  return status;
}

struct reduction { zap_group* group; zap_address floats; size_t count; };
static int reduce(void* p) {
  const struct reduction* r = p;
  float(*slots)[CHUNK] = r->group->shared->slots;
  for (size_t first = 0; first < r->count; first += CHUNK) {
    const size_t count = r->count - first < CHUNK ? r->count - first : CHUNK;
    float* part = (float*)zap_at(r->floats) + first;
    memcpy(slots[r->group->rank], part, count * sizeof(float));
    int status = meet(r->group);
    if (status) return status;
    for (size_t i = 0; i < count; ++i) {
      part[i] = 0;
      for (int rank = 0; rank < r->group->ranks; ++rank) part[i] += slots[rank][i];
    }
    status = meet(r->group); /* before a slot is written again */
    if (status) return status;
  }
  return ZAP_OK;
}
int zap_all_reduce(zap_group* group, zap_queue* queue, zap_address floats, size_t count) {
  const struct reduction r = {group, floats, count};
  return submit(queue, reduce, &r, sizeof r, 1);
}
