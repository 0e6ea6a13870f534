#include "engine/train/growth.h"

#include <string.h>

#include "engine/base/log.h"

enum status card_grown(struct trainer *t, size_t *bytes)
{
    struct card_memory *m = &t->card;
    size_t used = 0;
    if (t->device->library == NULL) /* not a card */
        return ST_OK;
    if (m->all == 0) {
        m->context = t->device->context_bytes;
        m->library = t->device->library_bytes;
        m->all = m->context + m->library;
    }
    TRY(device_memory_used(t->device, &used));
    if (used > m->all)
        *bytes += used - m->all;
    m->all = used;
    return ST_OK;
}

enum status process_grown(struct trainer *t)
{
    size_t used = 0;
    if (t->device->library != NULL || t->metrics == NULL)
        return ST_OK;
    struct process_memory *m = &t->metrics->process;
    TRY(device_memory_used(t->device, &used));
    if (m->before == 0) {
        m->before = used;
        m->ranks = strcmp(t->comm->ops->name, "local") == 0 ? t->comm->world_size : 1;
    }
    if (used > m->before + m->grown)
        m->grown = used - m->before;
    return ST_OK;
}

void card_log(const struct card_memory *m)
{
    const double mib = 1048576.0;
    if (m->all > 0)
        log_info(
            "train",
            "memory of the card in MiB: context %.0f, libraries %.0f, communicator %.0f, "
            "arena %.0f, windows %.0f, rehearsal and weights %.0f, graphs %.0f, checkpoints %.0f, "
            "all %.0f",
            (double)m->context / mib, (double)m->library / mib, (double)m->communicator / mib,
            (double)m->arena / mib, (double)m->windows / mib, (double)m->set_up / mib,
            (double)m->graphs / mib, (double)m->checkpoints / mib, (double)m->all / mib);
}
