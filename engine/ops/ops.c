/*
 * The fronts of engine/ops/ops.h: each checks shapes, dtypes and aliasing once and calls the
 * device's table. What is checked here can be seen from the host; indices in device memory cannot.
 */
#include "engine/ops/ops.h"

#include <stdint.h>

#include "engine/ops/cuda_sizes.h"

/* Macros, so that a failed assertion names the tensor and the line of the op. */
#define EXPECT_SHAPE_1D(t, n)                                                                      \
    do {                                                                                           \
        ASSERT((t).dims == 1);                                                                     \
        ASSERT((t).shape[0] == (n));                                                               \
    } while (0)
#define EXPECT_SHAPE_2D(t, rows, columns)                                                          \
    do {                                                                                           \
        ASSERT((t).dims == 2);                                                                     \
        ASSERT((t).shape[0] == (rows));                                                            \
        ASSERT((t).shape[1] == (columns));                                                         \
    } while (0)
#define EXPECT_DATA(t) ASSERT((t).data != NULL || tensor_numel(t) == 0)
#define EXPECT_1D(t, type, n)                                                                      \
    do {                                                                                           \
        EXPECT_SHAPE_1D(t, n);                                                                     \
        ASSERT((t).dtype == (type));                                                               \
        EXPECT_DATA(t);                                                                            \
    } while (0)
#define EXPECT_2D(t, type, rows, columns)                                                          \
    do {                                                                                           \
        EXPECT_SHAPE_2D(t, rows, columns);                                                         \
        ASSERT((t).dtype == (type));                                                               \
        EXPECT_DATA(t);                                                                            \
    } while (0)
/* Weight gradients are fp32; those of frozen weights have no data, and then nothing matters. */
#define EXPECT_GRAD_1D(t, n)                                                                       \
    do {                                                                                           \
        if ((t).data)                                                                              \
            EXPECT_1D(t, DTYPE_F32, n);                                                            \
    } while (0)
#define EXPECT_GRAD_2D(t, rows, columns)                                                           \
    do {                                                                                           \
        if ((t).data)                                                                              \
            EXPECT_2D(t, DTYPE_F32, rows, columns);                                                \
    } while (0)
#define EXPECT_SAME_SHAPE(a, b)                                                                    \
    do {                                                                                           \
        ASSERT((a).dims == (b).dims);                                                              \
        ASSERT((a).shape[0] == (b).shape[0]);                                                      \
        ASSERT((a).shape[1] == (b).shape[1]);                                                      \
        ASSERT((a).shape[2] == (b).shape[2]);                                                      \
    } while (0)

static bool apart(struct tensor a, struct tensor b)
{
    uintptr_t x = (uintptr_t)a.data, y = (uintptr_t)b.data;
    size_t nx = tensor_bytes(a), ny = tensor_bytes(b);
    return !x || !y || nx == 0 || ny == 0 || x + nx <= y || y + ny <= x;
}

static bool same_or_apart(struct tensor a, struct tensor b)
{
    return a.data == b.data || apart(a, b);
}

static void expect_sequences(const struct sequences *q)
{
    ASSERT(q->rows >= 0);
    ASSERT(q->count >= 0);
    ASSERT(q->max_length >= 0);
    ASSERT(q->max_length <= q->positions);
    ASSERT(q->rows == 0 || q->row_sequence);
    ASSERT(q->cu_seqlens);
}

static void expect_dropout(struct dropout d)
{
    ASSERT(d.p >= 0.0f);
    ASSERT(d.p < 1.0f);
    ASSERT(d.p == 0.0f || d.state);
}

/* Those that keep them are attention's kernels for Hopper. */
size_t op_attention_mask_bytes(enum dtype dtype, int64_t width, int64_t heads, int64_t rows,
                               int64_t sequences, int64_t max_length)
{
    if (dtype != DTYPE_BF16 || (width != 32 && width != 64))
        return 0;
    int64_t queries = 64 * attention_part_slots(rows, sequences);
    return (size_t)(heads * queries * attention_keep_pitch(max_length));
}

size_t op_workspace_bytes(const struct device *device, const struct op_limits *limits)
{
    return device->compute->workspace_bytes(device, limits);
}

size_t op_side_workspace_bytes(const struct device *device, const struct op_limits *limits)
{
    return device->compute->side_workspace_bytes(device, limits);
}

/* ---- embeddings and norms ------------------------------------------------------------------- */

enum status op_embedding_forward(struct stream *s, struct tensor out, struct tensor table,
                                 struct token_rows q, int64_t first, bool set)
{
    EXPECT_2D(out, s->device->param_dtype, q.rows, out.shape[1]);
    EXPECT_1D(table, s->device->param_dtype, table.shape[0]);
    ASSERT(first >= 0);
    ASSERT(q.rows == 0 || q.token);
    ASSERT(apart(out, table));
    return s->device->compute->embedding_forward(s, out, table, q, first, set);
}

enum status op_embedding_backward(struct stream *s, struct tensor dtable, struct tensor dout,
                                  struct token_rows q, int64_t first, enum table_rows others)
{
    int64_t channels = dout.shape[1];
    EXPECT_GRAD_1D(dtable, dtable.shape[0]);
    EXPECT_2D(dout, s->device->param_dtype, q.rows, channels);
    ASSERT(first >= 0);
    ASSERT(others != ROWS_MARKED || (first % channels == 0 && dtable.shape[0] % channels == 0));
    ASSERT(q.rows == 0 || (q.token && q.order));
    ASSERT(apart(dtable, dout));
    return s->device->compute->embedding_backward(s, dtable, dout, q, first, others);
}

enum status op_embedding_norm_forward(struct stream *s, struct tensor out, struct tensor z,
                                      struct tensor stats, struct tensor x, struct tensor position,
                                      struct tensor type, struct tensor gamma, struct tensor beta,
                                      const struct sequences *q, float eps, struct dropout drop)
{
    enum dtype dtype = s->device->param_dtype;
    int64_t rows = q->rows, channels = x.shape[1];
    expect_sequences(q);
    expect_dropout(drop);
    EXPECT_2D(x, dtype, rows, channels);
    EXPECT_2D(z, dtype, rows, channels);
    EXPECT_2D(out, dtype, rows, channels);
    EXPECT_2D(stats, DTYPE_F32, 2, rows);
    EXPECT_2D(position, dtype, position.shape[0], channels);
    if (type.data)
        EXPECT_2D(type, dtype, type.shape[0], channels);
    EXPECT_1D(gamma, dtype, channels);
    EXPECT_1D(beta, dtype, channels);
    ASSERT(q->max_length <= position.shape[0]);
    ASSERT(same_or_apart(z, x));
    ASSERT(apart(out, z));
    ASSERT(apart(out, x));
    ASSERT(eps > 0.0f);
    return s->device->compute->embedding_norm_forward(s, out, z, stats, x, position, type, gamma,
                                                      beta, q, eps, drop);
}

enum status op_embedding_norm_backward(struct stream *s, struct tensor dx, struct tensor dposition,
                                       struct tensor dtype_table, struct tensor dgamma,
                                       struct tensor dbeta, struct tensor dout, struct tensor z,
                                       struct tensor stats, struct tensor gamma,
                                       const struct sequences *q, struct dropout drop, bool add)
{
    enum dtype dtype = s->device->param_dtype;
    int64_t rows = q->rows, channels = dx.shape[1];
    expect_sequences(q);
    expect_dropout(drop);
    EXPECT_2D(dx, dtype, rows, channels);
    EXPECT_2D(dout, dtype, rows, channels);
    EXPECT_2D(z, dtype, rows, channels);
    EXPECT_2D(stats, DTYPE_F32, 2, rows);
    EXPECT_1D(gamma, dtype, channels);
    EXPECT_GRAD_1D(dgamma, channels);
    EXPECT_GRAD_1D(dbeta, channels);
    EXPECT_GRAD_2D(dposition, dposition.shape[0], channels);
    EXPECT_GRAD_2D(dtype_table, dtype_table.shape[0], channels);
    ASSERT(!dposition.data || q->max_length <= dposition.shape[0]);
    ASSERT(same_or_apart(dx, dout));
    ASSERT(apart(dx, z));
    return s->device->compute->embedding_norm_backward(s, dx, dposition, dtype_table, dgamma, dbeta,
                                                       dout, z, stats, gamma, q, drop, add);
}

enum status op_residual_norm_forward(struct stream *s, struct tensor out, struct tensor z,
                                     struct tensor stats, struct tensor x, struct tensor y,
                                     struct tensor gamma, struct tensor beta,
                                     const struct sequences *q, float eps, struct dropout drop)
{
    enum dtype dtype = s->device->param_dtype;
    int64_t rows = q->rows, channels = x.shape[1];
    expect_sequences(q);
    expect_dropout(drop);
    EXPECT_2D(x, dtype, rows, channels);
    EXPECT_2D(y, dtype, rows, channels);
    EXPECT_2D(z, dtype, rows, channels);
    EXPECT_2D(out, dtype, rows, channels);
    EXPECT_2D(stats, DTYPE_F32, 2, rows);
    EXPECT_1D(gamma, dtype, channels);
    EXPECT_1D(beta, dtype, channels);
    ASSERT(same_or_apart(z, y));
    ASSERT(same_or_apart(z, x));
    ASSERT(apart(out, z));
    ASSERT(apart(out, x));
    ASSERT(apart(out, y));
    ASSERT(eps > 0.0f);
    return s->device->compute->residual_norm_forward(s, out, z, stats, x, y, gamma, beta, q, eps,
                                                     drop);
}

enum status op_residual_norm_backward(struct stream *s, struct tensor dx, struct tensor dy,
                                      struct tensor dgamma, struct tensor dbeta,
                                      struct tensor dbias, struct tensor dout, struct tensor z,
                                      struct tensor stats, struct tensor gamma,
                                      const struct sequences *q, struct dropout drop, bool add)
{
    enum dtype dtype = s->device->param_dtype;
    int64_t rows = q->rows, channels = dx.shape[1];
    expect_sequences(q);
    expect_dropout(drop);
    EXPECT_2D(dx, dtype, rows, channels);
    EXPECT_2D(dy, dtype, rows, channels);
    EXPECT_2D(dout, dtype, rows, channels);
    EXPECT_2D(z, dtype, rows, channels);
    EXPECT_2D(stats, DTYPE_F32, 2, rows);
    EXPECT_1D(gamma, dtype, channels);
    EXPECT_GRAD_1D(dgamma, channels);
    EXPECT_GRAD_1D(dbeta, channels);
    ASSERT(same_or_apart(dx, dout));
    EXPECT_GRAD_1D(dbias, channels);
    ASSERT(apart(dx, dy) || (dx.data == dy.data && drop.p == 0.0f));
    ASSERT(apart(dx, z));
    ASSERT(apart(dy, z));
    ASSERT(apart(dy, dout) || dy.data == dx.data);
    return s->device->compute->residual_norm_backward(s, dx, dy, dgamma, dbeta, dbias, dout, z,
                                                      stats, gamma, q, drop, add);
}

/* ---- linear and gelu ------------------------------------------------------------------------ */

enum status op_linear_forward(struct stream *s, struct tensor y, struct tensor x, struct tensor w,
                              struct tensor bias)
{
    enum dtype dtype = s->device->param_dtype;
    EXPECT_2D(x, dtype, x.shape[0], w.shape[1]);
    EXPECT_2D(w, dtype, w.shape[0], w.shape[1]);
    EXPECT_2D(y, dtype, x.shape[0], w.shape[0]);
    if (bias.data)
        EXPECT_1D(bias, dtype, w.shape[0]);
    ASSERT(x.shape[0] <= INT32_MAX);
    ASSERT(apart(y, x));
    ASSERT(apart(y, w));
    return s->device->compute->linear_forward(s, y, x, w, bias);
}

enum status op_linear_backward_data(struct stream *s, struct tensor dx, struct tensor dy,
                                    struct tensor w, bool add)
{
    enum dtype dtype = s->device->param_dtype;
    EXPECT_2D(dy, dtype, dy.shape[0], w.shape[0]);
    EXPECT_2D(w, dtype, w.shape[0], w.shape[1]);
    EXPECT_2D(dx, dtype, dy.shape[0], w.shape[1]);
    ASSERT(dy.shape[0] <= INT32_MAX);
    ASSERT(apart(dx, dy));
    ASSERT(apart(dx, w));
    return s->device->compute->linear_backward_data(s, dx, dy, w, add);
}

enum status op_linear_backward_weight(struct stream *s, struct tensor dw, struct tensor dy,
                                      struct tensor x, bool add)
{
    enum dtype dtype = s->device->param_dtype;
    EXPECT_2D(dy, dtype, x.shape[0], dy.shape[1]);
    EXPECT_2D(x, dtype, x.shape[0], x.shape[1]);
    EXPECT_GRAD_2D(dw, dy.shape[1], x.shape[1]);
    ASSERT(x.shape[0] <= INT32_MAX);
    ASSERT(apart(dw, dy));
    ASSERT(apart(dw, x));
    return s->device->compute->linear_backward_weight(s, dw, dy, x, add);
}

enum status op_gelu_forward(struct stream *s, struct tensor out, struct tensor pre)
{
    EXPECT_SAME_SHAPE(out, pre);
    EXPECT_DATA(out);
    EXPECT_DATA(pre);
    ASSERT(out.dtype == s->device->param_dtype);
    ASSERT(pre.dtype == s->device->param_dtype);
    ASSERT(same_or_apart(out, pre));
    return s->device->compute->gelu_forward(s, out, pre);
}

enum status op_gelu_backward(struct stream *s, struct tensor dpre, struct tensor act,
                             struct tensor dbias, struct tensor dout, struct tensor pre, bool add)
{
    enum dtype dtype = s->device->param_dtype;
    int64_t rows = pre.shape[0], columns = pre.shape[1];
    EXPECT_2D(pre, dtype, rows, columns);
    EXPECT_2D(dout, dtype, rows, columns);
    EXPECT_2D(dpre, dtype, rows, columns);
    if (act.data)
        EXPECT_2D(act, dtype, rows, columns);
    EXPECT_GRAD_1D(dbias, columns);
    ASSERT(same_or_apart(dpre, dout));
    ASSERT(same_or_apart(act, pre));
    ASSERT(apart(dpre, act));
    ASSERT(apart(dpre, pre));
    ASSERT(apart(act, dout));
    ASSERT(apart(dbias, dpre));
    return s->device->compute->gelu_backward(s, dpre, act, dbias, dout, pre, add);
}

/* ---- attention ------------------------------------------------------------------------------ */

static void expect_attention(struct stream *s, struct tensor qkv, struct tensor out,
                             struct tensor lse, const struct sequences *q, int heads)
{
    enum dtype dtype = s->device->param_dtype;
    expect_sequences(q);
    ASSERT(heads > 0);
    ASSERT(out.shape[1] % heads == 0);
    EXPECT_2D(qkv, dtype, q->rows, 3 * out.shape[1]);
    EXPECT_2D(out, dtype, q->rows, out.shape[1]);
    EXPECT_2D(lse, DTYPE_F32, heads, q->rows);
}

enum status op_attention_forward(struct stream *s, struct tensor out, struct tensor lse,
                                 struct tensor qkv, const struct sequences *q, int heads,
                                 struct dropout drop)
{
    expect_attention(s, qkv, out, lse, q, heads);
    expect_dropout(drop);
    ASSERT(apart(out, qkv));
    return s->device->compute->attention_forward(s, out, lse, qkv, q, heads, drop);
}

enum status op_attention_backward(struct stream *s, struct tensor dqkv, struct tensor dbias,
                                  struct tensor dout, struct tensor out, struct tensor lse,
                                  struct tensor qkv, const struct sequences *q, int heads,
                                  struct dropout drop, bool add)
{
    expect_attention(s, qkv, out, lse, q, heads);
    expect_dropout(drop);
    EXPECT_2D(dqkv, s->device->param_dtype, q->rows, qkv.shape[1]);
    EXPECT_2D(dout, s->device->param_dtype, q->rows, out.shape[1]);
    ASSERT(apart(dqkv, qkv));
    ASSERT(apart(dqkv, dout));
    ASSERT(apart(dqkv, out));
    EXPECT_GRAD_1D(dbias, qkv.shape[1]);
    ASSERT(apart(dbias, dqkv));
    return s->device->compute->attention_backward(s, dqkv, dbias, dout, out, lse, qkv, q, heads,
                                                  drop, add);
}

/* ---- dropout alone -------------------------------------------------------------------------- */

enum status op_dropout_apply(struct stream *s, struct tensor out, struct tensor x,
                             const struct sequences *q, struct dropout drop)
{
    enum dtype dtype = s->device->param_dtype;
    expect_sequences(q);
    expect_dropout(drop);
    EXPECT_2D(x, dtype, q->rows, x.shape[1]);
    EXPECT_2D(out, dtype, q->rows, x.shape[1]);
    ASSERT(same_or_apart(out, x));
    return s->device->compute->dropout_apply(s, out, x, q, drop);
}

/* ---- the head ------------------------------------------------------------------------------- */

enum status op_span_logits_forward(struct stream *s, struct tensor logits, struct tensor x,
                                   struct tensor w, struct tensor bias, const struct sequences *q)
{
    enum dtype dtype = s->device->param_dtype;
    expect_sequences(q);
    EXPECT_2D(logits, DTYPE_F32, q->rows, 2);
    EXPECT_2D(x, dtype, q->rows, x.shape[1]);
    EXPECT_2D(w, dtype, 2, x.shape[1]);
    EXPECT_1D(bias, dtype, 2);
    ASSERT(apart(logits, x));
    return s->device->compute->span_logits_forward(s, logits, x, w, bias, q);
}

enum status op_span_logits_backward(struct stream *s, struct tensor dx, struct tensor dw,
                                    struct tensor dbias, struct tensor dlogits, struct tensor x,
                                    struct tensor w, const struct sequences *q, bool add)
{
    enum dtype dtype = s->device->param_dtype;
    expect_sequences(q);
    EXPECT_2D(dx, dtype, q->rows, x.shape[1]);
    EXPECT_2D(dlogits, DTYPE_F32, q->rows, 2);
    EXPECT_2D(x, dtype, q->rows, x.shape[1]);
    EXPECT_2D(w, dtype, 2, x.shape[1]);
    EXPECT_GRAD_2D(dw, 2, x.shape[1]);
    EXPECT_GRAD_1D(dbias, 2);
    ASSERT(apart(dx, x));
    ASSERT(apart(dx, dlogits));
    return s->device->compute->span_logits_backward(s, dx, dw, dbias, dlogits, x, w, q, add);
}

enum status op_span_loss(struct stream *s, struct tensor dlogits, struct step_report *report,
                         struct tensor logits, const struct sequences *q,
                         const struct step_state *state)
{
    expect_sequences(q);
    EXPECT_2D(logits, DTYPE_F32, q->rows, 2);
    if (dlogits.data)
        EXPECT_2D(dlogits, DTYPE_F32, q->rows, 2);
    ASSERT(report != NULL);
    ASSERT(state != NULL);
    ASSERT(q->count == 0 || (q->start && q->end));
    ASSERT(apart(dlogits, logits));
    return s->device->compute->span_loss(s, dlogits, report, logits, q, state);
}

/* ---- gradients and the step ----------------------------------------------------------------- */

enum status op_pass_begin(struct stream *s, double product_flops, uint16_t beside)
{
    ASSERT(product_flops >= 0.0);
    return s->device->compute->pass_begin(s, product_flops, beside);
}

enum status op_finish_sums(struct stream *s)
{
    return s->device->compute->finish_sums(s);
}

enum status op_side_begin(struct stream **side, struct stream *s)
{
    return s->device->compute->side_begin(side, s);
}

enum status op_side_end(struct stream *s)
{
    return s->device->compute->side_end(s);
}

enum status op_accumulate(struct stream *s, struct tensor out, struct tensor in, bool add)
{
    EXPECT_SAME_SHAPE(out, in);
    EXPECT_DATA(out);
    EXPECT_DATA(in);
    ASSERT(out.dtype == DTYPE_F32);
    ASSERT(in.dtype == DTYPE_F32);
    ASSERT(apart(out, in));
    return s->device->compute->accumulate(s, out, in, add);
}

enum status op_cast(struct stream *s, struct tensor out, struct tensor in)
{
    EXPECT_SAME_SHAPE(out, in);
    EXPECT_DATA(out);
    EXPECT_DATA(in);
    ASSERT(out.dtype == DTYPE_F32 || out.dtype == DTYPE_BF16);
    ASSERT(in.dtype == DTYPE_F32);
    ASSERT(apart(out, in));
    return s->device->compute->cast(s, out, in);
}

enum status op_master_split(struct stream *s, struct tensor param, struct tensor low,
                            struct tensor master)
{
    int64_t n = master.shape[0];
    EXPECT_1D(master, DTYPE_F32, n);
    EXPECT_1D(param, DTYPE_BF16, n);
    if (low.data)
        EXPECT_1D(low, DTYPE_U16, n);
    ASSERT(apart(param, master));
    ASSERT(apart(low, master));
    ASSERT(apart(param, low));
    return s->device->compute->master_split(s, param, low, master);
}

enum status op_squared_norm(struct stream *s, struct step_report *report, struct tensor g)
{
    EXPECT_DATA(g);
    ASSERT(g.dtype == DTYPE_F32);
    ASSERT(report != NULL);
    return s->device->compute->squared_norm(s, report, g);
}

enum status op_squared_norm_rows(struct stream *s, struct step_report *report, struct tensor g,
                                 const struct sequences *q, int64_t first_row)
{
    EXPECT_2D(g, DTYPE_F32, g.shape[0], g.shape[1]);
    ASSERT(report != NULL);
    ASSERT(first_row >= 0);
    ASSERT(q->rows == 0 || q->token_order);
    return s->device->compute->squared_norm_rows(s, report, g, q, first_row);
}

enum status op_step_begin(struct stream *s, struct step_report *report, struct step_state *state,
                          const struct step_mail *mail)
{
    ASSERT(report != NULL);
    ASSERT(state != NULL);
    ASSERT(mail == NULL || mail->batch_bytes % 16 == 0);
    return s->device->compute->step_begin(s, report, state, mail);
}

enum status op_agree(struct stream *s, struct step_state *state, const struct step_report *reports,
                     int world_size, const struct optim_hyper *hyper, const struct step_mail *mail)
{
    ASSERT(state != NULL);
    ASSERT(reports != NULL);
    ASSERT(world_size >= 1);
    return s->device->compute->agree(s, state, reports, world_size, hyper, mail);
}

enum status op_adamw(struct stream *s, struct tensor param, struct tensor low, struct tensor m,
                     struct tensor v, struct tensor grad, const struct adam_range *ranges,
                     int range_count, int64_t row_numel, const struct step_state *state,
                     const struct optim_hyper *hyper)
{
    int64_t n = param.shape[0], covered = 0;
    bool halves = param.dtype == DTYPE_BF16;
    EXPECT_1D(param, halves ? DTYPE_BF16 : DTYPE_F32, n);
    if (halves)
        EXPECT_1D(low, DTYPE_U16, n);
    else
        ASSERT(low.data == NULL);
    EXPECT_1D(m, DTYPE_F32, n);
    EXPECT_1D(v, DTYPE_F32, n);
    EXPECT_1D(grad, DTYPE_F32, n);
    ASSERT(row_numel >= 0);
    ASSERT(range_count >= 0);
    ASSERT(range_count <= ADAM_MAX_RANGES);
    for (int i = 0; i < range_count; i++) {
        ASSERT(ranges[i].first == covered);
        ASSERT(ranges[i].count >= 0);
        covered += ranges[i].count;
    }
    ASSERT(covered == n);
    ASSERT(apart(param, low));
    ASSERT(apart(param, grad));
    return s->device->compute->adamw(s, param, low, m, v, grad, ranges, range_count, row_numel,
                                     state, hyper);
}
