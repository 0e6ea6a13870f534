#include "engine/ops/master.h"

#include <string.h>

#include "engine/base/clones.h"

CPU_CLONES void master_take(float *out, const uint16_t *high, const uint16_t *low, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = master_bits(high[i], low[i]);
        memcpy(out + i, &bits, sizeof bits);
    }
}

CPU_CLONES static void high_loop(uint16_t *high, const float *master, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, master + i, sizeof bits);
        high[i] = master_high(bits);
    }
}

CPU_CLONES static void low_loop(uint16_t *low, const float *master, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, master + i, sizeof bits);
        low[i] = master_low(bits);
    }
}

void master_put(uint16_t *high, uint16_t *low, const float *master, int64_t n)
{
    high_loop(high, master, n);
    if (low != NULL)
        low_loop(low, master, n);
}

/* From the end, so that a master falls on lower halves that are used up; the upper ones, on which
 * the first of them fall, have been moved away. */
void master_join(float *values, uint16_t *room, int64_t n)
{
    enum { PART = 1024 };
    uint16_t low[PART];
    char *bytes = (char *)values;
    memcpy(room, bytes + (size_t)n * sizeof *room, (size_t)n * sizeof *room);
    for (int64_t end = n; end > 0;) {
        int64_t count = end < PART ? end : PART;
        end -= count;
        memcpy(low, bytes + (size_t)end * sizeof *low, (size_t)count * sizeof *low);
        master_take(values + end, room + end, low, count);
    }
}

enum status master_split_cpu(struct stream *s, struct tensor param, struct tensor low,
                             struct tensor master)
{
    (void)s;
    master_put(param.data, low.data, master.data, tensor_numel(master));
    return ST_OK;
}
