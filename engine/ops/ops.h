/*
 * engine/ops/ops.h - what a device computes: whole tensor operations.
 *
 * Each op has a front, op_NAME(), that checks shapes, dtypes and aliasing once and calls the
 * device's table. The backends get checked arguments. An op is enqueued on a stream and returns; it
 * never allocates, synchronises or logs. Formulas and sources stand in the op's own header:
 *
 *     embedding.h  norm.h  linear.h  gelu.h  attention.h  dropout.h  span.h  adamw.h  master.h
 *     reduce.h
 *
 * Shape letters: T rows (tokens), C channels, H heads, D = C / H, F feed-forward, B sequences.
 * Activations and weights have the device's param_dtype; weight gradients, statistics, logits and
 * optimizer state are fp32. "add" of a gradient output: false overwrites it (the first writer of a
 * step), true adds to it. Gradient outputs may have data == NULL: frozen, not computed.
 *
 * Gradients that are sums over rows (biases, norms, tables of few rows, the span head) are there
 * behind op_finish_sums(), not before.
 *
 * op_pass_begin() says what runs beside the linear layers that follow, which may so take a way that
 * is faster there; the bits are the same.
 *
 * Determinism: every reduction has a fixed order, so equal inputs give equal bits, on any rank and
 * whatever else runs. Rows of no sequence (padding of the length class) get zeros where an output
 * row is written, and contribute zeros to gradients.
 */
#ifndef ENGINE_OPS_OPS_H
#define ENGINE_OPS_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/tensor.h"
#include "engine/device/device.h"
#include "engine/ops/step.h"

C_BEGIN

enum { PASS_PARTS = 16 };

/* Rows by their tokens: those of a batch, or of all ranks' batches, one rank's behind another's. */
struct token_rows {
    int64_t rows;
    int batches;          /* that they are of, each with as many of them */
    const int32_t *token; /* [rows], -1 on rows of no sequence */
    const int32_t *order; /* [rows] sorted by (token, row); rows with token -1 come first */
};

/*
 * A packed batch on the device. Sequence b has the query rows [cu_seqlens[b], cu_seqlens[b + 1])
 * and the first kv_len[b] of them as keys (fewer than its rows only in padded batches). Sequences
 * may be empty. Rows from cu_seqlens[count] on belong to no sequence: token -1, row_sequence -1.
 */
struct sequences {
    int64_t rows;       /* T of all (T, ...) tensors */
    int32_t count;      /* B; empty sequences included */
    int32_t max_length; /* no sequence has more rows than this */
    int32_t positions;  /* P: rows of the position table; stride of attention dropout elements */
    const int32_t *cu_seqlens; /* [B + 1] */
    const int32_t *kv_len;     /* [B] */
    const int32_t *sample;     /* [B] global sample, dropout counter */
    const int32_t *by_length;  /* [B] sequences, longest first; NULL: as they are. Order of work */
    const int32_t *token;      /* [T], -1 on rows of no sequence */
    const int32_t *token_type; /* [T] */
    const int32_t *row_sequence; /* [T], -1 on rows of no sequence */
    const int32_t *token_order; /* [T] rows sorted by (token, row); rows with token -1 come first */
    const int32_t *start, *end; /* [B] labels, row within the sequence */
    /* Of all ranks, each with as many rows as this batch or more. Only for tables that are moved by
     * rows; else there are none. */
    struct token_rows all;
};

static inline struct token_rows sequences_rows(const struct sequences *q)
{
    struct token_rows own = {q->rows, 1, q->token, q->token_order};
    return own;
}

/* position of a row = row - cu_seqlens[row_sequence[row]] */

/*
 * Inverted dropout as engine/base/rng.h says: counter (step, layer << 8 | site, sample, element/8),
 * what is kept scaled so that its expectation is exact. element = position * C + c for rows, and
 * (h * P + i) * P + j for attention. Not applied when state->host.training is 0 or p is 0.
 */
struct dropout {
    float p;
    uint32_t layer_site;            /* layer << 8 | site */
    const struct step_state *state; /* device memory */
    uint8_t *masks; /* attention's, from forward to backward; NULL: backward makes them again */
};

/** op_attention_mask_bytes() - of dropout.masks: a bit for each query, head and key, in tiles of
 * 64 x 64 that belong to one sequence each; 0: no backend keeps them for such tensors and heads.
 * Backends that make masks again leave them alone. */
size_t op_attention_mask_bytes(enum dtype dtype, int64_t width, int64_t heads, int64_t rows,
                               int64_t sequences, int64_t max_length);

enum dropout_site {
    SITE_EMBEDDING,
    SITE_ATTENTION,
    SITE_ATTENTION_OUTPUT,
    SITE_FFN_OUTPUT,
    SITE_HEAD
};

/* A range of a shard with one treatment; ranges ascend and cover the shard. */
struct adam_range {
    int64_t first, count; /* elements of the shard */
    bool decay, frozen;
};

enum { ADAM_MAX_RANGES = 16 };

/* What the gradient of a table has in the rows of no token. */
enum table_rows {
    ROWS_ZERO,
    ROWS_KEPT,  /* what they had: rows of tokens are added to */
    ROWS_MARKED /* ROW_MARK, for zeros: nobody writes them, and who knows of marks reads none */
};

/* Bits of a marked row's first element: a NaN, which no gradient is that UPDATE looks at. Its other
 * elements are anything. */
enum { ROW_MARK = 0x7FE0FADE };

/* The largest sizes any op on this stream will see; for workspace_bytes(). */
struct op_limits {
    int64_t rows, channels, ffn, heads, sequences, max_length, vocab_rows;
    int world_size;
};

struct ops {
    const char *name;

    /* Scratch bytes that the ops below need in stream->workspace. */
    size_t (*workspace_bytes)(const struct device *device, const struct op_limits *limits);
    /* And in that of the side stream; 0: there is none. */
    size_t (*side_workspace_bytes)(const struct device *device, const struct op_limits *limits);

    /* out (T, C) of the rows @q: what lies of their tokens' rows in table (n), elements [first,
     * first + n) of the whole one, which may begin and end within a row. @set also writes all
     * else: +0 in rows of no sequence, -0 in what other parts and other ranks have. */
    enum status (*embedding_forward)(struct stream *s, struct tensor out, struct tensor table,
                                     struct token_rows q, int64_t first, bool set);
    /* dout (T, C) of the rows @q; dtable fp32 (n): elements [first, first + n) of the gradient of
     * the whole table, which may begin and end within a row (marked rows are whole). Token 0, which
     * is [PAD], has no gradient. */
    enum status (*embedding_backward)(struct stream *s, struct tensor dtable, struct tensor dout,
                                      struct token_rows q, int64_t first, enum table_rows others);

    /* z = x + position[row] + type[token_type]; out = dropout(norm(z)); stats (2, T) fp32: mean,
     * 1 / standard deviation. type.data NULL: a model without token types. */
    enum status (*embedding_norm_forward)(struct stream *s, struct tensor out, struct tensor z,
                                          struct tensor stats, struct tensor x,
                                          struct tensor position, struct tensor type,
                                          struct tensor gamma, struct tensor beta,
                                          const struct sequences *q, float eps,
                                          struct dropout drop);
    /* dx (T, C) = gradient of z; may be dout itself. */
    enum status (*embedding_norm_backward)(struct stream *s, struct tensor dx,
                                           struct tensor dposition, struct tensor dtype_table,
                                           struct tensor dgamma, struct tensor dbeta,
                                           struct tensor dout, struct tensor z, struct tensor stats,
                                           struct tensor gamma, const struct sequences *q,
                                           struct dropout drop, bool add);

    /* z = x + dropout(y); out = norm(z). z may be y itself. */
    enum status (*residual_norm_forward)(struct stream *s, struct tensor out, struct tensor z,
                                         struct tensor stats, struct tensor x, struct tensor y,
                                         struct tensor gamma, struct tensor beta,
                                         const struct sequences *q, float eps, struct dropout drop);
    /* dx = gradient of z (goes to x); dy = dropout mask times it; dbias (C) = column sums of dy,
     * for the linear layer that made y. dx may be dout; dy may not be dx unless drop.p is 0. */
    enum status (*residual_norm_backward)(struct stream *s, struct tensor dx, struct tensor dy,
                                          struct tensor dgamma, struct tensor dbeta,
                                          struct tensor dbias, struct tensor dout, struct tensor z,
                                          struct tensor stats, struct tensor gamma,
                                          const struct sequences *q, struct dropout drop, bool add);

    /* y (T, N) = x (T, K) w (N, K)^T + bias (N); bias.data may be NULL. */
    enum status (*linear_forward)(struct stream *s, struct tensor y, struct tensor x,
                                  struct tensor w, struct tensor bias);
    /* dx (T, K) = (add ? dx : 0) + dy (T, N) w (N, K) */
    enum status (*linear_backward_data)(struct stream *s, struct tensor dx, struct tensor dy,
                                        struct tensor w, bool add);
    /* dw (N, K) = (add ? dw : 0) + dy^T x; the bias's gradient comes with dy, from what makes it */
    enum status (*linear_backward_weight)(struct stream *s, struct tensor dw, struct tensor dy,
                                          struct tensor x, bool add);

    /* out = pre * Phi(pre), Phi by erf. */
    enum status (*gelu_forward)(struct stream *s, struct tensor out, struct tensor pre);
    /* dpre (T, F) = dout * gelu'(pre), act = gelu(pre), dbias (F) = (add ? dbias : 0) + column sums
     * of dpre. dpre may be dout, act may be pre; act.data NULL: not wanted. */
    enum status (*gelu_backward)(struct stream *s, struct tensor dpre, struct tensor act,
                                 struct tensor dbias, struct tensor dout, struct tensor pre,
                                 bool add);

    /* qkv (T, 3C): query, key, value of a row side by side, heads side by side in each. out (T, C)
     * = dropout(softmax(q k^T / sqrt(D))) v per sequence and head; lse (H, T) fp32, log-sum-exp. */
    enum status (*attention_forward)(struct stream *s, struct tensor out, struct tensor lse,
                                     struct tensor qkv, const struct sequences *q, int heads,
                                     struct dropout drop);
    /* dqkv (T, 3C), dbias (3C) = (add ? dbias : 0) + column sums of dqkv */
    enum status (*attention_backward)(struct stream *s, struct tensor dqkv, struct tensor dbias,
                                      struct tensor dout, struct tensor out, struct tensor lse,
                                      struct tensor qkv, const struct sequences *q, int heads,
                                      struct dropout drop, bool add);

    /* out (T, C) = dropout(x); forward, and backward on gradients. out may be x. */
    enum status (*dropout_apply)(struct stream *s, struct tensor out, struct tensor x,
                                 const struct sequences *q, struct dropout drop);

    /* logits (T, 2) fp32 = x w^T + bias, w (2, C), bias (2). */
    enum status (*span_logits_forward)(struct stream *s, struct tensor logits, struct tensor x,
                                       struct tensor w, struct tensor bias,
                                       const struct sequences *q);
    /* dx (T, C), dw (2, C), dbias (2) */
    enum status (*span_logits_backward)(struct stream *s, struct tensor dx, struct tensor dw,
                                        struct tensor dbias, struct tensor dlogits, struct tensor x,
                                        struct tensor w, const struct sequences *q, bool add);
    /* Per sequence: mean of the two cross-entropies (start, end) over its rows. Adds the sum over
     * sequences, in their order, and their count to @report; empty sequences do not count.
     * dlogits (T, 2) = inv_count / 2 * (softmax - one-hot), zero on other rows; data NULL:
     * evaluation. */
    enum status (*span_loss)(struct stream *s, struct tensor dlogits, struct step_report *report,
                             struct tensor logits, const struct sequences *q,
                             const struct step_state *state);

    /* The sums over rows of all backward ops that were issued on the stream since the last call: on
     * CUDA their parts wait in its workspace, so that one kernel finishes those of a unit. */
    enum status (*finish_sums)(struct stream *s);

    /* The linear layers that follow, up to the next call, are those of one pass, of @product_flops
     * operations together (0: not known). Bit k of @beside: collectives run beside the k-th of
     * PASS_PARTS equal parts of them. The host's next calls; nothing is enqueued. */
    enum status (*pass_begin)(struct stream *s, double product_flops, uint16_t beside);

    /* @side: a stream for ops that may run beside those that @s gets next; they find all that was
     * issued on @s before. finish_sums of @side finishes the sums of @s too, behind all that was
     * issued there. It is @s itself where there is no other. side_end: what comes next on @s finds
     * what they did. */
    enum status (*side_begin)(struct stream **side, struct stream *s);
    enum status (*side_end)(struct stream *s);

    /* out = (add ? out : 0) + in, fp32 (n) */
    enum status (*accumulate)(struct stream *s, struct tensor out, struct tensor in, bool add);
    /* out bf16 or fp32 = in fp32, round to nearest even */
    enum status (*cast)(struct stream *s, struct tensor out, struct tensor in);
    /* param bf16 (n), low uint16 (n; data NULL: not kept) = the halves of master fp32 (n). */
    enum status (*master_split)(struct stream *s, struct tensor param, struct tensor low,
                                struct tensor master);
    /* report->squared_norm += sum of g^2 over n >= 0 elements, report->finite &= all finite. */
    enum status (*squared_norm)(struct stream *s, struct step_report *report, struct tensor g);
    /* The same of g (rows, C), what embedding_backward made with @q: its other rows are zeros, and
     * are not read. The order of the sum is another. */
    enum status (*squared_norm_rows)(struct stream *s, struct step_report *report, struct tensor g,
                                     const struct sequences *q, int64_t first_row);

    /* Take the host's part of @state and the batch from @mail (NULL: they are there), empty the
     * report and put that part in it. */
    enum status (*step_begin)(struct stream *s, struct step_report *report,
                              struct step_state *state, const struct step_mail *mail);
    /* Sum @world_size reports in rank order into the second part of @state, and leave a copy of it
     * in @mail (NULL: nobody asks). */
    enum status (*agree)(struct stream *s, struct step_state *state,
                         const struct step_report *reports, int world_size,
                         const struct optim_hyper *hyper, const struct step_mail *mail);
    /* One shard: param (n), m, v (n) fp32; grad (n) fp32, scaled by state->clip; nothing is written
     * when state->skip. The master weights are param of fp32, then low has no data, or param of
     * bf16 with their lower halves, low (n) uint16.
     * @row_numel: of a table whose rows may be marked; 0: none is. */
    enum status (*adamw)(struct stream *s, struct tensor param, struct tensor low, struct tensor m,
                         struct tensor v, struct tensor grad, const struct adam_range *ranges,
                         int range_count, int64_t row_numel, const struct step_state *state,
                         const struct optim_hyper *hyper);
};

extern const struct ops ops_cpu;
extern const struct ops ops_cuda; /* CUDA builds only */

/* The fronts: one a table entry, same arguments. */
size_t op_workspace_bytes(const struct device *device, const struct op_limits *limits);
size_t op_side_workspace_bytes(const struct device *device, const struct op_limits *limits);
MUST_CHECK enum status op_embedding_forward(struct stream *s, struct tensor out,
                                            struct tensor table, struct token_rows q, int64_t first,
                                            bool set);
MUST_CHECK enum status op_embedding_backward(struct stream *s, struct tensor dtable,
                                             struct tensor dout, struct token_rows q, int64_t first,
                                             enum table_rows others);
MUST_CHECK enum status op_embedding_norm_forward(struct stream *s, struct tensor out,
                                                 struct tensor z, struct tensor stats,
                                                 struct tensor x, struct tensor position,
                                                 struct tensor type, struct tensor gamma,
                                                 struct tensor beta, const struct sequences *q,
                                                 float eps, struct dropout drop);
MUST_CHECK enum status op_embedding_norm_backward(struct stream *s, struct tensor dx,
                                                  struct tensor dposition,
                                                  struct tensor dtype_table, struct tensor dgamma,
                                                  struct tensor dbeta, struct tensor dout,
                                                  struct tensor z, struct tensor stats,
                                                  struct tensor gamma, const struct sequences *q,
                                                  struct dropout drop, bool add);
MUST_CHECK enum status
op_residual_norm_forward(struct stream *s, struct tensor out, struct tensor z, struct tensor stats,
                         struct tensor x, struct tensor y, struct tensor gamma, struct tensor beta,
                         const struct sequences *q, float eps, struct dropout drop);
MUST_CHECK enum status op_residual_norm_backward(
    struct stream *s, struct tensor dx, struct tensor dy, struct tensor dgamma, struct tensor dbeta,
    struct tensor dbias, struct tensor dout, struct tensor z, struct tensor stats,
    struct tensor gamma, const struct sequences *q, struct dropout drop, bool add);
MUST_CHECK enum status op_linear_forward(struct stream *s, struct tensor y, struct tensor x,
                                         struct tensor w, struct tensor bias);
MUST_CHECK enum status op_linear_backward_data(struct stream *s, struct tensor dx, struct tensor dy,
                                               struct tensor w, bool add);
MUST_CHECK enum status op_linear_backward_weight(struct stream *s, struct tensor dw,
                                                 struct tensor dy, struct tensor x, bool add);
MUST_CHECK enum status op_gelu_forward(struct stream *s, struct tensor out, struct tensor pre);
MUST_CHECK enum status op_gelu_backward(struct stream *s, struct tensor dpre, struct tensor act,
                                        struct tensor dbias, struct tensor dout, struct tensor pre,
                                        bool add);
MUST_CHECK enum status op_attention_forward(struct stream *s, struct tensor out, struct tensor lse,
                                            struct tensor qkv, const struct sequences *q, int heads,
                                            struct dropout drop);
MUST_CHECK enum status op_attention_backward(struct stream *s, struct tensor dqkv,
                                             struct tensor dbias, struct tensor dout,
                                             struct tensor out, struct tensor lse,
                                             struct tensor qkv, const struct sequences *q,
                                             int heads, struct dropout drop, bool add);
MUST_CHECK enum status op_dropout_apply(struct stream *s, struct tensor out, struct tensor x,
                                        const struct sequences *q, struct dropout drop);
MUST_CHECK enum status op_span_logits_forward(struct stream *s, struct tensor logits,
                                              struct tensor x, struct tensor w, struct tensor bias,
                                              const struct sequences *q);
MUST_CHECK enum status op_span_logits_backward(struct stream *s, struct tensor dx, struct tensor dw,
                                               struct tensor dbias, struct tensor dlogits,
                                               struct tensor x, struct tensor w,
                                               const struct sequences *q, bool add);
MUST_CHECK enum status op_span_loss(struct stream *s, struct tensor dlogits,
                                    struct step_report *report, struct tensor logits,
                                    const struct sequences *q, const struct step_state *state);
MUST_CHECK enum status op_pass_begin(struct stream *s, double product_flops, uint16_t beside);
MUST_CHECK enum status op_finish_sums(struct stream *s);
MUST_CHECK enum status op_side_begin(struct stream **side, struct stream *s);
MUST_CHECK enum status op_side_end(struct stream *s);
MUST_CHECK enum status op_accumulate(struct stream *s, struct tensor out, struct tensor in,
                                     bool add);
MUST_CHECK enum status op_cast(struct stream *s, struct tensor out, struct tensor in);
MUST_CHECK enum status op_master_split(struct stream *s, struct tensor param, struct tensor low,
                                       struct tensor master);
MUST_CHECK enum status op_squared_norm(struct stream *s, struct step_report *report,
                                       struct tensor g);
MUST_CHECK enum status op_squared_norm_rows(struct stream *s, struct step_report *report,
                                            struct tensor g, const struct sequences *q,
                                            int64_t first_row);
MUST_CHECK enum status op_step_begin(struct stream *s, struct step_report *report,
                                     struct step_state *state, const struct step_mail *mail);
MUST_CHECK enum status op_agree(struct stream *s, struct step_state *state,
                                const struct step_report *reports, int world_size,
                                const struct optim_hyper *hyper, const struct step_mail *mail);
MUST_CHECK enum status op_adamw(struct stream *s, struct tensor param, struct tensor low,
                                struct tensor m, struct tensor v, struct tensor grad,
                                const struct adam_range *ranges, int range_count, int64_t row_numel,
                                const struct step_state *state, const struct optim_hyper *hyper);

C_END

#endif
