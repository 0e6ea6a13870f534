#include "engine/train/batch.h"

#include <string.h>

struct micro_arrays {
    int32_t *cu_seqlens, *kv_len, *sample, *by_length, *start, *end; /* B (+ 1) */
    int32_t *token, *token_type, *row_sequence, *token_order;        /* T */
    int32_t *all_token, *all_order;                                  /* ranks * T */
};

static void micro_bind(struct arena *a, struct micro_arrays *x, const struct batch_layout *l)
{
    ARENA_BIND(a, x->cu_seqlens, l->sequences + 1);
    ARENA_BIND(a, x->kv_len, l->sequences);
    ARENA_BIND(a, x->sample, l->sequences);
    ARENA_BIND(a, x->by_length, l->sequences);
    ARENA_BIND(a, x->start, l->sequences);
    ARENA_BIND(a, x->end, l->sequences);
    ARENA_BIND(a, x->token, l->rows);
    ARENA_BIND(a, x->token_type, l->rows);
    ARENA_BIND(a, x->row_sequence, l->rows);
    ARENA_BIND(a, x->token_order, l->rows);
    ARENA_BIND(a, x->all_token, l->ranks * l->rows);
    ARENA_BIND(a, x->all_order, l->ranks * l->rows);
}

void batch_layout_init(struct batch_layout *l)
{
    struct arena measure = {0};
    struct micro_arrays x;
    micro_bind(&measure, &x, l);
    l->micro_bytes = (size_t)round_up((int64_t)measure.used, ARENA_ALIGN);
}

static struct micro_arrays arrays_of(const struct batch_layout *l, void *block, int index)
{
    struct arena a = arena_over((char *)block + (size_t)index * l->micro_bytes, l->micro_bytes);
    struct micro_arrays x;
    micro_bind(&a, &x, l);
    return x;
}

/* Rows by (token, row): a stable radix sort, eight bits a pass, of token + 1. Rows behind the first
 * @used have none and come first, the last of them first of all: a view of fewer rows skips them.
 * An even number of passes ends where it began, in @order: two do for tokens up to 65,534. */
static void sort_rows(int32_t *order, int32_t *scratch, const int32_t *token, int64_t rows,
                      int64_t used)
{
    int32_t *from = order, *to = scratch, most = 0;
    for (int64_t i = 0; i < rows; i++)
        most = token[i] > most ? token[i] : most;
    int bits = most < UINT16_MAX ? 16 : 32;
    for (int64_t i = 0; i < rows; i++)
        from[i] = (int32_t)(i < rows - used ? rows - 1 - i : i - (rows - used));
    for (int shift = 0; shift < bits; shift += 8) {
        int64_t first[257] = {0};
        for (int64_t i = 0; i < rows; i++)
            first[((uint32_t)(token[i] + 1) >> shift & 255) + 1]++;
        for (int d = 0; d < 256; d++)
            first[d + 1] += first[d];
        for (int64_t i = 0; i < rows; i++)
            to[first[(uint32_t)(token[from[i]] + 1) >> shift & 255]++] = from[i];
        int32_t *kept = from;
        from = to;
        to = kept;
    }
}

/* Sequences by falling length, those of one length as they are: Shell's sort. */
static void sort_sequences(int32_t *order, const int32_t *cu_seqlens, int64_t count)
{
    int64_t gap = 1;
    while (gap < count / 9)
        gap = 3 * gap + 1;
    for (int64_t b = 0; b < count; b++)
        order[b] = (int32_t)b;
    for (; gap > 0; gap /= 3)
        for (int64_t i = gap; i < count; i++) {
            int32_t b = order[i], rows = cu_seqlens[b + 1] - cu_seqlens[b];
            int64_t k = i;
            for (; k >= gap; k -= gap) {
                int32_t c = order[k - gap], others = cu_seqlens[c + 1] - cu_seqlens[c];
                if (others > rows || (others == rows && c < b))
                    break;
                order[k] = c;
            }
            order[k] = b;
        }
}

static int64_t rows_of(const struct batch_layout *l, const struct feature *f)
{
    return l->padded_length > 0 ? l->padded_length : f->token_count;
}

static int32_t token_at(const struct batch_layout *l, const struct feature_set *set,
                        const struct feature *f, int64_t i)
{
    return i < f->token_count ? set->ids[f->first_token + i] : l->pad_id;
}

int64_t batch_fill(const struct batch_layout *l, void *block, int index,
                   const struct feature_set *set, const int32_t *features, int64_t count,
                   int32_t *scratch)
{
    struct micro_arrays x = arrays_of(l, block, index);
    ASSERT(count <= l->sequences);
    int64_t row = 0;
    for (int64_t b = 0; b < l->sequences; b++) {
        x.cu_seqlens[b] = (int32_t)row;
        x.kv_len[b] = x.sample[b] = x.start[b] = x.end[b] = 0;
        if (b >= count)
            continue;
        const struct feature *f = &set->features[features[b]];
        int64_t rows = rows_of(l, f);
        ASSERT(rows >= f->token_count && row + rows <= l->rows);
        x.kv_len[b] = f->token_count;
        x.sample[b] = features[b];
        x.start[b] = f->start;
        x.end[b] = f->end;
        for (int64_t i = 0; i < rows; i++, row++) {
            x.token[row] = token_at(l, set, f, i);
            x.token_type[row] = i < f->token_count && i >= f->context_first ? l->sep_type : 0;
            x.row_sequence[row] = (int32_t)b;
        }
    }
    x.cu_seqlens[l->sequences] = (int32_t)row;
    sort_sequences(x.by_length, x.cu_seqlens, l->sequences);
    for (int64_t i = row; i < l->rows; i++) {
        x.token[i] = x.row_sequence[i] = -1;
        x.token_type[i] = 0;
    }
    if (scratch != NULL)
        sort_rows(x.token_order, scratch, x.token, l->rows, row);
    return row;
}

void batch_fill_rank(const struct batch_layout *l, void *block, int index, int rank, int64_t rows,
                     const struct feature_set *set, const int32_t *features, int64_t count)
{
    int32_t *token = arrays_of(l, block, index).all_token + rank * rows;
    int64_t row = 0;
    ASSERT(rank < l->ranks && rows <= l->rows);
    for (int64_t b = 0; b < count; b++) {
        const struct feature *f = &set->features[features[b]];
        ASSERT(row + rows_of(l, f) <= rows);
        for (int64_t i = 0; i < rows_of(l, f); i++)
            token[row++] = token_at(l, set, f, i);
    }
    while (row < rows)
        token[row++] = -1;
}

void batch_order_ranks(const struct batch_layout *l, void *block, int index, int64_t rows,
                       int32_t *scratch)
{
    struct micro_arrays x = arrays_of(l, block, index);
    sort_rows(x.all_order, scratch, x.all_token, l->ranks * rows, l->ranks * rows);
}

struct sequences batch_view(const struct batch_layout *l, void *block, int index, int64_t rows,
                            int64_t all_rows)
{
    struct micro_arrays x = arrays_of(l, block, index);
    return (struct sequences){
        .rows = rows,
        .count = (int32_t)l->sequences,
        .max_length = l->max_length,
        .positions = (int32_t)l->positions,
        .cu_seqlens = x.cu_seqlens,
        .kv_len = x.kv_len,
        .sample = x.sample,
        .by_length = x.by_length,
        .token = x.token,
        .token_type = x.token_type,
        .row_sequence = x.row_sequence,
        /* The rows from @rows on come first. */
        .token_order = x.token_order + (l->rows - rows),
        .start = x.start,
        .end = x.end,
        .all = {l->ranks * all_rows, l->ranks, x.all_token, x.all_order},
    };
}
