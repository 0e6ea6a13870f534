/*
 * comm/nccl_private.h - what the files of the NCCL communicator share.
 *
 *     nccl.c            the collectives; opening and closing
 *     nccl_jobs.c       NCCL calls that may not return
 *     nccl_failure.c    what ends a rank's waits: causes, aborts, the watch
 *     nccl_window.c     memory that is registered as symmetric windows
 *     nccl_peers.cu     collectives in such windows, by kernels of our own
 *
 * Only these files include it.
 *
 * NCCL calls that may block for ever run in a thread of their own, so that this rank can give up on
 * them. They then stay behind, and so does what they use.
 *
 * The rank's own thread starts one CALL at a time: open, register, deregister, destroy. An abort
 * may be started beside it, by any thread, so each communicator's abort has a job of its own,
 * started at most once. It frees the communicator, and so first waits for the CALL that uses it,
 * even one that was given up on: a CALL runs while no collective is in flight, so no kernel waits
 * meanwhile for the abort. Once aborts have begun (`ended`), no CALL starts.
 */
#ifndef COMM_NCCL_PRIVATE_H
#define COMM_NCCL_PRIVATE_H

#include <pthread.h>
#include <stdbool.h>

/* NCCL's header is written for fewer warnings than ours. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wundef"
#ifndef __cplusplus
#pragma GCC diagnostic ignored "-Wstrict-prototypes"
#endif
#include <nccl.h>
#pragma GCC diagnostic pop

#include "comm/nccl.h"

C_BEGIN

enum {
    GATHER,
    REDUCE,
    COMMS,
    CALL = COMMS, /* among the jobs; those below are the communicators' aborts */
    JOBS,
    CAUSE_BYTES = 1024,
    CAUSE_WAIT_MS = 1000, /* a peer's cause may come a little later than what it leads to */
    CLOSE_WAIT_MS = 10000,
    POLL_US = 2000,
    WHY_BYTES = 120,
    PEERS_MAX = 8,
    PEERS_BYTES = 8192 /* behind the block of memory, in the window too */
};

struct job {
    struct nccl_comm *comm;
    void (*run)(struct job *job);
    int which;      /* GATHER or REDUCE: the communicator to abort; CALL */
    enum status st; /* with the message, which is a thread's own */
    char message[CAUSE_BYTES];
    int running; /* atomic; its thread may still use this and the communicator */
};

struct nccl_comm {
    struct comm base;        /* first: a struct comm * is a struct nccl_comm * */
    struct device *device;   /* borrowed */
    struct rendezvous *rv;   /* borrowed; NULL with one rank */
    ncclComm_t comms[COMMS]; /* owned */
    ncclUniqueId id;
    struct job jobs[JOBS];
    enum window_kind windows;
    void *window;                   /* owned, the block of comm_memory_open(); NULL: no window */
    size_t window_size;             /* its bytes */
    ncclWindow_t registered[COMMS]; /* owned */
    bool symmetric;                 /* these; else NCCL has the block registered for itself alone */
    struct {
        int count;             /* ranks that reach each other's window; 0: NCCL's kernels serve */
        char *base[PEERS_MAX]; /* their windows, as this rank reaches them */
    } peers;
    /* The last collective that was issued, for messages. */
    int64_t issued, last_numel;
    const char *last_name;
    enum dtype last_dtype;
    enum stream_id last_stream;
    pthread_mutex_t lock; /* of the three below */
    bool ended;           /* the communicators are being aborted or closed: hands off */
    enum status failed;
    char cause[CAUSE_BYTES];
};

/** NCCL() - a result of the library as a status, ST_COMM with its words. */
#define NCCL(call) nccl_check((call), #call, __FILE__, __LINE__)
MUST_CHECK enum status nccl_check(ncclResult_t result, const char *call, const char *file,
                                  int line);

/** nccl_first_line() - the text of a message without its trace. */
void nccl_first_line(char *out, size_t bytes, const char *message);

/** nccl_exchange() - comm_ops.exchange, over the rendezvous. */
MUST_CHECK enum status nccl_exchange(struct comm *comm, void *recv, const void *send, size_t bytes);

/* ---- calls that may not return -------------------------------------------------------------- */

/** nccl_job_start() - run @run in a thread of its own, as job @which. ST_SYSTEM. */
MUST_CHECK enum status nccl_job_start(struct nccl_comm *n, int which, void (*run)(struct job *job));

/** nccl_job_running() - may its thread still use the communicator? */
bool nccl_job_running(const struct job *job);

/** nccl_job_wait() - wait for a job that was started.
 * @check: peers may fail meanwhile.
 * Return: the job's own status, with its message; ST_TIMEOUT; what rendezvous_check() says. */
MUST_CHECK enum status nccl_job_wait(struct nccl_comm *n, int which, int64_t wait_ms, bool check,
                                     const char *what);

/** nccl_jobs_end() - wait for all of them; false: some have not ended. */
bool nccl_jobs_end(struct nccl_comm *n, int64_t wait_ms);

/** nccl_call_start() - start the next CALL. ST_COMM: the communicators are being aborted, or one
 * that was given up on still has them. */
MUST_CHECK enum status nccl_call_start(struct nccl_comm *n, void (*run)(struct job *job));

/* ---- failure -------------------------------------------------------------------------------- */

/** nccl_failure() - the failure that was noted, with its cause, or ST_OK. */
MUST_CHECK enum status nccl_failure(struct nccl_comm *n);

/** nccl_note_failure() - note a failure and take the communicators away. true: this call did, and
 * has to abort them. */
bool nccl_note_failure(struct nccl_comm *n, enum status st, const char *cause);

/** nccl_start_aborts() - abort both communicators, each in a thread; nobody waits for long. */
void nccl_start_aborts(struct nccl_comm *n);

/** nccl_give_up() - note, tell the peers, abort: for the rank's own thread. Never ST_OK. */
MUST_CHECK enum status nccl_give_up(struct nccl_comm *n, enum status st, const char *cause);

/** nccl_peers_cause() - has a peer said why it ended, now or within @wait_ms? Gives up then. */
MUST_CHECK enum status nccl_peers_cause(struct nccl_comm *n, int64_t wait_ms);

/** nccl_watch() - the device asks this while the host waits for it (device.watch). */
MUST_CHECK enum status nccl_watch(void *context, int64_t waited_ms);

/* ---- the window ----------------------------------------------------------------------------- */

/** nccl_memory_open(), nccl_memory_close() - comm_ops.memory_open and memory_close. */
MUST_CHECK enum status nccl_memory_open(struct comm *comm, struct device *device, void **out,
                                        size_t bytes);
void nccl_memory_close(struct comm *comm, struct device *device, void **memory);

/** nccl_all_can() - have all ranks come this far? Where one has not, @why says which and what it
 * said. All ranks call it. */
MUST_CHECK enum status nccl_all_can(struct nccl_comm *n, enum status st, bool *all,
                                    char why[WHY_BYTES]);

/** nccl_memory_ready() - the communicators stand: register the block with them, if there is one. */
MUST_CHECK enum status nccl_memory_ready(struct nccl_comm *n);

/* ---- collectives of our own ----------------------------------------------------------------- */

/** nccl_peers_open() - the window is registered: can all ranks reach each other's? All call it. */
MUST_CHECK enum status nccl_peers_open(struct nccl_comm *n);

/** nccl_peers_serve() - is this one for them? @share, @bytes: of one rank; @whole: of all. */
bool nccl_peers_serve(const struct nccl_comm *n, const void *share, const void *whole,
                      size_t bytes);

/** nccl_peers_gather() - enqueue an all_gather of @bytes a rank. ST_DEVICE. */
MUST_CHECK enum status nccl_peers_gather(struct nccl_comm *n, struct stream *s, void *out,
                                         const void *in, size_t bytes);

/** nccl_peers_reduce() - enqueue a reduce_scatter to @bytes of fp32 or bf16 a rank: sums in fp32
 * and in rank order. ST_DEVICE. */
MUST_CHECK enum status nccl_peers_reduce(struct nccl_comm *n, struct stream *s, void *out,
                                         const void *in, size_t bytes, enum dtype dtype);

C_END

#endif
