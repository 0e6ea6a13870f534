/*
 * engine/ops/gemm_table.h - a GEMM plan: which algorithm of cuBLASLt runs which matrix product; as
 * a table and as text.
 *
 * A plan is for one kind of card and one version of the library. It is made once (gemm_measure.h),
 * kept in a file, shared by all ranks, stored with checkpoints; a run that goes on with the plan it
 * was begun with computes the same bits. The text, ASCII, lines that end in '\n':
 *
 *     tessera gemm plan 3
 *     card NVIDIA H100 80GB HBM3
 *     multiprocessors 132
 *     library 130100
 *     forward bf16 T=2816 N=3072 K=1024 add=0 bias=1 align=256 beside=12 id=66 tile=0 stages=0
 *         split=1 reduction=0 swizzle=0 custom=7 inner=0 cluster=5 sm=0 us=27.3 id=66 tile=0
 *         stages=0 split=1 reduction=0 swizzle=0 custom=7 inner=0 cluster=3 sm=120 us=37.1
 *                                                                                     (one line)
 *
 * The first two words and all up to beside name the product (struct gemm_key), each product once;
 * id to sm are the attributes of the algorithm, as numbers of that library version; us is what was
 * measured, 0 if nothing was. Where beside is not 0 there are two: alone, and beside collectives.
 * A reader refuses what it does not know. No attribute is believed: the library checks each
 * algorithm before it is used (gemm_plan_accepts()). That both give the same bits is.
 *
 * An entry whose T is a multiple of GEMM_ROWS serves products of fewer rows, too, down to the
 * multiple before (gemm_serving_key()): they have as many tiles.
 *
 * Plain C: nothing here needs a GPU. One thread.
 */
#ifndef ENGINE_OPS_GEMM_TABLE_H
#define ENGINE_OPS_GEMM_TABLE_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/tensor.h"

C_BEGIN

enum { GEMM_CARD_BYTES = 128, GEMM_TABLE_MAX = 4096 /* entries */, GEMM_ROWS = 128 };

enum gemm_kind {
    GEMM_FORWARD,         /* y (T, N) = x (T, K) w (N, K)^T + bias */
    GEMM_BACKWARD_DATA,   /* dx (T, K) = dy (T, N) w (N, K) */
    GEMM_BACKWARD_WEIGHT, /* dw (N, K) fp32 = dy (T, N)^T x (T, K) */
    GEMM_KINDS
};

/* What a plan holds for. */
struct gemm_card {
    char name[GEMM_CARD_BYTES]; /* "": none */
    int64_t multiprocessors, library;
};

/* All that decides the algorithm. Compared as bytes: no padding. */
struct gemm_key {
    int64_t T, N, K;
    int32_t kind, dtype; /* enum gemm_kind; enum dtype of the inputs */
    int32_t add, bias;   /* 0 or 1 */
    int32_t align;       /* bytes that all addresses are a multiple of: 1, 2, ... 256 */
    int32_t beside;      /* multiprocessors that collectives hold beside it; 0: none are there */
};
static_assert(sizeof(struct gemm_key) == 3 * 8 + 6 * 4, "no padding");

/* In the order of the text. */
enum gemm_attribute {
    GEMM_ID,
    GEMM_TILE,
    GEMM_STAGES,
    GEMM_SPLIT,
    GEMM_REDUCTION,
    GEMM_SWIZZLE,
    GEMM_CUSTOM,
    GEMM_INNER,
    GEMM_CLUSTER,
    GEMM_SM, /* multiprocessors that it is made for; 0: all */
    GEMM_ATTRIBUTES
};

struct gemm_choice {
    uint32_t algo[GEMM_ATTRIBUTES];
    double us;
};

/* Which of the two is a matter of speed alone. */
struct gemm_entry {
    struct gemm_key key;
    struct gemm_choice alone;
    struct gemm_choice beside; /* with key.beside multiprocessors held; zeros where that is 0 */
};

struct gemm_table {
    struct gemm_card card;
    struct gemm_entry *entries; /* owned; in the order they were added */
    size_t capacity;
    int count;
};

bool gemm_card_equal(const struct gemm_card *a, const struct gemm_card *b);

/** gemm_card_text() - "NVIDIA H100 80GB HBM3, 132 multiprocessors, cuBLASLt 130100". */
void gemm_card_text(char *out, size_t bytes, const struct gemm_card *card);

void gemm_table_release(struct gemm_table *table);

/** gemm_table_find() - the entry of a product; NULL if there is none. Linear in the entries. */
const struct gemm_entry *gemm_table_find(const struct gemm_table *table,
                                         const struct gemm_key *key);

/** gemm_serving_key() - that of the entry for products as @key says: T rounded up. */
struct gemm_key gemm_serving_key(const struct gemm_key *key);

/** gemm_table_add() - an entry of a product that the table does not have yet.
 * Return: ST_OK; ST_INVALID (GEMM_TABLE_MAX are there); ST_MEMORY. */
MUST_CHECK enum status gemm_table_add(struct gemm_table *table, const struct gemm_entry *entry);

/** gemm_table_write() - as text, with a zero byte behind it. mem_free(*text). ST_MEMORY. */
MUST_CHECK enum status gemm_table_write(char **text, size_t *bytes, const struct gemm_table *table);

/**
 * gemm_table_read() - from text.
 * @table: zeroed; empty after a failure.
 * @path: where the text is from, for messages.
 *
 * Return: ST_OK; ST_CORRUPT: "path:line: ..." says what was expected and what was found;
 * ST_UNSUPPORTED: of another version; ST_MEMORY.
 */
MUST_CHECK enum status gemm_table_read(struct gemm_table *table, const char *text, size_t bytes,
                                       const char *path);

/** gemm_table_path() - the file in @folder for plans of this card: its name tells name,
 * multiprocessors and library. ST_INVALID if it does not fit. */
MUST_CHECK enum status gemm_table_path(char *out, size_t bytes, const char *folder,
                                       const struct gemm_card *card);

C_END

#endif
