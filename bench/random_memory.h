/* bench/random_memory.h - random bf16 numbers in a device's memory; for the cuda_* benches. */
#ifndef BENCH_RANDOM_MEMORY_H
#define BENCH_RANDOM_MEMORY_H

#include <stdint.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/rng.h"
#include "engine/device/device.h"

C_BEGIN

/** random_memory() - 2^21 normal numbers, doubled up over all of @memory; waits for it.
 * @bytes: at least 4 MiB. Return: ST_OK; ST_MEMORY; ST_DEVICE. */
MUST_CHECK static inline enum status random_memory(struct stream *s, void *memory, size_t bytes)
{
    enum { SEED_NUMEL = 1 << 20 };
    float *x = NULL;
    enum status st = ST_OK;
    size_t have = SEED_NUMEL * sizeof(float);
    TRY(mem_alloc(&x, have));
    rng_fill_normal(x, 0, SEED_NUMEL, 1, 7, 1.0f);
    for (int i = 0; i < SEED_NUMEL - 1; i++) { /* upper halves of two numbers */
        uint32_t bits[2];
        memcpy(bits, &x[i], sizeof bits);
        bits[0] = (bits[0] & 0xFFFF0000u) | bits[1] >> 16;
        memcpy(&x[i], bits, sizeof *bits);
    }
    TRY_GOTO(st, out, device_copy(s, memory, x, have));
    for (; have < bytes; have *= 2) {
        size_t more = bytes - have < have ? bytes - have : have;
        TRY_GOTO(st, out, device_copy(s, (char *)memory + have, memory, more));
    }
    TRY_GOTO(st, out, stream_sync(s));
out:
    mem_free(&x);
    return st;
}

C_END

#endif
