#include "comm/mpi.h"

#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include <mpi.h>

#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"

enum {
    RING = 64, /* collectives in flight */
    CAUSE_BYTES = 1024,
    EXCHANGE_BYTES = 64 * 1024, /* the largest exchange */
    SUM_BLOCK = 2048,           /* fp32 summed at a time: 8 KiB, stays in the first cache */
    IDLE_SPINS = 100,           /* polls without success before others get the core */
    IDLE_YIELDS = 100,          /* and then before this thread sleeps between them */
    IDLE_SLEEP_US = 50,
    CONTROL = STREAM_COUNT, /* the communicator of the roll call */
    COMMS,
    TAG_CALL = 1,
    TAG_ANSWER,
    ROLL_CALL_MS = 2000, /* a rank that waits looks for a call far more often */
    ANSWER_BYTES = 96,
    RANKS_NAMED = 4 /* the rest are counted */
};

enum kind { ALL_GATHER, REDUCE_SCATTER, BROADCAST, EXCHANGE };
enum state { QUEUED, RUNNING, COMPLETE };

static const char *const kind_names[] = {"all_gather", "reduce_scatter", "broadcast", "exchange"};

struct collective {
    enum kind kind;
    enum dtype dtype;
    int root;
    int64_t numel; /* bytes of an EXCHANGE */
    const void *send;
    void *recv;
    enum stream_id stream;
    uint64_t before;  /* 1 + the collective before it on its stream; 0: none */
    uint64_t staging; /* 1 + the reduce_scatter before it, which has the staging; 0: none */
    enum state state;
    MPI_Request request;
    MPI_Datatype type; /* owned; MPI_DATATYPE_NULL where a basic one serves */
};

struct mpi_comm {
    struct comm base; /* first: a struct comm * is a struct mpi_comm * */
    MPI_Comm comms[COMMS];
    int64_t count_limit;
    bool owns_mpi; /* this communicator initialised it */
    struct collective ring[RING];
    uint64_t issued, done;       /* all before @done are complete */
    uint64_t last[STREAM_COUNT]; /* 1 + the last collective of each stream; 0: none */
    uint64_t last_reduce;        /* 1 + the last reduce_scatter; 0: none */
    char *staging;               /* borrowed */
    size_t staging_bytes;
    char (*answers)[ANSWER_BYTES]; /* owned; of each rank to a roll call */
    char exchange[EXCHANGE_BYTES]; /* what the peers get: the caller may send from @recv */
    atomic_bool dead;
    pthread_mutex_t lock; /* of the two below */
    enum status failed;
    char cause[CAUSE_BYTES];
};

static struct mpi_comm *mpi_of(struct comm *comm)
{
    return (struct mpi_comm *)comm;
}

static enum status check_mpi(int code, const char *call, const char *file, int line)
{
    if (code == MPI_SUCCESS)
        return ST_OK;
    char text[MPI_MAX_ERROR_STRING] = "unknown error";
    int length = 0;
    if (MPI_Error_string(code, text, &length) != MPI_SUCCESS)
        snprintf(text, sizeof text, "error %d", code);
    int name = (int)strcspn(call, "(");
    return status_fail(ST_COMM, file, line, "%.*s: %s", name, call, text);
}

#define MPI(call) check_mpi((call), #call, __FILE__, __LINE__)

/* ---- failure -------------------------------------------------------------------------------- */

/* Any thread. The first cause is kept. */
static void note_failure(struct mpi_comm *m, enum status st, const char *cause)
{
    pthread_mutex_lock(&m->lock);
    if (m->failed == ST_OK) {
        m->failed = st;
        snprintf(m->cause, sizeof m->cause, "%.*s", (int)strcspn(cause, "\n"), cause);
    }
    pthread_mutex_unlock(&m->lock);
    atomic_store(&m->dead, true);
}

static enum status alive(struct mpi_comm *m)
{
    if (!atomic_load(&m->dead))
        return ST_OK;
    pthread_mutex_lock(&m->lock);
    enum status st = status_fail(m->failed, __FILE__, __LINE__, "%s", m->cause);
    pthread_mutex_unlock(&m->lock);
    return st;
}

/* @st with its message, noted if it is a failure. */
static enum status noted(struct mpi_comm *m, enum status st)
{
    if (st != ST_OK)
        note_failure(m, st, status_message());
    return st;
}

/* "all_gather 17 (1024 bf16)" */
static void describe(char text[ANSWER_BYTES], const struct mpi_comm *m, uint64_t n)
{
    const struct collective *c = &m->ring[n % RING];
    snprintf(text, ANSWER_BYTES, "%s %llu (%lld %s)", kind_names[c->kind], (unsigned long long)n,
             (long long)c->numel, c->kind == EXCHANGE ? "bytes" : dtype_name(c->dtype));
}

/* ---- roll call ------------------------------------------------------------------------------ */

/* A rank that waits tells those that ask what it waits for. */
static enum status answer_calls(struct mpi_comm *m)
{
    for (;;) {
        int called = 0;
        char text[ANSWER_BYTES] = "nothing";
        MPI_Status from;
        TRY(MPI(MPI_Iprobe(MPI_ANY_SOURCE, TAG_CALL, m->comms[CONTROL], &called, &from)));
        if (!called)
            return ST_OK;
        TRY(MPI(MPI_Recv(NULL, 0, MPI_BYTE, from.MPI_SOURCE, TAG_CALL, m->comms[CONTROL],
                         MPI_STATUS_IGNORE)));
        if (m->done < m->issued)
            describe(text, m, m->done);
        TRY(MPI(
            MPI_Send(text, sizeof text, MPI_BYTE, from.MPI_SOURCE, TAG_ANSWER, m->comms[CONTROL])));
    }
}

/* m->answers: what each rank waits for; "" if it did not answer. */
static enum status call_roll(struct mpi_comm *m)
{
    int missing = m->base.world_size - 1;
    int64_t end = clock_ms() + ROLL_CALL_MS;
    for (int r = 0; r < m->base.world_size; r++)
        if (r != m->base.rank)
            TRY(MPI(MPI_Send(NULL, 0, MPI_BYTE, r, TAG_CALL, m->comms[CONTROL])));
    while (missing > 0 && clock_ms() < end) {
        int there = 0;
        MPI_Status from;
        TRY(answer_calls(m));
        TRY(MPI(MPI_Iprobe(MPI_ANY_SOURCE, TAG_ANSWER, m->comms[CONTROL], &there, &from)));
        if (!there) {
            clock_pause_us(IDLE_SLEEP_US);
            continue;
        }
        TRY(MPI(MPI_Recv(m->answers[from.MPI_SOURCE], ANSWER_BYTES, MPI_BYTE, from.MPI_SOURCE,
                         TAG_ANSWER, m->comms[CONTROL], MPI_STATUS_IGNORE)));
        missing--;
    }
    return ST_OK;
}

/* The ranks that are silent or, if none is (their collectives differ), what each waits for. */
static void name_ranks(const struct mpi_comm *m, char *out, size_t bytes)
{
    int silent = 0, named = 0;
    size_t used = 0;
    for (int r = 0; r < m->base.world_size; r++)
        silent += r != m->base.rank && m->answers[r][0] == '\0';
    for (int r = 0; r < m->base.world_size && used < bytes; r++) {
        bool answered = m->answers[r][0] != '\0';
        if (r == m->base.rank || (silent > 0 && answered) || named++ >= RANKS_NAMED)
            continue;
        used += (size_t)snprintf(out + used, bytes - used, "; rank %d %s%s", r,
                                 answered ? "waits for " : "does not answer", m->answers[r]);
    }
    if (named > RANKS_NAMED && used < bytes)
        snprintf(out + used, bytes - used, "; and %d ranks more", named - RANKS_NAMED);
}

static enum status fail_late(struct mpi_comm *m)
{
    char what[ANSWER_BYTES], ranks[512] = "";
    describe(what, m, m->done);
    if (call_roll(m) == ST_OK)
        name_ranks(m, ranks, sizeof ranks);
    return FAIL(TIMEOUT, "rank %d waited %lld ms for %s%s", m->base.rank,
                (long long)m->base.timeout_ms, what, ranks);
}

/* ---- one collective ------------------------------------------------------------------------- */

static MPI_Datatype basic_type(const struct collective *c)
{
    if (c->kind == EXCHANGE)
        return MPI_BYTE;
    return c->dtype == DTYPE_F32 ? MPI_FLOAT : c->dtype == DTYPE_BF16 ? MPI_UINT16_T : MPI_INT32_T;
}

static size_t element_bytes(const struct collective *c)
{
    return c->kind == EXCHANGE ? 1 : dtype_bytes(c->dtype);
}

/* One element that stands for all of @c: MPI's counts are ints. */
static enum status whole_type(const struct mpi_comm *m, struct collective *c)
{
    int64_t blocks = c->numel / m->count_limit, rest = c->numel % m->count_limit;
    MPI_Datatype parts[2] = {MPI_DATATYPE_NULL, MPI_DATATYPE_NULL};
    MPI_Aint at[2] = {0, (MPI_Aint)(blocks * m->count_limit * (int64_t)element_bytes(c))};
    int limit = (int)m->count_limit;
    if (blocks > INT_MAX)
        return FAIL(INVALID, "%lld elements are too many for MPI", (long long)c->numel);
    TRY(MPI(MPI_Type_vector((int)blocks, limit, limit, basic_type(c), &parts[0])));
    TRY(MPI(MPI_Type_contiguous((int)rest, basic_type(c), &parts[1])));
    TRY(MPI(MPI_Type_create_struct(2, (int[]){1, 1}, at, parts, &c->type)));
    TRY(MPI(MPI_Type_commit(&c->type)));
    TRY(MPI(MPI_Type_free(&parts[0])));
    return MPI(MPI_Type_free(&parts[1]));
}

static bool is_in_place(const struct mpi_comm *m, const struct collective *c)
{
    return c->send ==
           (const char *)c->recv + (size_t)m->base.rank * (size_t)c->numel * element_bytes(c);
}

static enum status start(struct mpi_comm *m, struct collective *c)
{
    MPI_Comm comm = m->comms[c->stream];
    MPI_Datatype type = basic_type(c);
    int count = (int)c->numel;
    c->type = MPI_DATATYPE_NULL;
    c->state = RUNNING;
    if (c->numel > m->count_limit) {
        TRY(whole_type(m, c));
        type = c->type;
        count = 1;
    }
    switch (c->kind) {
    case ALL_GATHER:
    case EXCHANGE:
        return MPI(MPI_Iallgather(is_in_place(m, c) ? MPI_IN_PLACE : c->send, count, type, c->recv,
                                  count, type, comm, &c->request));
    case REDUCE_SCATTER:
        return MPI(MPI_Ialltoall(c->send, count, type, m->staging, count, type, comm, &c->request));
    case BROADCAST:
        break;
    }
    return MPI(MPI_Ibcast(c->recv, count, type, c->root, comm, &c->request));
}

/* In rank order, as comm/local does. */
static void sum_staging(const struct mpi_comm *m, const struct collective *c)
{
    size_t element = dtype_bytes(c->dtype);
    float sum[SUM_BLOCK];
    for (int64_t at = 0; at < c->numel; at += SUM_BLOCK) {
        int64_t count = c->numel - at < SUM_BLOCK ? c->numel - at : SUM_BLOCK;
        comm_load(sum, m->staging + (size_t)at * element, count, c->dtype);
        for (int r = 1; r < m->base.world_size; r++)
            comm_add(sum, m->staging + (size_t)(r * c->numel + at) * element, count, c->dtype);
        comm_store((char *)c->recv + (size_t)at * element, sum, count, c->dtype);
    }
}

static enum status finish(struct mpi_comm *m, struct collective *c)
{
    if (c->kind == REDUCE_SCATTER)
        sum_staging(m, c);
    c->state = COMPLETE;
    return c->type != MPI_DATATYPE_NULL ? MPI(MPI_Type_free(&c->type)) : ST_OK;
}

/* ---- all of them ---------------------------------------------------------------------------- */

/* @n: 1 + a collective; 0 for none. */
static bool is_complete(const struct mpi_comm *m, uint64_t n)
{
    return n <= m->done || m->ring[(n - 1) % RING].state == COMPLETE;
}

/* The staging goes from one reduce_scatter to the next in issue order, whatever their streams: if
 * the first to ask got it, two ranks could each hold it for what the other has not begun. */
static bool may_start(const struct mpi_comm *m, const struct collective *c)
{
    return is_complete(m, c->before) && is_complete(m, c->staging);
}

/* Start and finish what can be, in issue order. @moved is set if there was anything. */
static enum status advance(struct mpi_comm *m, bool *moved)
{
    for (uint64_t n = m->done; n < m->issued; n++) {
        struct collective *c = &m->ring[n % RING];
        int ended = 0;
        if (c->state == QUEUED && may_start(m, c)) {
            TRY(start(m, c));
            *moved = true;
        }
        if (c->state == RUNNING)
            TRY(MPI(MPI_Test(&c->request, &ended, MPI_STATUS_IGNORE)));
        if (ended) {
            TRY(finish(m, c));
            *moved = true;
        }
    }
    while (m->done < m->issued && m->ring[m->done % RING].state == COMPLETE)
        m->done++;
    return ST_OK;
}

/* Cores may be fewer than ranks: after a short while the core goes to others. */
static void idle(int polls)
{
    if (polls < IDLE_SPINS)
        return;
    if (polls < IDLE_SPINS + IDLE_YIELDS)
        sched_yield();
    else
        clock_pause_us(IDLE_SLEEP_US);
}

/* Until collective @n and all before it are complete; whatever moves renews the deadline. */
static enum status wait_for(struct mpi_comm *m, uint64_t n)
{
    int64_t since = clock_ms();
    int polls = 0;
    while (m->done <= n) {
        bool moved = false;
        TRY(alive(m));
        TRY(noted(m, advance(m, &moved)));
        if (moved) {
            since = clock_ms();
            polls = 0;
        } else if (polls >= IDLE_SPINS) {
            TRY(noted(m, answer_calls(m)));
            if (clock_ms() - since >= m->base.timeout_ms)
                return noted(m, fail_late(m));
        }
        idle(polls);
        polls += polls <= IDLE_SPINS + IDLE_YIELDS;
    }
    return ST_OK;
}

static enum status complete(void *context, uint64_t ticket)
{
    return wait_for(context, ticket);
}

/* @ticket: output, its number. */
static enum status issue(struct mpi_comm *m, const struct collective *c, uint64_t *ticket)
{
    bool moved = false;
    uint64_t n = m->issued;
    TRY(alive(m));
    if (n >= RING)
        TRY(wait_for(m, n - RING));
    struct collective *mine = &m->ring[n % RING];
    *mine = *c;
    mine->before = m->last[c->stream];
    mine->staging = c->kind == REDUCE_SCATTER ? m->last_reduce : 0;
    m->issued++;
    *ticket = n;
    /* Nothing to send: MPI need not know, and what comes after waits for what was before. All ranks
     * have the same count. */
    mine->state = c->numel > 0 ? QUEUED : COMPLETE;
    if (c->numel > 0)
        m->last[c->stream] = n + 1;
    if (c->numel > 0 && c->kind == REDUCE_SCATTER)
        m->last_reduce = n + 1;
    return noted(m, advance(m, &moved));
}

static enum status issue_for(struct mpi_comm *m, const struct collective *c, struct event *done)
{
    uint64_t n = 0;
    TRY(issue(m, c, &n));
    done->complete = m->done > n ? NULL : complete;
    done->context = m;
    done->ticket = n;
    return ST_OK;
}

/* ---- the table ------------------------------------------------------------------------------ */

static enum status all_gather(struct comm *comm, struct stream *s, void *out, const void *in,
                              int64_t numel, enum dtype dtype, struct event *done)
{
    struct collective c = {ALL_GATHER, dtype, 0, numel, in, out, .stream = s->id};
    return issue_for(mpi_of(comm), &c, done);
}

static enum status reduce_scatter(struct comm *comm, struct stream *s, void *out, const void *in,
                                  int64_t numel, enum dtype dtype, struct event *done)
{
    struct mpi_comm *m = mpi_of(comm);
    struct collective c = {REDUCE_SCATTER, dtype, 0, numel, in, out, .stream = s->id};
    size_t bytes = comm_staging_bytes(COMM_MPI, comm->world_size, numel);
    /* Alone, the sum is the input: a gather of one rank. */
    if (comm->world_size == 1)
        c.kind = ALL_GATHER;
    else if (bytes > m->staging_bytes)
        return FAIL(INVALID,
                    "reduce_scatter of %lld elements needs %zu bytes of staging, lent: %zu",
                    (long long)numel, bytes, m->staging_bytes);
    return issue_for(m, &c, done);
}

static enum status broadcast(struct comm *comm, struct stream *s, void *data, int64_t numel,
                             enum dtype dtype, int root, struct event *done)
{
    struct collective c = {BROADCAST, dtype, root, numel, data, data, .stream = s->id};
    return issue_for(mpi_of(comm), &c, done);
}

static enum status exchange(struct comm *comm, void *recv, const void *send, size_t bytes)
{
    struct mpi_comm *m = mpi_of(comm);
    uint64_t n = 0;
    struct collective c = {
        EXCHANGE, DTYPE_I32, 0, (int64_t)bytes, m->exchange, recv, .stream = STREAM_COMPUTE};
    ASSERT(bytes <= sizeof m->exchange);
    /* The exchange before is complete, so MPI does not read it any more. */
    if (bytes > 0)
        memcpy(m->exchange, send, bytes);
    TRY(issue(m, &c, &n));
    return wait_for(m, n);
}

static enum status progress(struct comm *comm)
{
    struct mpi_comm *m = mpi_of(comm);
    bool moved = false;
    TRY(alive(m));
    return noted(m, advance(m, &moved));
}

static void stage(struct comm *comm, void *memory, size_t bytes)
{
    struct mpi_comm *m = mpi_of(comm);
    m->staging = memory;
    m->staging_bytes = bytes;
}

static void abort_comm(struct comm *comm, const char *cause)
{
    note_failure(mpi_of(comm), ST_COMM, cause);
}

static void release(struct mpi_comm *m)
{
    for (int i = 0; i < COMMS; i++)
        if (m->comms[i] != MPI_COMM_NULL && MPI(MPI_Comm_free(&m->comms[i])) != ST_OK)
            log_debug("mpi", "%s", status_message());
    if (m->owns_mpi && MPI(MPI_Finalize()) != ST_OK)
        log_warn("mpi", "%s", status_message());
    pthread_mutex_destroy(&m->lock);
    mem_free(&m->answers);
    mem_free(&m);
}

/* The peers may need what this rank has issued. All ranks leave together: a launcher takes the
 * first exit code that is not 0 for a reason to end those that are still at work. */
static void close_comm(struct comm *comm)
{
    struct mpi_comm *m = mpi_of(comm);
    char here = 1, all[COMM_MAX_WORLD_SIZE], kept[CAUSE_BYTES];
    snprintf(kept, sizeof kept, "%s", status_message());
    if (alive(m) != ST_OK || exchange(comm, all, &here, 1) != ST_OK) {
        log_error("mpi", "%s", m->cause);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    release(m);
    status_set_message(kept);
}

static const struct comm_ops mpi_ops = {
    .name = "mpi",
    .all_gather = all_gather,
    .reduce_scatter = reduce_scatter,
    .broadcast = broadcast,
    .exchange = exchange,
    .progress = progress,
    .ready = comm_is_ready,
    .stage = stage,
    .memory_open = comm_any_memory,
    .memory_close = comm_any_memory_close,
    .abort = abort_comm,
    .close = close_comm,
};

/* ---- open ----------------------------------------------------------------------------------- */

static enum status begin_mpi(struct mpi_comm *m)
{
    int begun = 0, level = MPI_THREAD_SINGLE;
    TRY(MPI(MPI_Initialized(&begun)));
    if (begun)
        return MPI(MPI_Query_thread(&level));
    TRY(MPI(MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level)));
    m->owns_mpi = true;
    if (level < MPI_THREAD_FUNNELED)
        return FAIL(UNSUPPORTED, "this MPI does not allow a process to have other threads");
    return ST_OK;
}

static enum status join(struct mpi_comm *m, const struct mpi_options *options)
{
    TRY(begin_mpi(m));
    /* Otherwise an error ends the process inside MPI. The communicators below inherit it. */
    TRY(MPI(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN)));
    TRY(MPI(MPI_Comm_rank(MPI_COMM_WORLD, &m->base.rank)));
    TRY(MPI(MPI_Comm_size(MPI_COMM_WORLD, &m->base.world_size)));
    if (m->base.rank != options->rank || m->base.world_size != options->world_size)
        return FAIL(COMM,
                    "the launcher says rank %d of %d, MPI says rank %d of %d: is the launcher of "
                    "the MPI that this program was built with? (mpiexec of that MPI, or srun with "
                    "the --mpi that it supports: srun --mpi=list)",
                    options->rank, options->world_size, m->base.rank, m->base.world_size);
    if (m->base.world_size > COMM_MAX_WORLD_SIZE)
        return FAIL(INVALID, "%d ranks; at most %d train together", m->base.world_size,
                    COMM_MAX_WORLD_SIZE);
    TRY(mem_alloc(&m->answers, (size_t)m->base.world_size * sizeof *m->answers));
    for (int i = 0; i < COMMS; i++)
        TRY(MPI(MPI_Comm_dup(MPI_COMM_WORLD, &m->comms[i])));
    return ST_OK;
}

enum status mpi_comm_open(struct comm **out, const struct mpi_options *options)
{
    struct mpi_comm *m = NULL;
    *out = NULL;
    TRY(mem_alloc(&m, sizeof *m));
    m->base.ops = &mpi_ops;
    m->base.timeout_ms = options->timeout_ms;
    m->count_limit = options->count_limit > 0 ? options->count_limit : INT_MAX;
    pthread_mutex_init(&m->lock, NULL);
    for (int i = 0; i < COMMS; i++)
        m->comms[i] = MPI_COMM_NULL;
    enum status st = join(m, options);
    if (st != ST_OK) {
        release(m);
        return status_trace(st, __FILE__, __LINE__);
    }
    *out = &m->base;
    return ST_OK;
}
