/*
 * engine/base/arena.h - the only place that allocates host memory.
 *
 * Three ways to own memory, from the most to the least temporary:
 *
 *   arena  a cursor over a fixed block. On a measuring arena (base NULL) it only counts, so one
 *          "bind" function both sizes a buffer and lays it out:
 *              struct arena a = {0};  block_bind(&a, &x, dims);  bytes = a.used;
 *              a = arena_over(buffer, bytes);  block_bind(&a, &x, dims);
 *   pool   many small objects with one lifetime (a parsed file); released as a whole
 *   mem_*  single allocations
 *
 * After mem_seal() any mem_ or pool allocation of that thread is an assertion failure: a training
 * step allocates nothing. mem_fail_at(k) makes the k-th allocation of the process fail, for tests.
 */
#ifndef ENGINE_BASE_ARENA_H
#define ENGINE_BASE_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

enum { ARENA_ALIGN = 256 }; /* bytes; what cuBLASLt wants, and four cache lines */

enum { MEM_LARGE_BYTES = 64 << 20 };

/**
 * mem_alloc() - zero-filled memory, aligned to ARENA_ALIGN.
 * @out: address of the pointer to set (any pointer type); NULL is stored when @bytes is 0.
 *
 * From MEM_LARGE_BYTES on it is a mapping of its own, which nobody has touched yet.
 *
 * Return: ST_OK; ST_MEMORY, then *out is NULL.
 */
MUST_CHECK enum status mem_alloc(void *out, size_t bytes);

/** mem_alloc_raw() - the same, but its contents are not defined: the caller writes all of it. */
MUST_CHECK enum status mem_alloc_raw(void *out, size_t bytes);

/**
 * mem_grow() - make room in a growing array; doubles, keeps the contents, zero-fills the rest.
 * @array: address of the array pointer (NULL at first).
 * @capacity: elements that fit, updated.
 * @needed: elements that must fit.
 * @elem_bytes: bytes of one element.
 *
 * Return: ST_OK; ST_MEMORY, ST_INVALID (their product overflows): then the array is as before.
 */
MUST_CHECK enum status mem_grow(void *array, size_t *capacity, size_t needed, size_t elem_bytes);

/** mem_free() - free what mem_alloc() or mem_grow() gave and set the pointer to NULL. */
void mem_free(void *pointer_address);

/** mem_seal() - from now on this thread allocates nothing; mem_unseal() ends that. They nest. */
void mem_seal(void);
void mem_unseal(void);

/** mem_fail_at() - fail the k-th allocation from now on (1 = the next one); 0 = never. */
void mem_fail_at(int64_t k);

/** mem_live_bytes() - bytes that mem_ and pools hold now, over all threads. */
int64_t mem_live_bytes(void);

/** mem_peak_bytes() - the most of these at any time since the last mem_peak_reset(); for tests. */
int64_t mem_peak_bytes(void);
void mem_peak_reset(void);

/* Many small objects that end together. Zero-initialise; pool_release() twice is fine. */
struct pool {
    struct pool_block *head; /* owned */
};

MUST_CHECK enum status pool_take(struct pool *pool, void *out, size_t bytes); /* zeroed, 16-byte */
MUST_CHECK enum status pool_copy(struct pool *pool, char **out, const char *text, size_t bytes);
void pool_release(struct pool *pool);

/* A cursor over a fixed block; base NULL measures. */
struct arena {
    char *base; /* borrowed */
    size_t used, capacity;
};

static inline struct arena arena_over(void *base, size_t capacity)
{
    struct arena a;
    a.base = (char *)base;
    a.used = 0;
    a.capacity = capacity;
    return a;
}

/** arena_take() - the next @bytes, aligned; NULL when measuring. Overrun is an assertion. */
void *arena_take(struct arena *a, size_t bytes);

/* Bind pointer @p to @n elements of its own type. */
#ifdef __cplusplus
#define ARENA_BIND(a, p, n) ((p) = (decltype(p))arena_take((a), sizeof *(p) * (size_t)(n)))
#else
#define ARENA_BIND(a, p, n) ((p) = arena_take((a), sizeof *(p) * (size_t)(n)))
#endif

/** checked_mul() - a * b; overflow of size_t is ST_INVALID. */
MUST_CHECK enum status checked_mul(size_t *out, size_t a, size_t b);

static inline int64_t round_up(int64_t n, int64_t multiple)
{
    return (n + multiple - 1) / multiple * multiple;
}

/** div_exact() - a / b, asserting that nothing is left over. */
static inline int64_t div_exact(int64_t a, int64_t b)
{
    ASSERT(b > 0 && a % b == 0);
    return a / b;
}

C_END

#endif
