#include "engine/base/arena.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Every allocation carries its size in front, so that live bytes can be counted. */
struct mem_header {
    size_t bytes;
    size_t mapped; /* bytes of the mapping that it is; 0: of the heap */
};
_Static_assert(sizeof(struct mem_header) <= ARENA_ALIGN, "the header fits in the alignment gap");

static atomic_llong live_bytes, peak_bytes;
static atomic_llong fail_countdown;
static _Thread_local int sealed;

static struct mem_header *header_of(void *p)
{
    return (struct mem_header *)(void *)((char *)p - ARENA_ALIGN);
}

static bool should_fail(void)
{
    if (atomic_load_explicit(&fail_countdown, memory_order_relaxed) == 0)
        return false;
    return atomic_fetch_sub(&fail_countdown, 1) == 1;
}

static void count_bytes(long long bytes)
{
    long long live = atomic_fetch_add(&live_bytes, bytes) + bytes;
    long long peak = atomic_load(&peak_bytes);
    while (live > peak && !atomic_compare_exchange_weak(&peak_bytes, &peak, live))
        ;
}

/* The system's own pages are zero: nobody has to write that, and touch all of them. Sanitizers know
 * the heap alone. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { MAPS = 0 };
#else
enum { MAPS = 1 };
#endif

static char *take_mapping(size_t bytes)
{
    void *block = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return block != MAP_FAILED ? block : NULL;
}

static enum status take(void *out, size_t bytes, bool zeroed)
{
    ASSERT(sealed == 0);
    void *p = NULL;
    memcpy(out, &p, sizeof p);
    if (bytes == 0)
        return ST_OK;
    if (bytes > SIZE_MAX - 2 * ARENA_ALIGN)
        return FAIL(MEMORY, "allocation of %zu bytes overflows", bytes);
    size_t total = (bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN + ARENA_ALIGN;
    bool maps = MAPS && zeroed && bytes >= MEM_LARGE_BYTES;
    char *block = should_fail() ? NULL
                  : maps        ? take_mapping(total)
                                : aligned_alloc(ARENA_ALIGN, total);
    if (block == NULL)
        return FAIL(MEMORY, "out of memory: %zu bytes", bytes);
    p = block + ARENA_ALIGN;
    *header_of(p) = (struct mem_header){bytes, maps ? total : 0};
    count_bytes((long long)bytes);
    if (zeroed && !maps)
        memset(p, 0, bytes);
    memcpy(out, &p, sizeof p);
    return ST_OK;
}

enum status mem_alloc_raw(void *out, size_t bytes)
{
    return take(out, bytes, false);
}

enum status mem_alloc(void *out, size_t bytes)
{
    return take(out, bytes, true);
}

void mem_free(void *pointer_address)
{
    void *p;
    memcpy(&p, pointer_address, sizeof p);
    if (p == NULL)
        return;
    struct mem_header *header = header_of(p);
    atomic_fetch_sub(&live_bytes, (long long)header->bytes);
    if (header->mapped > 0)
        munmap(header, header->mapped);
    else
        free(header);
    p = NULL;
    memcpy(pointer_address, &p, sizeof p);
}

enum status mem_grow(void *array, size_t *capacity, size_t needed, size_t elem_bytes)
{
    if (needed <= *capacity)
        return ST_OK;
    size_t grown = *capacity < 8 ? 8 : *capacity * 2;
    if (grown < needed)
        grown = needed;
    size_t bytes = 0;
    TRY(checked_mul(&bytes, grown, elem_bytes));
    void *old, *fresh;
    memcpy(&old, array, sizeof old);
    TRY(mem_alloc(&fresh, bytes));
    if (old != NULL)
        memcpy(fresh, old, *capacity * elem_bytes);
    mem_free(&old);
    memcpy(array, &fresh, sizeof fresh);
    *capacity = grown;
    return ST_OK;
}

void mem_seal(void)
{
    sealed++;
}

void mem_unseal(void)
{
    ASSERT(sealed > 0);
    sealed--;
}

void mem_fail_at(int64_t k)
{
    atomic_store(&fail_countdown, k);
}

int64_t mem_live_bytes(void)
{
    return atomic_load(&live_bytes);
}

int64_t mem_peak_bytes(void)
{
    return atomic_load(&peak_bytes);
}

void mem_peak_reset(void)
{
    atomic_store(&peak_bytes, atomic_load(&live_bytes));
}

enum { POOL_BLOCK_BYTES = 64 * 1024, POOL_ALIGN = 16 };

struct pool_block {
    struct pool_block *next;
    size_t used, capacity; /* bytes behind this header */
};

enum { POOL_HEADER_BYTES = (sizeof(struct pool_block) + POOL_ALIGN - 1) / POOL_ALIGN * POOL_ALIGN };

enum status pool_take(struct pool *pool, void *out, size_t bytes)
{
    if (bytes > SIZE_MAX / 2)
        return FAIL(MEMORY, "allocation of %zu bytes overflows", bytes);
    size_t rounded = (bytes + POOL_ALIGN - 1) / POOL_ALIGN * POOL_ALIGN;
    struct pool_block *block = pool->head;
    if (block == NULL || block->capacity - block->used < rounded) {
        size_t capacity = rounded > POOL_BLOCK_BYTES / 4 ? rounded : POOL_BLOCK_BYTES;
        TRY(mem_alloc(&block, POOL_HEADER_BYTES + capacity));
        block->capacity = capacity;
        if (capacity != POOL_BLOCK_BYTES && pool->head != NULL) {
            /* A large object gets its own block, behind the one that still has room. */
            block->next = pool->head->next;
            pool->head->next = block;
        } else {
            block->next = pool->head;
            pool->head = block;
        }
    }
    void *p = (char *)block + POOL_HEADER_BYTES + block->used;
    block->used += rounded;
    memcpy(out, &p, sizeof p);
    return ST_OK;
}

enum status pool_copy(struct pool *pool, char **out, const char *text, size_t bytes)
{
    TRY(pool_take(pool, out, bytes + 1));
    memcpy(*out, text, bytes);
    return ST_OK;
}

void pool_release(struct pool *pool)
{
    while (pool->head != NULL) {
        struct pool_block *next = pool->head->next;
        mem_free(&pool->head);
        pool->head = next;
    }
}

void *arena_take(struct arena *a, size_t bytes)
{
    size_t start = (a->used + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    a->used = start + bytes;
    if (a->base == NULL)
        return NULL;
    ASSERT(a->used <= a->capacity);
    return a->base + start;
}

enum status checked_mul(size_t *out, size_t a, size_t b)
{
    if (__builtin_mul_overflow(a, b, out))
        return FAIL(INVALID, "%zu * %zu overflows", a, b);
    return ST_OK;
}
