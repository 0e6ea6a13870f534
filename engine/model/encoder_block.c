#include "engine/model/encoder.h"

/* Parameters of a block, decayed first: in the order in which encoder_block() lists them. */
enum {
    QKV_W,
    PROJ_W,
    FC1_W,
    FC2_W,
    QKV_B,
    PROJ_B,
    LN1_GAMMA,
    LN1_BETA,
    FC1_B,
    FC2_B,
    LN2_GAMMA,
    LN2_BETA
};

typedef unsigned char byte; /* of param_dtype */

/* Kept for BACKWARD: 7 C + F elements and (H + 4) floats a row. A model that keeps all has F more,
 * and a bit for each head, row and key. */
struct block_saved {
    byte *qkv;              /* (T, 3C) */
    byte *attn;             /* (T, C) */
    byte *z1;               /* (T, C) first the projection, then its sum with x, in place */
    byte *ln1;              /* (T, C) */
    byte *pre;              /* (T, F); in BACKWARD it becomes gelu(pre), unless that is kept */
    byte *gelu;             /* (T, F) gelu(pre); NULL: not kept */
    uint8_t *masks;         /* of attention's dropout (ops.h); NULL: not kept */
    byte *z2;               /* (T, C) first the feed-forward output, then its sum with ln1; in
                             * BACKWARD it becomes the gradient of the projection */
    float *lse;             /* (H, T) */
    float *stats1, *stats2; /* (2, T) */
};

/* In RECOMPUTE nobody reads the block's output; it follows act in one place. A model that keeps act
 * has no RECOMPUTE. */
struct block_forward_scratch {
    byte *act; /* (T, F), at least (T, C) */
};

/* Two phases share one place: the feed-forward needs dpre, attention needs dattn and dqkv. */
struct block_backward_scratch {
    byte *dff;   /* (T, C) gradient of the feed-forward output */
    byte *dpre;  /* (T, F) gradient of gelu(pre), then of pre */
    byte *dattn; /* (T, C) in dpre's place */
    byte *dqkv;  /* (T, 3C) behind dattn */
};

static void bind_rows(struct arena *a, byte **p, const struct model *m, int64_t T, int64_t columns)
{
    ARENA_BIND(a, *p, (size_t)(T * columns) * dtype_bytes(m->param_dtype));
}

static void saved_bind(struct arena *a, struct block_saved *s, const struct model *m,
                       struct micro_dims d)
{
    int64_t T = d.rows, C = m->dims.hidden, H = m->dims.heads;
    bind_rows(a, &s->qkv, m, T, 3 * C);
    bind_rows(a, &s->attn, m, T, C);
    bind_rows(a, &s->z1, m, T, C);
    bind_rows(a, &s->ln1, m, T, C);
    bind_rows(a, &s->pre, m, T, m->dims.ffn);
    s->gelu = NULL;
    if (m->keep_all)
        bind_rows(a, &s->gelu, m, T, m->dims.ffn);
    bind_rows(a, &s->z2, m, T, C);
    ARENA_BIND(a, s->lse, H * T);
    ARENA_BIND(a, s->stats1, 2 * T);
    ARENA_BIND(a, s->stats2, 2 * T);
    size_t mask_bytes =
        op_attention_mask_bytes(m->param_dtype, C / H, H, T, d.sequences, d.max_length);
    s->masks = NULL;
    if (m->keep_all && m->dims.attention_dropout > 0.0f && mask_bytes > 0)
        ARENA_BIND(a, s->masks, mask_bytes);
}

static void forward_scratch_bind(struct arena *a, struct block_forward_scratch *s,
                                 const struct model *m, int64_t T)
{
    int64_t F = m->dims.ffn, C = m->dims.hidden;
    s->act = NULL;
    if (!m->keep_all)
        bind_rows(a, &s->act, m, T, F > C ? F : C);
}

static void backward_scratch_bind(struct arena *a, struct block_backward_scratch *s,
                                  const struct model *m, int64_t T)
{
    bind_rows(a, &s->dff, m, T, m->dims.hidden);
    struct arena attention = *a;
    bind_rows(a, &s->dpre, m, T, m->dims.ffn);
    bind_rows(&attention, &s->dattn, m, T, m->dims.hidden);
    bind_rows(&attention, &s->dqkv, m, T, 3 * m->dims.hidden);
    if (attention.used > a->used)
        *a = attention;
}

static size_t saved_bytes(const struct model *m, const struct model_unit *u, struct micro_dims d)
{
    struct arena a = {0};
    struct block_saved s;
    (void)u;
    saved_bind(&a, &s, m, d);
    return a.used;
}

static size_t forward_scratch_bytes(const struct model *m, const struct model_unit *u,
                                    struct micro_dims d)
{
    struct arena a = {0};
    struct block_forward_scratch s;
    (void)u;
    forward_scratch_bind(&a, &s, m, d.rows);
    return a.used;
}

static size_t backward_scratch_bytes(const struct model *m, const struct model_unit *u,
                                     struct micro_dims d)
{
    struct arena a = {0};
    struct block_backward_scratch s;
    (void)u;
    backward_scratch_bind(&a, &s, m, d.rows);
    return a.used;
}

/* One call of a block: what all its parts need. */
struct block {
    const struct model *m;
    const struct model_unit *u;
    const struct unit_call *call;
    struct stream *stream;
    struct tensor x, qkv, attn, z1, ln1, pre, gelu, z2, lse, stats1, stats2;
    uint8_t *masks;
};

static struct tensor act(const struct block *k, void *data, int64_t columns)
{
    return unit_act(k->m, k->call, data, columns);
}

static struct tensor param(const struct block *k, int i)
{
    return unit_param(k->m, k->u, k->call, i);
}

static struct tensor grad(const struct block *k, int i)
{
    return unit_grad(k->m, k->u, k->call, i);
}

static struct dropout dropout(const struct block *k, enum dropout_site site)
{
    struct dropout d = {.p = k->m->dims.hidden_dropout,
                        .layer_site = encoder_layer_site(1 + k->u->index, site),
                        .state = k->call->state};
    if (site == SITE_ATTENTION) {
        d.p = k->m->dims.attention_dropout;
        d.masks = k->masks;
    }
    if (site == SITE_ATTENTION_OUTPUT)
        d.p = k->m->dims.projection_dropout;
    return d;
}

static struct block block_open(const struct model *m, const struct model_unit *u,
                               const struct unit_call *call)
{
    const struct sequences *q = call->sequences;
    int64_t T = q->rows, C = m->dims.hidden;
    struct block k = {.m = m, .u = u, .call = call, .stream = call->stream};
    struct block_saved s;
    struct arena a = arena_over(call->saved, SIZE_MAX);
    saved_bind(&a, &s, m, (struct micro_dims){T, q->count, q->max_length});
    k.x = act(&k, call->act_in, C);
    k.qkv = act(&k, s.qkv, 3 * C);
    k.attn = act(&k, s.attn, C);
    k.z1 = act(&k, s.z1, C);
    k.ln1 = act(&k, s.ln1, C);
    k.pre = act(&k, s.pre, m->dims.ffn);
    k.gelu = act(&k, s.gelu, m->dims.ffn);
    k.z2 = act(&k, s.z2, C);
    k.lse = tensor_2d(s.lse, DTYPE_F32, m->dims.heads, T);
    k.stats1 = tensor_2d(s.stats1, DTYPE_F32, 2, T);
    k.stats2 = tensor_2d(s.stats2, DTYPE_F32, 2, T);
    k.masks = s.masks;
    return k;
}

static enum status forward(const struct model *m, const struct model_unit *u,
                           const struct unit_call *call)
{
    struct block k = block_open(m, u, call);
    struct block_forward_scratch scratch;
    struct arena a = arena_over(call->scratch, SIZE_MAX);
    forward_scratch_bind(&a, &scratch, m, call->sequences->rows);
    struct tensor gelu = m->keep_all ? k.gelu : act(&k, scratch.act, m->dims.ffn);
    /* gelu is read before out is written, so that in RECOMPUTE they share the scratch. */
    struct tensor out =
        act(&k, call->act_out != NULL ? call->act_out : scratch.act, m->dims.hidden);

    TRY(op_linear_forward(k.stream, k.qkv, k.x, param(&k, QKV_W), param(&k, QKV_B)));
    TRY(op_attention_forward(k.stream, k.attn, k.lse, k.qkv, call->sequences, (int)m->dims.heads,
                             dropout(&k, SITE_ATTENTION)));
    TRY(op_linear_forward(k.stream, k.z1, k.attn, param(&k, PROJ_W), param(&k, PROJ_B)));
    TRY(op_residual_norm_forward(k.stream, k.ln1, k.z1, k.stats1, k.x, k.z1, param(&k, LN1_GAMMA),
                                 param(&k, LN1_BETA), call->sequences, m->dims.norm_eps,
                                 dropout(&k, SITE_ATTENTION_OUTPUT)));
    TRY(op_linear_forward(k.stream, k.pre, k.ln1, param(&k, FC1_W), param(&k, FC1_B)));
    TRY(op_gelu_forward(k.stream, gelu, k.pre));
    TRY(op_linear_forward(k.stream, k.z2, gelu, param(&k, FC2_W), param(&k, FC2_B)));
    TRY(op_residual_norm_forward(k.stream, out, k.z2, k.stats2, k.ln1, k.z2, param(&k, LN2_GAMMA),
                                 param(&k, LN2_BETA), call->sequences, m->dims.norm_eps,
                                 dropout(&k, SITE_FFN_OUTPUT)));
    return ST_OK;
}

/* gelu(pre) in BACKWARD, once its gradient has been made. */
static struct tensor gelu_of(const struct block *k)
{
    return k->m->keep_all ? k->gelu : k->pre;
}

/* From the gradient of out to that of ln1, in @dx. The weight gradient of the second product is
 * left to attention_backward(). */
static enum status ffn_backward(const struct block *k, struct tensor dx, struct tensor dout,
                                struct tensor dff, struct tensor dpre)
{
    bool add = k->call->grads_add;
    const struct tensor none = {0};
    TRY(op_residual_norm_backward(k->stream, dx, dff, grad(k, LN2_GAMMA), grad(k, LN2_BETA),
                                  grad(k, FC2_B), dout, k->z2, k->stats2, param(k, LN2_GAMMA),
                                  k->call->sequences, dropout(k, SITE_FFN_OUTPUT), add));
    TRY(op_linear_backward_data(k->stream, dpre, dff, param(k, FC2_W), false));
    TRY(op_gelu_backward(k->stream, dpre, k->m->keep_all ? none : gelu_of(k), grad(k, FC1_B), dpre,
                         k->pre, add));
    TRY(op_linear_backward_weight(k->stream, grad(k, FC1_W), dpre, k->ln1, add));
    return op_linear_backward_data(k->stream, dx, dpre, param(k, FC1_W), true);
}

/* From the gradient of ln1 to that of x, both in @dx. */
static enum status attention_backward(const struct block *k, struct tensor dx, struct tensor dproj,
                                      struct tensor dattn, struct tensor dqkv, struct tensor dff)
{
    bool add = k->call->grads_add;
    TRY(op_residual_norm_backward(k->stream, dx, dproj, grad(k, LN1_GAMMA), grad(k, LN1_BETA),
                                  grad(k, PROJ_B), dx, k->z1, k->stats1, param(k, LN1_GAMMA),
                                  k->call->sequences, dropout(k, SITE_ATTENTION_OUTPUT), add));
    TRY(op_linear_backward_data(k->stream, dattn, dproj, param(k, PROJ_W), false));
    /* Attention leaves multiprocessors idle, while its longest sequences go on or because it has
     * few blocks; it takes its own first. Two products that nobody waits for take the others. */
    struct stream *side = NULL;
    TRY(op_side_begin(&side, k->stream));
    TRY(op_finish_sums(side));
    TRY(op_attention_backward(k->stream, dqkv, grad(k, QKV_B), dattn, k->attn, k->lse, k->qkv,
                              k->call->sequences, (int)k->m->dims.heads, dropout(k, SITE_ATTENTION),
                              add));
    TRY(op_linear_backward_weight(side, grad(k, FC2_W), dff, gelu_of(k), add));
    TRY(op_linear_backward_weight(side, grad(k, PROJ_W), dproj, k->attn, add));
    TRY(op_finish_sums(side)); /* that of qkv's bias */
    TRY(op_linear_backward_weight(k->stream, grad(k, QKV_W), dqkv, k->x, add));
    TRY(op_linear_backward_data(k->stream, dx, dqkv, param(k, QKV_W), true));
    return op_side_end(k->stream);
}

static enum status backward(const struct model *m, const struct model_unit *u,
                            const struct unit_call *call)
{
    int64_t C = m->dims.hidden;
    struct block k = block_open(m, u, call);
    struct block_backward_scratch s;
    struct arena a = arena_over(call->scratch, SIZE_MAX);
    backward_scratch_bind(&a, &s, m, call->sequences->rows);
    struct tensor dx = act(&k, call->dact_in, C), dff = act(&k, s.dff, C);
    TRY(unit_grads_begin(m, u, call));
    TRY(ffn_backward(&k, dx, act(&k, call->dact_out, C), dff, act(&k, s.dpre, m->dims.ffn)));
    return attention_backward(&k, dx, k.z2, act(&k, s.dattn, C), act(&k, s.dqkv, 3 * C), dff);
}

/* Products: 2 for each weight and row; attention: 4 C for each pair of rows that see each other.
 * Backward is twice that: each product has two gradients. What a call of attention leaves idle, two
 * of these take there, so its calls cost nothing. Bytes: forward two norms (branch and residual in,
 * sum and norm out) and the GELU; backward two norms (sum and gradient in, two gradients out) and
 * the GELU's (gradient and input in, gradient and, if it is not kept, gelu out).
 * Kernels on a GPU: four products, attention, GELU, two norms; backward twice as many products, and
 * two that finish sums over rows. */
static struct unit_work work(const struct model *m, const struct model_unit *u,
                             struct batch_size size)
{
    double C = (double)m->dims.hidden, F = (double)m->dims.ffn;
    double element = (double)dtype_bytes(m->param_dtype) * size.tokens;
    double products = 2.0 * (4.0 * C * C + 2.0 * C * F) * size.tokens;
    double attention = 4.0 * C * size.squared_lengths, gelu = m->keep_all ? 3 : 4;
    (void)u;
    return (struct unit_work){
        .forward = {products, attention, (2 * 4 * C + 2 * F) * element, 1, 8},
        .backward = {2 * products, 2 * attention, (2 * 4 * C + gelu * F) * element, 0, 14}};
}

static void whole(struct model_builder *b, const struct encoder_family *f, int index,
                  const char *layer, const char *kind, int64_t rows, int64_t columns,
                  enum param_init init)
{
    char name[PARAM_NAME_BYTES];
    builder_name(name, "%s.%d.%s", f->block, index, layer);
    encoder_whole(b, name, kind, rows, columns, init);
}

/* Query, key and value of one kind as one parameter. */
static void fused(struct model_builder *b, const struct encoder_family *f, int index,
                  const char *kind, int64_t columns, enum param_init init)
{
    const char *const part[] = {f->query, f->key, f->value};
    int64_t C = b->model->dims.hidden;
    char name[PARAM_NAME_BYTES];
    builder_name(name, "%s.%d.%s.%s", f->block, index, f->qkv, kind);
    builder_param(b, name, 3 * C, columns, columns > 0);
    for (int i = 0; i < 3; i++) {
        builder_name(name, "%s.%d.%s.%s", f->block, index, part[i], kind);
        int tensor = builder_tensor(b, name, C, columns, init);
        builder_piece(b, tensor, 0, C * (columns > 0 ? columns : 1));
    }
}

void encoder_block(struct model_builder *b, const struct encoder_family *f, int index, int act_in,
                   int act_out)
{
    int64_t C = b->model->dims.hidden, F = b->model->dims.ffn;
    builder_unit(b, "block",
                 (struct model_unit){.act_in = act_in,
                                     .act_out = act_out,
                                     .tied = -1,
                                     .backward_reads_params = true,
                                     .backward_reads_input = true,
                                     .recompute = true,
                                     .index = index,
                                     .saved_bytes = saved_bytes,
                                     .forward_scratch_bytes = forward_scratch_bytes,
                                     .backward_scratch_bytes = backward_scratch_bytes,
                                     .work = work,
                                     .forward = forward,
                                     .backward = backward});
    fused(b, f, index, "weight", C, INIT_NORMAL);
    whole(b, f, index, f->projection, "weight", C, C, INIT_NORMAL);
    whole(b, f, index, f->fc1, "weight", F, C, INIT_NORMAL);
    whole(b, f, index, f->fc2, "weight", C, F, INIT_NORMAL);
    fused(b, f, index, "bias", 0, INIT_ZERO);
    whole(b, f, index, f->projection, "bias", C, 0, INIT_ZERO);
    whole(b, f, index, f->norm1, "weight", C, 0, INIT_ONE);
    whole(b, f, index, f->norm1, "bias", C, 0, INIT_ZERO);
    whole(b, f, index, f->fc1, "bias", F, 0, INIT_ZERO);
    whole(b, f, index, f->fc2, "bias", C, 0, INIT_ZERO);
    whole(b, f, index, f->norm2, "weight", C, 0, INIT_ONE);
    whole(b, f, index, f->norm2, "bias", C, 0, INIT_ZERO);
}
