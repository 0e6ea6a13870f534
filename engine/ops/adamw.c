#include "engine/ops/adamw.h"

#include <string.h>

#include "engine/ops/embedding.h"
#include "engine/ops/lanes.h"
#include "engine/ops/master.h"
#include "engine/ops/pieces.h"

CPU_CLONES static void adam_loop(float *p, float *m, float *v, const float *grad, int64_t n,
                                 const struct adam_factors *factors, float keep)
{
    const struct adam_factors f = *factors;
    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] * f.clip;
        m[i] += f.one_minus_beta1 * (g - m[i]);
        v[i] = v[i] * f.beta2 + f.one_minus_beta2 * g * g;
        float denominator = sqrtf(v[i]) / f.root_correction2 + f.eps;
        p[i] = p[i] * keep - f.step_size * m[i] / denominator;
    }
}

struct update {
    float *p;             /* NULL: the masters are in halves */
    uint16_t *high, *low; /* these */
    float *m, *v;
    const float *grad;
    int64_t first, row_numel;
    const struct adam_factors *factors;
    float keep;
};

enum { PART = 1024 };

/* Elements [i, i + n); in halves n <= PART. */
static void update_part(const struct update *u, int64_t i, const float *grad, int64_t n)
{
    float master[PART], *p = u->p != NULL ? u->p + i : master;
    if (u->p == NULL)
        master_take(master, u->high + i, u->low + i, n);
    adam_loop(p, u->m + i, u->v + i, grad, n, u->factors, u->keep);
    if (u->p == NULL)
        master_put(u->high + i, u->low + i, master, n);
}

/* A piece of a table goes row by row; one that is marked, and masters in halves, in parts. */
static void update_piece(void *context, int64_t first, int64_t end, int worker)
{
    static const float zeros[PART];
    const struct update *u = context;
    (void)worker;
    end += u->first;
    for (int64_t i = first + u->first, n; i < end; i += n) {
        const float *grad = u->grad + i;
        bool in_parts = u->p == NULL;
        n = end - i;
        if (u->row_numel > 0) {
            int64_t row = i / u->row_numel * u->row_numel;
            n = n < row + u->row_numel - i ? n : row + u->row_numel - i;
            if (row_is_marked(u->grad + row)) {
                grad = zeros;
                in_parts = true;
            }
        }
        n = in_parts && n > PART ? PART : n;
        update_part(u, i, grad, n);
    }
}

enum status adamw_cpu(struct stream *s, struct tensor param, struct tensor low, struct tensor m,
                      struct tensor v, struct tensor grad, const struct adam_range *ranges,
                      int range_count, int64_t row_numel, const struct step_state *state,
                      const struct optim_hyper *hyper)
{
    if (state->skip)
        return ST_OK;
    struct adam_factors f = adam_factors(state, hyper);
    bool halves = param.dtype == DTYPE_BF16;
    for (int i = 0; i < range_count; i++) {
        int64_t first = ranges[i].first, n = ranges[i].count;
        if (ranges[i].frozen || n == 0)
            continue;
        struct update u = {.p = halves ? NULL : param.data,
                           .high = halves ? param.data : NULL,
                           .low = low.data,
                           .m = m.data,
                           .v = v.data,
                           .grad = grad.data,
                           .first = first,
                           .row_numel = row_numel,
                           .factors = &f,
                           .keep = ranges[i].decay ? f.keep : 1.0f};
        pieces_run(s, update_piece, &u, n, PIECE_NUMEL);
    }
    return ST_OK;
}
