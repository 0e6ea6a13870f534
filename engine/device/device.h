/*
 * engine/device/device.h - one rank's device: memory, streams, events, copies.
 *
 *     cpu   streams run each operation at once, in the thread that issues it; an event is pending
 *           only while a collective (comm/) is behind it, and waiting for it completes that
 *     cuda  streams and events are CUDA's; one process a GPU
 *
 * The rest of the engine sees no difference: it issues an operation on a stream, records an event,
 * lets another stream wait for it. A device belongs to one rank and is used by its one thread.
 * A CUDA build adds the graph calls at the end; on the CPU they are ST_UNSUPPORTED.
 */
#ifndef ENGINE_DEVICE_DEVICE_H
#define ENGINE_DEVICE_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/config.h"
#include "engine/base/status.h"
#include "engine/base/tensor.h"

C_BEGIN

struct device;
struct stream;
struct event;
struct graph; /* opaque: a captured piece of a step */
struct ops;   /* engine/ops/ops.h: what the device computes */
struct workers;

enum stream_id {
    STREAM_COMPUTE,
    STREAM_GATHER,
    STREAM_REDUCE,
    STREAM_UPDATE,
    STREAM_COPY,
    STREAM_SIDE, /* CUDA: what an instruction lets run beside itself (op_side_begin()) */
    STREAM_COUNT
};

/* On the CPU a collective puts its completion here; done events have complete == NULL. */
struct event {
    void *handle;          /* cudaEvent_t; NULL on the CPU */
    struct device *device; /* borrowed */
    enum status (*complete)(void *context, uint64_t ticket);
    void *context; /* borrowed */
    uint64_t ticket;
};

struct stream {
    struct device *device; /* borrowed */
    enum stream_id id;
    void *handle; /* cudaStream_t; NULL on the CPU */
    /* Scratch memory of the ops issued on this stream; they use it one after the other. */
    void *workspace; /* borrowed, device memory */
    size_t workspace_bytes;
    struct event here; /* of stream_follow() */
    void *pending;     /* CUDA: sums that engine/ops has yet to finish, owned by it (columns.cu) */
    void *last_mark;   /* CUDA: the last node of device_mark() in the capture that is under way */
};

/* A moment on a stream. */
struct device_timer {
    struct device *device; /* borrowed */
    void *handle;          /* cudaEvent_t; NULL on the CPU */
    int64_t ns;            /* CPU: monotonic clock */
};

/* The last mark that each stream has passed; the streams write it, any thread may read it. */
struct progress {
    uint32_t word[STREAM_COUNT];
};

struct device_ops {
    const char *name; /* "cpu", "cuda" */
    void (*close)(struct device *device);
    enum status (*alloc)(struct device *device, void **out, size_t bytes); /* 256-byte aligned */
    void (*free)(struct device *device, void *memory);
    enum status (*alloc_host)(struct device *device, void **out, size_t bytes); /* pinned */
    void (*free_host)(struct device *device, void *memory);
    enum status (*stream_open)(struct stream *s);
    void (*stream_close)(struct stream *s);
    enum status (*event_open)(struct device *device, struct event *e);
    void (*event_close)(struct event *e);
    enum status (*event_record)(struct event *e, struct stream *s);
    enum status (*stream_wait)(struct stream *s, struct event *e);
    enum status (*event_wait)(struct event *e); /* the host waits */
    enum status (*event_query)(const struct event *e, bool *done);
    enum status (*stream_sync)(struct stream *s);
    bool (*idle)(struct device *device);
    enum status (*copy)(struct stream *s, void *out, const void *in, size_t bytes);
    enum status (*fill)(struct stream *s, void *out, int byte, size_t bytes);
    enum status (*capture_begin)(struct stream *s);
    enum status (*capture_end)(struct stream *s, struct graph **out);
    enum status (*graph_launch)(struct stream *s, struct graph *g);
    void (*graph_close)(struct graph *g);
    enum status (*mark)(struct stream *s, uint32_t value);
    enum status (*memory_used)(struct device *device, size_t *bytes);
    enum status (*memory_free)(struct device *device, size_t *bytes);
    enum status (*timer_open)(struct device *device, struct device_timer *t);
    void (*timer_close)(struct device_timer *t);
    enum status (*timer_record)(struct device_timer *t, struct stream *s);
    enum status (*timer_elapsed_ms)(const struct device_timer *begin,
                                    const struct device_timer *end, double *ms);
};

enum { DEVICE_FAILED = -1 };

struct device {
    const struct device_ops *ops;
    const struct ops *compute;
    enum dtype param_dtype;  /* of weights and activations in FORWARD and BACKWARD */
    int index;               /* local GPU number; 0 on the CPU */
    int threads;             /* CPU threads of this rank, >= 1 */
    struct workers *workers; /* owned; those threads (workers.h); NULL: one thread, or CUDA */
    int host_threads;        /* that this rank may use on the host: `threads`, but for CUDA more */
    bool fixed_rows;   /* tensors have the length class's rows, not the batch's (CUDA graphs) */
    bool asynchronous; /* issuing returns before the work is done */
    bool early_launch; /* CUDA: kernels overlap with the end of those before (cuda_common.cuh) */
    bool lost;         /* see device_settle() */
    char name[128];    /* "NVIDIA H100 80GB HBM3", "AMD EPYC 7B13, OpenBLAS Haswell" */
    char bus_id[32];   /* of the card, "0000:3b:00.0"; "" on the CPU */
    struct stream streams[STREAM_COUNT];
    struct progress *progress; /* owned; pinned host memory that the device writes */
    size_t context_bytes;      /* device_memory_used() when the device had just been opened */
    size_t library_bytes;      /* and what opening engine/ops' libraries added */
    void *library;             /* CUDA: handles and plans of engine/ops, owned by it */
    /* CUDA: while the host waits for this device it asks here every few milliseconds whether to go
     * on (comm/nccl.h: a peer failed, the deadline passed). NULL: it waits for ever. With
     * DEVICE_FAILED for a time it asks whether the end of a peer is why; that may take a while. */
    enum status (*watch)(void *context, int64_t waited_ms);
    void *watch_context; /* borrowed */
    /* What the marks of device_mark() mean, in words; NULL: nobody says. Safe from any thread. */
    void (*name_mark)(const void *context, uint32_t mark, char *out, size_t bytes);
    const void *name_context; /* borrowed */
};

/**
 * device_open() - open one rank's device with its streams.
 * @kind: DEVICE_CPU, DEVICE_CUDA, or DEVICE_AUTO (CUDA if built in and a GPU is visible).
 * @local_rank: which of the visible GPUs. Selected before any other CUDA call of the process.
 * @threads: of this rank on the CPU, >= 1; its own among them. A CPU device cuts the work itself
 * and asks OpenBLAS for one thread; another CBLAS must be told so by its own environment variable.
 * For CUDA it only says how many a rank may start for work on the host (host_threads).
 *
 * Return: ST_OK; ST_UNSUPPORTED (CUDA asked for and not built in, no such GPU, precision not
 * possible); ST_DEVICE.
 */
MUST_CHECK enum status device_open(struct device **out, enum device_kind kind,
                                   enum precision_kind precision, int local_rank, int threads);
void device_close(struct device **device);

/** device_cuda_count() - visible GPUs; 0 without CUDA. Creates no context. */
int device_cuda_count(void);

/** device_cuda_bus_id() - where the visible GPU @index hangs, "0000:3b:00.0"; no context either.
 * ST_DEVICE; ST_UNSUPPORTED without CUDA. */
MUST_CHECK enum status device_cuda_bus_id(char out[32], int index);

/** device_cuda_enter() - from now on the calling thread's CUDA calls go to @device. ST_DEVICE. */
MUST_CHECK enum status device_cuda_enter(const struct device *device);

/** device_cuda_peers() - the other visible GPUs, and how many of them the GPU @index reads and
 * writes without a way through host memory (NVLink, PCIe). Zeros without CUDA. */
void device_cuda_peers(int index, int *direct, int *others);

enum { DEVICE_SETTLE_MS = 3000 };

/**
 * device_settle() - before memory is given back: wait until all streams are idle, for
 * DEVICE_SETTLE_MS at most.
 *
 * After a failure a kernel may wait for a rank that is gone, and nothing can end it but the end of
 * the process. Then device->lost is set: what would wait for the device (freeing and closing) does
 * nothing from now on, and the process should end soon, by _Exit(). Say the cause before: the
 * driver may be stuck too, and not answer.
 */
void device_settle(struct device *device);

/* The calls below go straight to the table; all are asynchronous but for the waits. */
/** device_alloc() - zero-filled, and there: no page of it comes later. Return: ST_OK; ST_MEMORY. */
MUST_CHECK enum status device_alloc(struct device *device, void **out, size_t bytes);
void device_free(struct device *device, void **memory);
MUST_CHECK enum status device_alloc_host(struct device *device, void **out, size_t bytes);
void device_free_host(struct device *device, void **memory);
MUST_CHECK enum status event_open(struct device *device, struct event *e);
void event_close(struct event *e);
MUST_CHECK enum status event_record(struct event *e, struct stream *s);
MUST_CHECK enum status stream_wait(struct stream *s, struct event *e);
/** stream_follow() - what is issued on @s from now on runs behind all that was issued on @first. */
MUST_CHECK enum status stream_follow(struct stream *s, struct stream *first);
MUST_CHECK enum status event_wait(struct event *e);
/** event_query() - is what stands before it done? Does not wait; not for events of collectives. */
MUST_CHECK enum status event_query(const struct event *e, bool *done);
MUST_CHECK enum status stream_sync(struct stream *s);
/** device_copy() - between device and (pinned) host memory or within either. */
MUST_CHECK enum status device_copy(struct stream *s, void *out, const void *in, size_t bytes);
MUST_CHECK enum status device_fill(struct stream *s, void *out, int byte, size_t bytes);

/**
 * device_mark() - write @value to the stream's progress word when the stream comes to here. A
 * watchdog reads it with device_progress() to say where a rank stands. In a capture nothing waits
 * for it but what follows on the streams of collectives.
 */
MUST_CHECK enum status device_mark(struct stream *s, uint32_t value);

/** device_progress() - the last mark that a stream passed; 0 before the first. Any thread. */
uint32_t device_progress(const struct device *device, enum stream_id id);

/**
 * device_memory_used() - memory that the driver says is taken on the card, by this and any other
 * process; on the CPU the resident set of this process. What is there at device_open() is kept in
 * device->context_bytes, so the growth is what this rank allocated.
 */
MUST_CHECK enum status device_memory_used(struct device *device, size_t *bytes);

/** device_memory_free() - what may still be allocated: free memory of the card; on the CPU what the
 * system and its control groups leave, to all ranks here together (engine/device/host_memory.h). */
MUST_CHECK enum status device_memory_free(struct device *device, size_t *bytes);

/* Timers, for benches and traces: elapsed time between two recorded moments. In a captured piece
 * the record is part of the graph and holds the moment of the last launch. */
MUST_CHECK enum status device_timer_open(struct device *device, struct device_timer *t);
void device_timer_close(struct device_timer *t); /* of a zeroed timer is fine, and twice */
MUST_CHECK enum status device_timer_record(struct device_timer *t, struct stream *s);
/** device_timer_elapsed_ms() - waits for @end. ST_DEVICE if one of them was never recorded. */
MUST_CHECK enum status device_timer_elapsed_ms(const struct device_timer *begin,
                                               const struct device_timer *end, double *ms);

/* Graphs: what is issued on @s, and on streams that wait for an event of @s, between begin and end
 * is recorded and not run; all streams must have been joined to @s by events before the end. The
 * graph keeps the priorities of the streams. Close it before the communicator that it uses. */
MUST_CHECK enum status stream_capture_begin(struct stream *s);
MUST_CHECK enum status stream_capture_end(struct stream *s, struct graph **out);
MUST_CHECK enum status graph_launch(struct stream *s, struct graph *g);
void graph_close(struct graph **g); /* of NULL is fine */

/* The two backends, for device.c. The CUDA one exists in CUDA builds only. */
MUST_CHECK enum status device_cpu_open(struct device **out, int threads);
MUST_CHECK enum status device_cuda_open(struct device **out, enum precision_kind precision,
                                        int local_rank);

/* engine/ops stands above this module; the CUDA device calls up to it for the library field only:
 * after its streams exist, and before they end. Defined in CUDA builds only. */
MUST_CHECK enum status ops_cuda_open(struct device *device);
void ops_cuda_close(struct device *device);

C_END

#endif
