#include "engine/ops/adamw.h"

#include <string.h>

#include "engine/ops/embedding.h"
#include "engine/ops/lanes.h"
#include "engine/ops/pieces.h"
#include "engine/ops/reduce.h"

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
    float *p, *m, *v;
    const float *grad;
    int64_t first, row_numel;
    const struct adam_factors *factors;
    float keep;
};

/* A piece of a table goes row by row, for one that is marked in steps of a few zeros. */
static void update_piece(void *context, int64_t first, int64_t end, int worker)
{
    static const float zeros[1024];
    const int64_t most = sizeof zeros / sizeof *zeros;
    const struct update *u = context;
    (void)worker;
    end += u->first;
    for (int64_t i = first + u->first, n; i < end; i += n) {
        const float *grad = u->grad + i;
        n = end - i;
        if (u->row_numel > 0) {
            int64_t row = i / u->row_numel * u->row_numel;
            n = n < row + u->row_numel - i ? n : row + u->row_numel - i;
            if (row_is_marked(u->grad + row)) {
                grad = zeros;
                n = n < most ? n : most;
            }
        }
        adam_loop(u->p + i, u->m + i, u->v + i, grad, n, u->factors, u->keep);
    }
}

enum status adamw_cpu(struct stream *s, struct tensor param, struct tensor master, struct tensor m,
                      struct tensor v, struct tensor grad, const struct adam_range *ranges,
                      int range_count, int64_t row_numel, const struct step_state *state,
                      const struct optim_hyper *hyper)
{
    if (state->skip)
        return ST_OK;
    struct adam_factors f = adam_factors(state, hyper);
    for (int i = 0; i < range_count; i++) {
        int64_t first = ranges[i].first, n = ranges[i].count;
        if (ranges[i].frozen || n == 0)
            continue;
        struct update u = {.p = master.data,
                           .m = m.data,
                           .v = v.data,
                           .grad = grad.data,
                           .first = first,
                           .row_numel = row_numel,
                           .factors = &f,
                           .keep = ranges[i].decay ? f.keep : 1.0f};
        pieces_run(s, update_piece, &u, n, PIECE_NUMEL);
        if (param.data) {
            struct tensor to = tensor_1d(
                (char *)param.data + (size_t)first * dtype_bytes(param.dtype), param.dtype, n);
            TRY(cast_cpu(s, to, tensor_1d((float *)master.data + first, DTYPE_F32, n)));
        }
    }
    return ST_OK;
}
