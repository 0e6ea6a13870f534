#include "engine/train/calibrate.h"

enum { SMALL_NUMEL = 32 /* a rank's */, MOST_BESIDE = 256 };

struct links {
    float *whole;  /* comm_memory_open(): the whole buffer, and a share of sums behind it */
    int64_t numel; /* a rank's share of the collective that is timed */
    int64_t share; /* the largest */
    struct event done, fork;
    int products; /* beside collectives */
    bool collectives;
};

static enum status gather_on(struct bench *b, struct stream *s)
{
    struct links *l = b->links;
    return comm_all_gather(b->comm, s, l->whole, l->whole + b->comm->rank * l->numel, l->numel,
                           DTYPE_F32, &l->done);
}

static enum status reduce_on(struct bench *b, struct stream *s)
{
    struct links *l = b->links;
    return comm_reduce_scatter(b->comm, s, l->whole + l->share * b->comm->world_size, l->whole,
                               l->numel, DTYPE_F32, &l->done);
}

static enum status run_gather(struct bench *b)
{
    TRY(gather_on(b, b->s));
    return stream_wait(b->s, &b->links->done);
}

static enum status run_reduce(struct bench *b)
{
    TRY(reduce_on(b, b->s));
    return stream_wait(b->s, &b->links->done);
}

/* Products on the compute stream, a gather and a reduce on theirs; all is joined at the end. */
static enum status run_beside(struct bench *b)
{
    struct stream *gather = &b->device->streams[STREAM_GATHER];
    struct stream *reduce = &b->device->streams[STREAM_REDUCE];
    TRY(event_record(&b->links->fork, b->s));
    TRY(stream_wait(gather, &b->links->fork));
    TRY(stream_wait(reduce, &b->links->fork));
    if (b->links->collectives) {
        TRY(reduce_on(b, reduce));
        TRY(stream_wait(gather, &b->links->done)); /* they use one buffer */
        TRY(gather_on(b, gather));
    }
    for (int i = 0; i < b->links->products; i++)
        TRY(bench_products(b));
    return b->links->collectives ? stream_wait(b->s, &b->links->done) : ST_OK;
}

/* So many products that the collectives end long before them. */
static enum status time_slow_down(struct bench *b, struct calibrate_times *t)
{
    int products = 0;
    TRY(bench_time(b, &t->collectives, run_beside));
    products = (int)(3 * t->collectives / t->product[CALIBRATE_WIDTHS - 1][CALIBRATE_ROWS - 1]) + 1;
    TRY(bench_same(b, &products));
    b->links->products = products < MOST_BESIDE ? products : MOST_BESIDE;
    TRY(bench_time(b, &t->beside, run_beside));
    b->links->collectives = false;
    return bench_time(b, &t->alone, run_beside);
}

static enum status time_links(struct bench *b, struct calibrate_times *t)
{
    b->links->numel = SMALL_NUMEL;
    TRY(bench_time(b, &t->gather_small, run_gather));
    TRY(bench_time(b, &t->reduce_small, run_reduce));
    b->links->numel = b->links->share;
    TRY(bench_time(b, &t->gather_large, run_gather));
    TRY(bench_time(b, &t->reduce_large, run_reduce));
    return b->device->asynchronous ? time_slow_down(b, t) : ST_OK;
}

static enum status open_links(struct bench *b, enum comm_kind kind)
{
    struct links *l = b->links;
    int world = b->comm->world_size;
    void *staging = NULL;
    size_t bytes = comm_staging_bytes(kind, world, l->share);
    TRY(event_open(b->device, &l->done));
    TRY(event_open(b->device, &l->fork));
    TRY(comm_memory_open(b->comm, b->device, (void **)&l->whole,
                         (size_t)(l->share * (world + 1)) * sizeof *l->whole));
    if (bytes > 0) {
        TRY(bench_take(b, &staging, bytes));
        comm_stage(b->comm, staging, bytes);
    }
    return stream_sync(b->s);
}

enum status calibrate_links(struct bench *b, struct calibrate_times *times, enum comm_kind kind)
{
    struct links l = {.share = b->sizes.link_numel / b->comm->world_size / 128 * 128,
                      .collectives = true};
    b->links = &l;
    enum status st = open_links(b, kind);
    if (st == ST_OK)
        st = time_links(b, times);
    device_settle(b->device);
    comm_stage(b->comm, NULL, 0);
    comm_memory_close(b->comm, b->device, (void **)&l.whole);
    event_close(&l.done);
    event_close(&l.fork);
    b->links = NULL;
    return st;
}
