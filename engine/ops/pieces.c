#include "engine/ops/pieces.h"

#include "engine/device/workers.h"

struct pieces {
    void (*body)(void *context, int64_t first, int64_t end, int worker);
    void *context;
    int64_t n, grain;
};

static void piece(void *context, int64_t part, int worker)
{
    const struct pieces *p = context;
    int64_t first = part * p->grain, end = first + p->grain;
    p->body(p->context, first, end < p->n ? end : p->n, worker);
}

void pieces_run(struct stream *s,
                void (*body)(void *context, int64_t first, int64_t end, int worker), void *context,
                int64_t n, int64_t grain)
{
    struct pieces p = {body, context, n, grain};
    ASSERT(grain > 0);
    workers_run(s->device->workers, piece, &p, (n + grain - 1) / grain);
}
