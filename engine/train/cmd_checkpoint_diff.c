/* `tessera checkpoint diff`: the largest difference of every state of every tensor. */
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <string.h>

#include "engine/base/out.h"
#include "engine/train/cmd_checkpoint.h"
#include "io/checkpoint.h"

enum { SIDES = 2, PIECE_NUMEL = 1 << 18 };

struct comparison {
    struct checkpoint side[SIDES];
    struct checkpoint_reader reader[SIDES];
    float *piece[SIDES]; /* owned */
    int equal, different, alone;
};

struct difference {
    int64_t count; /* elements whose bits differ */
    int64_t where; /* of the largest */
    double max;    /* absolute; NaN if one of them is */
};

static void compare_piece(struct difference *d, const float *a, const float *b, int64_t first,
                          int64_t numel)
{
    if (memcmp(a, b, sizeof *a * (size_t)numel) == 0)
        return;
    for (int64_t i = 0; i < numel; i++) {
        if (memcmp(a + i, b + i, sizeof *a) == 0)
            continue;
        double by = fabs((double)a[i] - (double)b[i]);
        if (d->count++ == 0 || by > d->max || (isnan(by) && !isnan(d->max))) {
            d->max = by;
            d->where = first + i;
        }
    }
}

static enum status compare_state(struct comparison *x, const struct checkpoint_tensor *t,
                                 const char *state)
{
    struct difference d = {0};
    for (int64_t at = 0; at < t->numel; at += PIECE_NUMEL) {
        int64_t n = t->numel - at < PIECE_NUMEL ? t->numel - at : PIECE_NUMEL;
        for (int i = 0; i < SIDES; i++)
            TRY(checkpoint_read_range(&x->reader[i], state, t->name, at, n, x->piece[i]));
        compare_piece(&d, x->piece[0], x->piece[1], at, n);
    }
    x->equal += d.count == 0;
    x->different += d.count != 0;
    if (d.count != 0)
        out("%-60s %-10s %14.6g  %" PRId64 " of %" PRId64 " elements, largest at %" PRId64 "\n",
            t->name, state, d.max, d.count, t->numel, d.where);
    return ST_OK;
}

static bool same_shape(const struct checkpoint_tensor *a, const struct checkpoint_tensor *b)
{
    return a->dims == b->dims && memcmp(a->shape, b->shape, sizeof a->shape) == 0;
}

/* The tensors of one side; what both have is compared once, from the first side. */
static enum status compare_side(struct comparison *x, int side)
{
    const struct checkpoint *mine = &x->side[side], *other = &x->side[1 - side];
    for (int i = 0; i < mine->tensor_count; i++) {
        const struct checkpoint_tensor *t = &mine->tensors[i], *u = checkpoint_find(other, t->name);
        if (u != NULL && !same_shape(t, u)) {
            if (side == 0)
                out("%-60s the shapes differ\n", t->name);
            x->alone += side == 0;
            continue;
        }
        for (int k = 0; k < t->state_count; k++) {
            if (u == NULL || !checkpoint_has_state(u, t->states[k])) {
                out("%-60s %-10s only in %s\n", t->name, t->states[k], mine->path);
                x->alone++;
            } else if (side == 0) {
                TRY(compare_state(x, t, t->states[k]));
            }
        }
    }
    return ST_OK;
}

enum status checkpoint_diff(char **paths)
{
    enum status st = ST_OK;
    struct comparison x = {0};
    for (int i = 0; i < SIDES; i++) {
        TRY_GOTO(st, out, checkpoint_open(&x.side[i], paths[i]));
        TRY_GOTO(st, out, checkpoint_reader_open(&x.reader[i], &x.side[i]));
        TRY_GOTO(st, out, mem_alloc(&x.piece[i], sizeof(float) * PIECE_NUMEL));
    }
    out("%-60s %-10s %14s\n", "tensor", "state", "difference");
    for (int i = 0; i < SIDES; i++)
        TRY_GOTO(st, out, compare_side(&x, i));
    out("%d states are equal to the bit, %d differ, %d cannot be compared; training state: %s\n",
        x.equal, x.different, x.alone,
        json_equal(x.side[0].training, x.side[1].training) ? "equal" : "differs");
    if (x.different + x.alone > 0)
        st = FAIL(CORRUPT, "%s has other values than %s", paths[1], paths[0]);
out:
    for (int i = 0; i < SIDES; i++) {
        mem_free(&x.piece[i]);
        checkpoint_reader_close(&x.reader[i]);
        checkpoint_close(&x.side[i]);
    }
    return st;
}
