#include "engine/ops/reduce.h"

#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/bf16.h"
#include "engine/ops/lanes.h"
#include "engine/ops/pieces.h"

CPU_CLONES static void add_loop(float *out, const float *in, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        out[i] += in[i];
}

struct add {
    float *out;
    const float *in;
};

static void add_piece(void *context, int64_t first, int64_t end, int worker)
{
    const struct add *a = context;
    (void)worker;
    add_loop(a->out + first, a->in + first, end - first);
}

enum status accumulate_cpu(struct stream *s, struct tensor out, struct tensor in, bool add)
{
    struct add a = {out.data, in.data};
    int64_t n = tensor_numel(out);
    if (add)
        pieces_run(s, add_piece, &a, n, PIECE_NUMEL);
    else if (n > 0)
        memcpy(out.data, in.data, (size_t)n * sizeof(float));
    return ST_OK;
}

CPU_CLONES static void bf16_loop(uint16_t *out, const float *in, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = bf16_round(in[i]);
}

enum status cast_cpu(struct stream *s, struct tensor out, struct tensor in)
{
    (void)s;
    int64_t n = tensor_numel(in);
    if (out.dtype == DTYPE_BF16)
        bf16_loop(out.data, in.data, n);
    else if (n > 0)
        memcpy(out.data, in.data, (size_t)n * sizeof(float));
    return ST_OK;
}

CPU_CLONES static double square_sum(const float *x, int64_t n)
{
    double a[4][LANES] = {{0}};
    int64_t i = 0;
    for (; i + LANES_BLOCK <= n; i += LANES_BLOCK)
        for (int k = 0; k < 4; k++)
            for (int l = 0; l < LANES; l++) {
                double v = (double)x[i + k * LANES + l];
                a[k][l] += v * v;
            }
    for (int l = 0; i < n; i++, l++)
        a[l / LANES][l % LANES] += (double)x[i] * (double)x[i];
    double v[LANES];
    for (int l = 0; l < LANES; l++)
        v[l] = (a[0][l] + a[1][l]) + (a[2][l] + a[3][l]);
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

/* Squares of finite floats cannot overflow a double sum, so the sum tells the whole story. */
static void add_squares(struct step_report *report, double sum)
{
    report->squared_norm += sum;
    report->finite &= isfinite(sum) != 0;
}

enum { SQUARES = 64 }; /* parts whose sums are added in order */

struct squares {
    const float *x;
    int64_t grain;
    double sum[SQUARES];
};

static void square_piece(void *context, int64_t first, int64_t end, int worker)
{
    struct squares *q = context;
    (void)worker;
    q->sum[first / q->grain] = square_sum(q->x + first, end - first);
}

enum status squared_norm_cpu(struct stream *s, struct step_report *report, struct tensor g)
{
    int64_t n = tensor_numel(g), part = round_up((n + SQUARES - 1) / SQUARES, LANES_BLOCK);
    struct squares q = {.x = g.data, .grain = part > PIECE_NUMEL ? part : PIECE_NUMEL};
    double sum = 0;
    pieces_run(s, square_piece, &q, n, q.grain);
    for (int i = 0; i < SQUARES; i++)
        sum += q.sum[i];
    add_squares(report, sum);
    return ST_OK;
}

enum status squared_norm_rows_cpu(struct stream *s, struct step_report *report, struct tensor g,
                                  const struct sequences *q, int64_t first_row)
{
    double sum = 0;
    int32_t before = -1;
    (void)s;
    for (int64_t i = 0; i < q->rows; i++) {
        int32_t token = q->token[q->token_order[i]];
        int64_t row = token - first_row;
        if (token > 0 && token != before && row >= 0 && row < g.shape[0])
            sum += square_sum((const float *)g.data + row * g.shape[1], g.shape[1]);
        before = token;
    }
    add_squares(report, sum);
    return ST_OK;
}

enum status step_begin_cpu(struct stream *s, struct step_report *report, struct step_state *state,
                           const struct step_mail *mail)
{
    (void)s;
    if (mail != NULL) {
        state->host = *step_slot(mail, state).host;
        memcpy(mail->batch, step_slot(mail, state).batch, mail->batch_bytes);
    }
    memset(report, 0, sizeof *report);
    report->tokens = state->host.tokens;
    report->finite = 1;
    report->stop = state->host.stop;
    report->signal = state->host.signal;
    report->step = (int32_t)state->host.step;
    report->saved = state->host.saved;
    return ST_OK;
}

enum status agree_cpu(struct stream *s, struct step_state *state, const struct step_report *reports,
                      int world_size, const struct optim_hyper *hyper, const struct step_mail *mail)
{
    (void)s;
    struct step_state *told = mail != NULL ? step_slot(mail, state).told : NULL;
    float rates[STEP_RATES];
    for (int i = 0; i < STEP_RATES; i++)
        rates[i] = step_rate(hyper, state->t, i);
    step_agree(state, reports, world_size, hyper, rates);
    if (told != NULL)
        *told = *state;
    return ST_OK;
}
