#include "engine/model/encoder.h"

static size_t no_bytes(const struct model *m, const struct model_unit *u, struct micro_dims d)
{
    (void)m, (void)u, (void)d;
    return 0;
}

void encoder_whole(struct model_builder *b, const char *layer, const char *kind, int64_t rows,
                   int64_t columns, enum param_init init)
{
    char name[PARAM_NAME_BYTES];
    builder_name(name, "%s.%s", layer, kind);
    builder_whole(b, name, rows, columns, init, columns > 0);
}

/* Bytes of @columns elements for each token. */
static double token_bytes(const struct model *m, struct batch_size size, int64_t columns)
{
    return size.tokens * (double)(columns * (int64_t)dtype_bytes(m->param_dtype));
}

/* Of the whole flat gradient, which BACKWARD writes. */
static double grad_bytes(const struct model *m, const struct model_unit *u)
{
    return (double)(model_unit_numel(m, (int)(u - m->units)) * (int64_t)sizeof(float));
}

/* ---- word table ------------------------------------------------------------------------------ */

static int64_t word_first_row(const struct model *m, const struct model_unit *u)
{
    return model_first_row(m, (int)(u - m->units));
}

/* What a call is about: whose rows, and elements of the whole table. */
struct word_part {
    struct token_rows rows;
    struct tensor act; /* act_out or dact_out of these rows */
    int64_t first, numel;
};

static struct word_part word_part(const struct model *m, const struct model_unit *u,
                                  const struct unit_call *call, void *own_act)
{
    int64_t C = m->dims.hidden, numel = model_param_numel(&m->params[u->first_param]);
    int64_t begin = word_first_row(m, u) * C, end = call->part_first + call->part_numel;
    if (call->all_rows == NULL)
        return (struct word_part){sequences_rows(call->sequences), unit_act(m, call, own_act, C),
                                  begin, numel};
    struct token_rows all = call->sequences->all;
    numel = (end < numel ? end : numel) - call->part_first;
    return (struct word_part){all, tensor_2d(call->all_rows, m->param_dtype, all.rows, C),
                              begin + call->part_first,
                              numel > 0 ? numel : 0}; /* 0: nothing but padding */
}

static enum status word_forward(const struct model *m, const struct model_unit *u,
                                const struct unit_call *call)
{
    struct word_part part = word_part(m, u, call, call->act_out);
    struct tensor table = tensor_1d((void *)(uintptr_t)call->params, m->param_dtype, part.numel);
    return op_embedding_forward(call->stream, part.act, table, part.rows, part.first,
                                u->index == 0);
}

static enum status word_backward(const struct model *m, const struct model_unit *u,
                                 const struct unit_call *call)
{
    struct word_part part = word_part(m, u, call, call->dact_out);
    enum table_rows others = call->grads_mark ? ROWS_MARKED : ROWS_ZERO;
    if (call->grads == NULL || part.numel == 0)
        return ST_OK;
    return op_embedding_backward(call->stream, tensor_1d(call->grads, DTYPE_F32, part.numel),
                                 part.act, part.rows, part.first,
                                 call->grads_add ? ROWS_KEPT : others);
}

static struct unit_work word_work(const struct model *m, const struct model_unit *u,
                                  struct batch_size size)
{
    double rows = token_bytes(m, size, m->dims.hidden);
    return (struct unit_work){.forward = {.bytes = 2 * rows, .kernels = 1},
                              .backward = {.bytes = 2 * rows + grad_bytes(m, u), .kernels = 2}};
}

static void word_units(struct model_builder *b, const struct encoder_family *f,
                       int64_t max_unit_numel, int slot)
{
    struct model *m = b->model;
    char name[PARAM_NAME_BYTES], part_name[PARAM_NAME_BYTES];
    builder_name(name, "%s.weight", f->word);
    int64_t columns = m->dims.hidden, rows_left = m->dims.vocab;
    int64_t rows_a_part = max_unit_numel < columns ? 1 : max_unit_numel / columns;
    int table = builder_tensor(b, name, m->dims.vocab, columns, INIT_NORMAL);
    if (b->status == ST_OK)
        m->tensors[table].init_zeros = columns;
    for (int part = 0; rows_left > 0 && b->status == ST_OK; part++) {
        int64_t rows = rows_left < rows_a_part ? rows_left : rows_a_part;
        builder_unit(b, "word_table",
                     (struct model_unit){.act_in = part == 0 ? -1 : slot,
                                         .act_out = slot,
                                         .tied = -1,
                                         .index = part,
                                         .look_up = true,
                                         .saved_bytes = no_bytes,
                                         .forward_scratch_bytes = no_bytes,
                                         .backward_scratch_bytes = no_bytes,
                                         .work = word_work,
                                         .forward = word_forward,
                                         .backward = word_backward});
        if (rows == m->dims.vocab)
            builder_name(part_name, "%s", name);
        else
            builder_name(part_name, "%s.%d", name, part);
        builder_param(b, part_name, rows, columns, true);
        builder_piece(b, table, (m->dims.vocab - rows_left) * columns, rows * columns);
        rows_left -= rows;
    }
}

/* ---- embedding norm -------------------------------------------------------------------------- */

enum norm_param { NORM_POSITION, NORM_TYPE, NORM_GAMMA, NORM_BETA };

/* unit_param() or unit_grad(); a tensor without data for the type table of a family without. */
static struct tensor norm_view(struct tensor (*view)(const struct model *m,
                                                     const struct model_unit *u,
                                                     const struct unit_call *call, int i),
                               const struct model *m, const struct model_unit *u,
                               const struct unit_call *call, enum norm_param which)
{
    bool has_types = m->dims.types > 0;
    if (!has_types && which == NORM_TYPE)
        return (struct tensor){0};
    return view(m, u, call, (int)which - (!has_types && which > NORM_TYPE));
}

struct norm_saved {
    unsigned char *z; /* (T, C) */
    float *stats;     /* (2, T) */
};

static void norm_saved_bind(struct arena *a, struct norm_saved *s, const struct model *m, int64_t T)
{
    ARENA_BIND(a, s->z, (size_t)(T * m->dims.hidden) * dtype_bytes(m->param_dtype));
    ARENA_BIND(a, s->stats, 2 * T);
}

static size_t norm_saved_bytes(const struct model *m, const struct model_unit *u,
                               struct micro_dims d)
{
    struct arena a = {0};
    struct norm_saved s;
    (void)u;
    norm_saved_bind(&a, &s, m, d.rows);
    return a.used;
}

static struct dropout embedding_dropout(const struct model *m, const struct unit_call *call)
{
    return (struct dropout){.p = m->dims.hidden_dropout,
                            .layer_site = encoder_layer_site(0, SITE_EMBEDDING),
                            .state = call->state};
}

static enum status norm_forward(const struct model *m, const struct model_unit *u,
                                const struct unit_call *call)
{
    int64_t T = call->sequences->rows, C = m->dims.hidden;
    struct arena a = arena_over(call->saved, SIZE_MAX);
    struct norm_saved s;
    norm_saved_bind(&a, &s, m, T);
    TRY(op_embedding_norm_forward(
        call->stream, unit_act(m, call, call->act_out, C), unit_act(m, call, s.z, C),
        tensor_2d(s.stats, DTYPE_F32, 2, T), unit_act(m, call, call->act_in, C),
        norm_view(unit_param, m, u, call, NORM_POSITION),
        norm_view(unit_param, m, u, call, NORM_TYPE), norm_view(unit_param, m, u, call, NORM_GAMMA),
        norm_view(unit_param, m, u, call, NORM_BETA), call->sequences, m->dims.norm_eps,
        embedding_dropout(m, call)));
    return ST_OK;
}

static enum status norm_backward(const struct model *m, const struct model_unit *u,
                                 const struct unit_call *call)
{
    int64_t T = call->sequences->rows, C = m->dims.hidden;
    struct arena a = arena_over(call->saved, SIZE_MAX);
    struct norm_saved s;
    norm_saved_bind(&a, &s, m, T);
    TRY(unit_grads_begin(m, u, call));
    TRY(op_embedding_norm_backward(
        call->stream, unit_act(m, call, call->dact_in, C),
        norm_view(unit_grad, m, u, call, NORM_POSITION),
        norm_view(unit_grad, m, u, call, NORM_TYPE), norm_view(unit_grad, m, u, call, NORM_GAMMA),
        norm_view(unit_grad, m, u, call, NORM_BETA), unit_act(m, call, call->dact_out, C),
        unit_act(m, call, s.z, C), tensor_2d(s.stats, DTYPE_F32, 2, T),
        norm_view(unit_param, m, u, call, NORM_GAMMA), call->sequences, embedding_dropout(m, call),
        call->grads_add));
    return ST_OK;
}

/* Forward reads three tables' rows and writes z and out; backward reads z and dout, writes dx. */
static struct unit_work norm_work(const struct model *m, const struct model_unit *u,
                                  struct batch_size size)
{
    double rows = token_bytes(m, size, m->dims.hidden);
    return (struct unit_work){.forward = {.bytes = 5 * rows, .kernels = 1},
                              .backward = {.bytes = 3 * rows + grad_bytes(m, u), .kernels = 5}};
}

static void norm_unit(struct model_builder *b, const struct encoder_family *f, int act_in,
                      int act_out)
{
    const struct model *m = b->model;
    builder_unit(b, "embedding_norm",
                 (struct model_unit){.act_in = act_in,
                                     .act_out = act_out,
                                     .tied = -1,
                                     .backward_reads_params = true,
                                     .saved_bytes = norm_saved_bytes,
                                     .forward_scratch_bytes = no_bytes,
                                     .backward_scratch_bytes = no_bytes,
                                     .work = norm_work,
                                     .forward = norm_forward,
                                     .backward = norm_backward});
    encoder_whole(b, f->position, "weight", m->dims.positions, m->dims.hidden, INIT_NORMAL);
    if (f->type != NULL)
        encoder_whole(b, f->type, "weight", m->dims.types, m->dims.hidden, INIT_NORMAL);
    encoder_whole(b, f->norm, "weight", m->dims.hidden, 0, INIT_ONE);
    encoder_whole(b, f->norm, "bias", m->dims.hidden, 0, INIT_ZERO);
}

/* ---- head ------------------------------------------------------------------------------------ */

enum { HEAD_WEIGHT, HEAD_BIAS };

struct head_saved {
    float *dlogits; /* (T, 2) */
};

static void head_saved_bind(struct arena *a, struct head_saved *s, int64_t T)
{
    ARENA_BIND(a, s->dlogits, 2 * T);
}

static size_t head_saved_bytes(const struct model *m, const struct model_unit *u,
                               struct micro_dims d)
{
    struct arena a = {0};
    struct head_saved s;
    (void)m, (void)u;
    head_saved_bind(&a, &s, d.rows);
    return a.used;
}

struct head_scratch {
    unsigned char *x; /* (T, C) behind dropout */
};

static void head_scratch_bind(struct arena *a, struct head_scratch *s, const struct model *m,
                              int64_t T)
{
    ARENA_BIND(a, s->x, (size_t)(T * m->dims.hidden) * dtype_bytes(m->param_dtype));
}

static size_t head_scratch_bytes(const struct model *m, const struct model_unit *u,
                                 struct micro_dims d)
{
    struct arena a = {0};
    struct head_scratch s;
    (void)u;
    if (m->dims.qa_dropout > 0.0f)
        head_scratch_bind(&a, &s, m, d.rows);
    return a.used;
}

static struct dropout head_dropout(const struct model *m, const struct unit_call *call)
{
    return (struct dropout){.p = m->dims.qa_dropout,
                            .layer_site = encoder_layer_site(1 + m->dims.layers, SITE_HEAD),
                            .state = call->state};
}

/* What qa_outputs reads: the last hidden states, or in the scratch these behind dropout. */
static enum status head_input(struct tensor *x, const struct model *m, const struct unit_call *call)
{
    *x = unit_act(m, call, call->act_in, m->dims.hidden);
    if (m->dims.qa_dropout == 0.0f)
        return ST_OK;
    struct arena a = arena_over(call->scratch, SIZE_MAX);
    struct head_scratch s;
    head_scratch_bind(&a, &s, m, call->sequences->rows);
    struct tensor dropped = unit_act(m, call, s.x, m->dims.hidden);
    TRY(op_dropout_apply(call->stream, dropped, *x, call->sequences, head_dropout(m, call)));
    *x = dropped;
    return ST_OK;
}

static enum status head_forward(const struct model *m, const struct model_unit *u,
                                const struct unit_call *call)
{
    int64_t T = call->sequences->rows;
    struct arena a = arena_over(call->saved, SIZE_MAX);
    struct head_saved s = {0};
    struct tensor x, logits = tensor_2d(call->act_out, DTYPE_F32, T, 2);
    if (call->training)
        head_saved_bind(&a, &s, T);
    TRY(head_input(&x, m, call));
    TRY(op_span_logits_forward(call->stream, logits, x, unit_param(m, u, call, HEAD_WEIGHT),
                               unit_param(m, u, call, HEAD_BIAS), call->sequences));
    if (call->report != NULL)
        TRY(op_span_loss(call->stream, tensor_2d(s.dlogits, DTYPE_F32, T, 2), call->report, logits,
                         call->sequences, call->state));
    return ST_OK;
}

static enum status head_backward(const struct model *m, const struct model_unit *u,
                                 const struct unit_call *call)
{
    int64_t T = call->sequences->rows;
    struct arena a = arena_over(call->saved, SIZE_MAX);
    struct head_saved s;
    struct tensor x, dx = unit_act(m, call, call->dact_in, m->dims.hidden);
    head_saved_bind(&a, &s, T);
    TRY(unit_grads_begin(m, u, call));
    TRY(head_input(&x, m, call));
    TRY(op_span_logits_backward(
        call->stream, dx, unit_grad(m, u, call, HEAD_WEIGHT), unit_grad(m, u, call, HEAD_BIAS),
        tensor_2d(s.dlogits, DTYPE_F32, T, 2), x, unit_param(m, u, call, HEAD_WEIGHT),
        call->sequences, call->grads_add));
    if (m->dims.qa_dropout > 0.0f)
        TRY(op_dropout_apply(call->stream, dx, dx, call->sequences, head_dropout(m, call)));
    return ST_OK;
}

static struct unit_work head_work(const struct model *m, const struct model_unit *u,
                                  struct batch_size size)
{
    double rows = token_bytes(m, size, m->dims.hidden);
    double flops = 2.0 * 2.0 * (double)m->dims.hidden * size.tokens;
    (void)u;
    return (struct unit_work){
        .forward = {.product_flops = flops, .bytes = rows, .kernels = 3},
        .backward = {.product_flops = 2 * flops, .bytes = 2 * rows, .kernels = 4}};
}

static void head_unit(struct model_builder *b, int act_in, int act_out)
{
    builder_unit(b, "head",
                 (struct model_unit){.act_in = act_in,
                                     .act_out = act_out,
                                     .tied = -1,
                                     .backward_reads_params = true,
                                     .backward_reads_input = true,
                                     .saved_bytes = head_saved_bytes,
                                     .forward_scratch_bytes = head_scratch_bytes,
                                     .backward_scratch_bytes = head_scratch_bytes,
                                     .work = head_work,
                                     .forward = head_forward,
                                     .backward = head_backward});
    encoder_whole(b, "qa_outputs", "weight", 2, b->model->dims.hidden, INIT_NORMAL);
    encoder_whole(b, "qa_outputs", "bias", 2, 0, INIT_ZERO);
}

/* ---- the model ------------------------------------------------------------------------------- */

void encoder_build(struct model_builder *b, const struct encoder_family *f, int64_t max_unit_numel)
{
    struct model *m = b->model;
    if (f->type == NULL)
        m->dims.types = 0;
    m->dims.projection_dropout = f->projection_dropout ? m->dims.hidden_dropout : 0.0f;
    int words = builder_slot(b, m->dims.hidden, m->param_dtype);
    word_units(b, f, max_unit_numel, words);
    int slot = builder_slot(b, m->dims.hidden, m->param_dtype);
    norm_unit(b, f, words, slot);
    for (int i = 0; i < m->dims.layers && b->status == ST_OK; i++) {
        int next = builder_slot(b, m->dims.hidden, m->param_dtype);
        encoder_block(b, f, i, slot, next);
        slot = next;
    }
    head_unit(b, slot, builder_slot(b, 2, DTYPE_F32));
}
