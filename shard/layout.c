#include "shard/layout.h"

#include <string.h>

enum status layout_build(struct layout *layout, const struct layout_param *params, int param_count,
                         int world_size, int64_t align_numel)
{
    if (param_count < 1 || world_size < 1 || align_numel < 1)
        return FAIL(INVALID, "layout of %d parameters on %d ranks, shards in multiples of %lld",
                    param_count, world_size, (long long)align_numel);
    memset(layout, 0, sizeof *layout);
    layout->params = params;
    layout->param_count = param_count;
    layout->world_size = world_size;
    for (int i = 0; i < param_count; i++) {
        const struct layout_param *p = &params[i];
        if (i == 0 || p->unit != layout->unit_count - 1) {
            if (p->unit != layout->unit_count)
                return FAIL(INVALID, "parameter %s: unit %d after unit %d", p->name, p->unit,
                            layout->unit_count - 1);
            if (layout->unit_count == LAYOUT_MAX_UNITS)
                return FAIL(INVALID, "parameter %s: more than %d units", p->name, LAYOUT_MAX_UNITS);
            layout->units[layout->unit_count++] =
                (struct layout_unit){.first_param = i, .frozen = true};
        }
        struct layout_unit *u = &layout->units[p->unit];
        if (p->numel < 1 || p->first < u->numel || p->numel > INT64_MAX / 2 - p->first)
            return FAIL(INVALID, "parameter %s: %lld elements at %lld, behind %lld of its unit",
                        p->name, (long long)p->numel, (long long)p->first, (long long)u->numel);
        u->numel = p->first + p->numel;
        u->param_count++;
        u->frozen = u->frozen && p->frozen;
    }
    for (int i = 0; i < layout->unit_count; i++) {
        struct layout_unit *u = &layout->units[i];
        int64_t share = (u->numel + world_size - 1) / world_size;
        int64_t blocks = share / align_numel + (share % align_numel != 0);
        if (__builtin_mul_overflow(blocks, align_numel, &u->shard_numel) ||
            __builtin_mul_overflow(u->shard_numel, (int64_t)world_size, &u->padded_numel))
            return FAIL(INVALID, "unit %d: %lld elements on %d ranks overflow", i,
                        (long long)u->numel, world_size);
    }
    return ST_OK;
}

int layout_segments(const struct layout *layout, int unit, int64_t first, int64_t numel,
                    struct layout_segment *out)
{
    const struct layout_unit *u = &layout->units[unit];
    int count = 0;
    for (int i = u->first_param; i < u->first_param + u->param_count; i++) {
        const struct layout_param *p = &layout->params[i];
        int64_t from = p->first > first ? p->first : first;
        int64_t to = p->first + p->numel < first + numel ? p->first + p->numel : first + numel;
        if (from < to)
            out[count++] = (struct layout_segment){.param = i,
                                                   .param_first = from - p->first,
                                                   .shard_first = from - first,
                                                   .numel = to - from};
    }
    return count;
}

/* FNV-1a over 64-bit words: small, and the same on every machine. */
static uint64_t mix(uint64_t h, uint64_t word)
{
    for (int i = 0; i < 8; i++)
        h = (h ^ (word >> (8 * i) & 0xFF)) * 0x100000001B3u;
    return h;
}

uint64_t layout_fingerprint(const struct layout *layout)
{
    uint64_t h = mix(0xCBF29CE484222325u, (uint64_t)layout->world_size);
    for (int i = 0; i < layout->param_count; i++) {
        const struct layout_param *p = &layout->params[i];
        for (const char *c = p->name; *c != '\0'; c++)
            h = mix(h, (uint64_t)(unsigned char)*c);
        h = mix(h, 0); /* the name ends here */
        h = mix(mix(h, (uint64_t)p->first), (uint64_t)p->numel);
        h = mix(h, (uint64_t)p->unit << 2 | (uint64_t)p->decay << 1 | (uint64_t)p->frozen);
    }
    for (int i = 0; i < layout->unit_count; i++)
        h = mix(h, (uint64_t)layout->units[i].shard_numel);
    return h;
}
