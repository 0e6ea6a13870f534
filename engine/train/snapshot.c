#include "engine/train/snapshot.h"

#include <string.h>

#include "engine/ops/master.h"

static enum status measure(struct snapshot *s, struct trainer *t)
{
    size_t units = (size_t)s->model->unit_count;
    int64_t longest = 0;
    TRY(mem_alloc(&s->shard_numel, sizeof *s->shard_numel * units));
    TRY(mem_alloc(&s->trained, sizeof *s->trained * units));
    for (int u = 0; u < s->model->unit_count; u++) {
        struct shard_view view = executor_shard(&t->executor, u);
        s->shard_numel[u] = view.numel;
        s->trained[u] = view.adam_m != NULL;
        s->bytes += sizeof *s->values * (size_t)view.numel * (size_t)snapshot_state_count(s, u);
        if (view.low != NULL && view.numel > longest)
            longest = view.numel;
    }
    return longest > 0 ? mem_alloc(&s->room, sizeof *s->room * (size_t)longest) : ST_OK;
}

/* Only what nobody else is likely to want: less than half of what is free. */
static enum status open_card(struct snapshot *s)
{
    size_t room = 0;
    if (s->device->library == NULL)
        return ST_OK;
    TRY(device_memory_free(s->device, &room));
    return s->bytes < room / 2 ? device_alloc(s->device, (void **)&s->card, s->bytes) : ST_OK;
}

enum status snapshot_open(struct snapshot *s, struct trainer *t)
{
    *s = (struct snapshot){.device = t->device, .model = &t->setup.model};
    TRY(event_open(s->device, &s->behind));
    TRY(event_open(s->device, &s->copied));
    TRY(event_open(s->device, &s->free));
    TRY(measure(s, t));
    TRY(open_card(s));
    return device_alloc_host(s->device, (void **)&s->values, s->bytes);
}

void snapshot_release(struct snapshot *s)
{
    if (s->device == NULL)
        return;
    event_close(&s->behind);
    event_close(&s->copied);
    event_close(&s->free);
    device_free(s->device, (void **)&s->card);
    device_free_host(s->device, (void **)&s->values);
    mem_free(&s->shard_numel);
    mem_free(&s->trained);
    mem_free(&s->room);
    memset(s, 0, sizeof *s);
}

enum status snapshot_begin(struct snapshot *s, struct trainer *t)
{
    struct stream *copies = &s->device->streams[STREAM_COPY];
    float *at = s->card != NULL ? s->card : s->values;
    TRY(event_record(&s->behind, &s->device->streams[STREAM_COMPUTE]));
    TRY(stream_wait(copies, &s->behind));
    for (int u = 0; u < s->model->unit_count; u++) {
        struct shard_view view = executor_shard(&t->executor, u);
        const float *moment[] = {view.adam_m, view.adam_v};
        TRY(executor_copy_master(copies, at, &view, 0, view.numel));
        at += view.numel;
        for (int k = 0; k < snapshot_state_count(s, u) - 1; k++) {
            TRY(device_copy(copies, at, moment[k], sizeof *at * (size_t)view.numel));
            at += view.numel;
        }
    }
    TRY(event_record(&s->free, copies));
    executor_hold(&t->executor, &s->free);
    if (s->card != NULL)
        TRY(device_copy(copies, s->values, s->card, s->bytes));
    TRY(event_record(&s->copied, copies));
    return ST_OK;
}

enum status snapshot_taken(const struct snapshot *s, bool *taken)
{
    return event_query(&s->copied, taken);
}

enum status snapshot_wait(struct snapshot *s)
{
    return event_wait(&s->copied);
}

void snapshot_join(struct snapshot *s, int unit, float *values)
{
    if (s->room != NULL)
        master_join(values, s->room, s->shard_numel[unit]);
}

int snapshot_state_count(const struct snapshot *s, int unit)
{
    return s->trained[unit] ? SNAPSHOT_STATES : 1;
}
