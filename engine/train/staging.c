#include "engine/train/staging.h"

#include <string.h>

enum status staging_open(struct staging *s, struct device *device, int64_t numel)
{
    memset(s, 0, sizeof *s);
    if (device->library == NULL)
        return ST_OK;
    s->device = device;
    s->numel = numel;
    for (int i = 0; i < 2; i++) {
        TRY(event_open(device, &s->copied[i]));
        TRY(device_alloc_host(device, (void **)&s->buffer[i],
                              sizeof *s->buffer[i] * (size_t)numel));
    }
    return ST_OK;
}

void staging_release(struct staging *s)
{
    for (int i = 0; i < 2 && s->device != NULL; i++) {
        if (s->copied[i].handle != NULL)
            event_close(&s->copied[i]);
        device_free_host(s->device, (void **)&s->buffer[i]);
    }
    memset(s, 0, sizeof *s);
}

enum status staging_take(struct staging *s, float **buffer)
{
    *buffer = s->buffer[s->next];
    return event_wait(&s->copied[s->next]);
}

enum status staging_given(struct staging *s, struct stream *stream)
{
    TRY(event_record(&s->copied[s->next], stream));
    s->next = 1 - s->next;
    return ST_OK;
}
