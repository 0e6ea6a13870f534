/* The table of ops of a profiled step: each entry says what it will compute and move, and calls the
 * real one between two timers. */
#include "engine/train/op_profile.h"

static double bytes_of(struct tensor t)
{
    return t.data != NULL ? (double)tensor_bytes(t) : 0;
}

/* An output that is added to is read too. */
static double added(struct tensor t, bool add)
{
    return bytes_of(t) * (add ? 2 : 1);
}

/* Of a look-up: the rows that are read, a row of the batch each. */
static double looked_up(struct tensor table, int64_t rows)
{
    double whole = bytes_of(table),
           read = (double)rows * (double)table.shape[1] * (double)dtype_bytes(table.dtype);
    return read < whole ? read : whole;
}

/* The same in a part of a table, of whose ranks each has as much of the rows. */
static double found(struct tensor out, struct tensor table, struct token_rows q)
{
    double whole = bytes_of(table), read = bytes_of(out) / q.batches;
    return read < whole ? read : whole;
}

/* Of its gradient: a row for each of @dout, if no two are of one token. */
static double summed(struct tensor dtable, struct tensor dout)
{
    double whole = bytes_of(dtable),
           rows = (double)dout.shape[0] * (double)dout.shape[1] * (double)sizeof(float);
    return rows < whole ? rows : whole;
}

/* Rows of a micro-batch times the rows that each of them attends to, as MFU counts them. */
static double pairs_of(const struct op_profile *p, const struct sequences *q)
{
    return p->squared[q - p->micro];
}

/* (T, K) times (K, N) */
static double product(struct tensor x, int64_t columns)
{
    return 2.0 * (double)x.shape[0] * (double)x.shape[1] * (double)columns;
}

#define TIMED(op, flops, bytes, parameters, arguments)                                             \
    static enum status timed_##op parameters                                                       \
    {                                                                                              \
        struct op_profile *p = (struct op_profile *)(uintptr_t)s->device->compute;                 \
        TRY(op_profile_call(p, s, KIND_##op, (flops), (bytes)));                                   \
        TRY(p->real->op arguments);                                                                \
        return op_profile_called(p, s);                                                            \
    }

TIMED(embedding_forward, 0, (set ? bytes_of(out) : found(out, table, q)) + found(out, table, q),
      (struct stream * s, struct tensor out, struct tensor table, struct token_rows q,
       int64_t first, bool set),
      (s, out, table, q, first, set))

TIMED(embedding_backward, 0,
      bytes_of(dout) + (others == ROWS_ZERO ? bytes_of(dtable) : 2 * summed(dtable, dout)),
      (struct stream * s, struct tensor dtable, struct tensor dout, struct token_rows q,
       int64_t first, enum table_rows others),
      (s, dtable, dout, q, first, others))

TIMED(embedding_norm_forward, 0,
      bytes_of(out) + bytes_of(z) + bytes_of(x) + bytes_of(stats) + looked_up(position, q->rows) +
          bytes_of(type),
      (struct stream * s, struct tensor out, struct tensor z, struct tensor stats, struct tensor x,
       struct tensor position, struct tensor type, struct tensor gamma, struct tensor beta,
       const struct sequences *q, float eps, struct dropout drop),
      (s, out, z, stats, x, position, type, gamma, beta, q, eps, drop))

TIMED(embedding_norm_backward, 0,
      bytes_of(dx) + bytes_of(dout) + bytes_of(z) + bytes_of(stats) + added(dposition, add) +
          added(dtype_table, add),
      (struct stream * s, struct tensor dx, struct tensor dposition, struct tensor dtype_table,
       struct tensor dgamma, struct tensor dbeta, struct tensor dout, struct tensor z,
       struct tensor stats, struct tensor gamma, const struct sequences *q, struct dropout drop,
       bool add),
      (s, dx, dposition, dtype_table, dgamma, dbeta, dout, z, stats, gamma, q, drop, add))

TIMED(residual_norm_forward, 0,
      bytes_of(out) + bytes_of(z) + bytes_of(x) + bytes_of(y) + bytes_of(stats),
      (struct stream * s, struct tensor out, struct tensor z, struct tensor stats, struct tensor x,
       struct tensor y, struct tensor gamma, struct tensor beta, const struct sequences *q,
       float eps, struct dropout drop),
      (s, out, z, stats, x, y, gamma, beta, q, eps, drop))

TIMED(residual_norm_backward, 0,
      bytes_of(dx) + (dy.data != dx.data ? bytes_of(dy) : 0) + bytes_of(dout) + bytes_of(z) +
          bytes_of(stats),
      (struct stream * s, struct tensor dx, struct tensor dy, struct tensor dgamma,
       struct tensor dbeta, struct tensor dbias, struct tensor dout, struct tensor z,
       struct tensor stats, struct tensor gamma, const struct sequences *q, struct dropout drop,
       bool add),
      (s, dx, dy, dgamma, dbeta, dbias, dout, z, stats, gamma, q, drop, add))

TIMED(linear_forward, product(x, w.shape[0]), bytes_of(y) + bytes_of(x) + bytes_of(w),
      (struct stream * s, struct tensor y, struct tensor x, struct tensor w, struct tensor bias),
      (s, y, x, w, bias))

TIMED(linear_backward_data, product(dy, w.shape[1]), added(dx, add) + bytes_of(dy) + bytes_of(w),
      (struct stream * s, struct tensor dx, struct tensor dy, struct tensor w, bool add),
      (s, dx, dy, w, add))

TIMED(linear_backward_weight, dw.data != NULL ? product(x, dy.shape[1]) : 0,
      added(dw, add) + (dw.data != NULL ? bytes_of(dy) + bytes_of(x) : 0),
      (struct stream * s, struct tensor dw, struct tensor dy, struct tensor x, bool add),
      (s, dw, dy, x, add))

TIMED(gelu_forward, 0, bytes_of(out) + bytes_of(pre),
      (struct stream * s, struct tensor out, struct tensor pre), (s, out, pre))

TIMED(gelu_backward, 0, bytes_of(dpre) + bytes_of(act) + bytes_of(dout) + bytes_of(pre),
      (struct stream * s, struct tensor dpre, struct tensor act, struct tensor dbias,
       struct tensor dout, struct tensor pre, bool add),
      (s, dpre, act, dbias, dout, pre, add))

TIMED(attention_forward, 4.0 * (double)out.shape[1] * pairs_of(p, q),
      bytes_of(out) + bytes_of(lse) + bytes_of(qkv),
      (struct stream * s, struct tensor out, struct tensor lse, struct tensor qkv,
       const struct sequences *q, int heads, struct dropout drop),
      (s, out, lse, qkv, q, heads, drop))

TIMED(attention_backward, 8.0 * (double)out.shape[1] * pairs_of(p, q),
      bytes_of(dqkv) + bytes_of(dout) + bytes_of(out) + bytes_of(lse) + bytes_of(qkv),
      (struct stream * s, struct tensor dqkv, struct tensor dbias, struct tensor dout,
       struct tensor out, struct tensor lse, struct tensor qkv, const struct sequences *q,
       int heads, struct dropout drop, bool add),
      (s, dqkv, dbias, dout, out, lse, qkv, q, heads, drop, add))

TIMED(dropout_apply, 0, bytes_of(out) + bytes_of(x),
      (struct stream * s, struct tensor out, struct tensor x, const struct sequences *q,
       struct dropout drop),
      (s, out, x, q, drop))

TIMED(span_logits_forward, product(x, 2), bytes_of(logits) + bytes_of(x),
      (struct stream * s, struct tensor logits, struct tensor x, struct tensor w,
       struct tensor bias, const struct sequences *q),
      (s, logits, x, w, bias, q))

TIMED(span_logits_backward, 2 * product(x, 2), bytes_of(dx) + bytes_of(dlogits) + bytes_of(x),
      (struct stream * s, struct tensor dx, struct tensor dw, struct tensor dbias,
       struct tensor dlogits, struct tensor x, struct tensor w, const struct sequences *q,
       bool add),
      (s, dx, dw, dbias, dlogits, x, w, q, add))

TIMED(span_loss, 0, bytes_of(dlogits) + bytes_of(logits),
      (struct stream * s, struct tensor dlogits, struct step_report *report, struct tensor logits,
       const struct sequences *q, const struct step_state *state),
      (s, dlogits, report, logits, q, state))

TIMED(accumulate, 0, added(out, add) + bytes_of(in),
      (struct stream * s, struct tensor out, struct tensor in, bool add), (s, out, in, add))

TIMED(cast, 0, bytes_of(out) + bytes_of(in),
      (struct stream * s, struct tensor out, struct tensor in), (s, out, in))

TIMED(master_split, 0, bytes_of(param) + bytes_of(low) + bytes_of(master),
      (struct stream * s, struct tensor param, struct tensor low, struct tensor master),
      (s, param, low, master))

TIMED(squared_norm, 0, bytes_of(g),
      (struct stream * s, struct step_report *report, struct tensor g), (s, report, g))

TIMED(squared_norm_rows, 0, (double)q->rows *(double)g.shape[1] * sizeof(float),
      (struct stream * s, struct step_report *report, struct tensor g, const struct sequences *q,
       int64_t first_row),
      (s, report, g, q, first_row))

TIMED(step_begin, 0, sizeof *report,
      (struct stream * s, struct step_report *report, struct step_state *state,
       const struct step_mail *mail),
      (s, report, state, mail))

TIMED(agree, 0, sizeof *reports *(double)world_size,
      (struct stream * s, struct step_state *state, const struct step_report *reports,
       int world_size, const struct optim_hyper *hyper, const struct step_mail *mail),
      (s, state, reports, world_size, hyper, mail))

TIMED(adamw, 0,
      p->updates
          ? 2 * (bytes_of(param) + bytes_of(low) + bytes_of(m) + bytes_of(v)) + bytes_of(grad)
          : 0,
      (struct stream * s, struct tensor param, struct tensor low, struct tensor m, struct tensor v,
       struct tensor grad, const struct adam_range *ranges, int range_count, int64_t row_numel,
       const struct step_state *state, const struct optim_hyper *hyper),
      (s, param, low, m, v, grad, ranges, range_count, row_numel, state, hyper))

void op_profile_bind(struct ops *table, const struct ops *real)
{
    *table = *real; /* the name, the workspace */
#define BIND(op) table->op = timed_##op;
    OP_KINDS(BIND)
#undef BIND
}
