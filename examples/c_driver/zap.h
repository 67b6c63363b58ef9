/* The driver of ZAP devices, as a vendor of hardware might have it: C, and nothing of torch.
 *
 * All functions may be called from any thread. Those that return int return ZAP_OK or what went wrong.
 */
#ifndef ZAP_H
#define ZAP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { ZAP_OK, ZAP_BUSY, ZAP_NO_DEVICE, ZAP_NO_MEMORY, ZAP_LOST, ZAP_TIMEOUT, ZAP_FAILED };
const char* zap_text(int status);

/* Devices. ZAP_VISIBLE_DEVICES=0,1 says which a process sees. */
int zap_device_count(void);
int zap_lost(void); /* whether this process is a fork of one that used a device: it cannot use it */

/* Memory. Addresses of devices cannot be followed by the host. */
typedef uint64_t zap_address;
int zap_memory(int device, size_t* available, size_t* total);
int zap_malloc(int device, size_t bytes, zap_address* address);
int zap_free(zap_address address);             /* waits for the device */
int zap_device_of(zap_address address);        /* -1: it is the host's */
void* zap_host_malloc(size_t bytes);           /* host memory that devices can reach */
void zap_host_free(void* memory);

/* Queues: what is put into one runs in order; queues run side by side. They are never destroyed. */
typedef struct zap_queue zap_queue;
int zap_queue_create(int device, zap_queue** queue);
int zap_default_queue(int device, zap_queue** queue);
int zap_query(zap_queue* queue);               /* ZAP_BUSY while there is work */
int zap_wait(zap_queue* queue);                /* gives what went wrong in the work */
int zap_device_wait(int device);

/* Work. Addresses are the host's or a device's. */
int zap_copy(zap_queue* queue, zap_address to, zap_address from, size_t bytes);
int zap_fill(zap_queue* queue, zap_address to, unsigned char value, size_t bytes);
typedef int zap_kernel(void* arguments);       /* runs on the device, on a copy of its arguments */
int zap_launch(zap_queue* queue, zap_kernel* kernel, const void* arguments, size_t bytes);
void* zap_at(zap_address address);             /* where a kernel finds device memory */
void zap_delay(int64_t microseconds);          /* for tests: all work begins so much later */

/* Marks: points in a queue. */
typedef struct zap_mark zap_mark;
zap_mark* zap_mark_create(void);
void zap_mark_destroy(zap_mark* mark);
int zap_mark_record(zap_mark* mark, zap_queue* queue);
int zap_mark_query(zap_mark* mark);            /* ZAP_BUSY until it is reached */
int zap_mark_wait(zap_mark* mark);
int zap_queue_wait(zap_queue* queue, zap_mark* mark);
int zap_mark_time(zap_mark* mark, double* milliseconds);

/* Groups of processes, a rank each, that compute together. `name` is the same for all, and new. Where a rank does not come
   in time, the call, or the queue, ends with ZAP_TIMEOUT. */
typedef struct zap_group zap_group;
int zap_group_create(const char* name, int rank, int ranks, double timeout_ms, zap_group** group);
int zap_all_reduce(zap_group* group, zap_queue* queue, zap_address floats, size_t count); /* the sum of all ranks */

#ifdef __cplusplus
}
#endif
#endif
