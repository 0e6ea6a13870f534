/*
 * engine/ops/attention.cu - CUDA backend of attention.h: checks, workspace, choice of kernels.
 */
#include "engine/ops/attention_cuda.cuh"

static struct attention_args attention_args(struct tensor qkv, struct tensor out, struct tensor lse,
                                            const struct sequences *q, int heads,
                                            struct dropout drop)
{
    struct attention_args a = {};
    a.qkv = qkv.data;
    a.out = out.data;
    a.lse = (float *)lse.data;
    a.q = *q;
    a.heads = heads;
    a.channels = out.shape[1];
    a.width = (int)(a.channels / heads);
    a.scale = 1.0f / sqrtf((float)a.width);
    a.drop = drop;
    return a;
}

enum status attention_cuda_open(void)
{
    TRY(attention_mma_forward_open());
    return attention_mma_backward_open();
}

/* Can the tensor-core kernels run these tensors? */
static bool attention_mma_fits(const struct attention_args *a, enum dtype dtype)
{
    bool width = a->width == 32 || a->width == 64 || a->width == 128;
    bool groups = a->drop.p == 0.0f || a->q.positions % 8 == 0;
    return dtype == DTYPE_BF16 && width && groups &&
           packs_fit(0, 1, a->qkv, a->out, a->dout, a->dqkv);
}

static enum status attention_check(const struct attention_args *a)
{
    if (a->width > ATTENTION_PLAIN_WIDTH)
        return FAIL(UNSUPPORTED, "attention heads of width %d; at most %d on this device", a->width,
                    (int)ATTENTION_PLAIN_WIDTH);
    return ST_OK;
}

enum status cuda_attention_forward(struct stream *s, struct tensor out, struct tensor lse,
                                   struct tensor qkv, const struct sequences *q, int heads,
                                   struct dropout drop)
{
    struct attention_args a = attention_args(qkv, out, lse, q, heads, drop);
    TRY(attention_check(&a));
    if (q->rows == 0)
        return ST_OK;
    if (attention_mma_fits(&a, qkv.dtype))
        return attention_mma_forward(s, &a);
    return attention_plain_forward(s, &a, qkv.dtype);
}

enum status cuda_attention_backward(struct stream *s, struct tensor dqkv, struct tensor dout,
                                    struct tensor out, struct tensor lse, struct tensor qkv,
                                    const struct sequences *q, int heads, struct dropout drop)
{
    struct attention_args a = attention_args(qkv, out, lse, q, heads, drop);
    void *workspace;
    a.dout = dout.data;
    a.dqkv = dqkv.data;
    TRY(attention_check(&a));
    if (q->rows == 0)
        return ST_OK;
    TRY(stream_scratch(&workspace, s,
                       attention_workspace_bytes_cuda(heads, q->rows, q->max_length)));
    a.delta = (float *)workspace;
    a.stats = (float2 *)workspace;
    a.keep = (uint8_t *)(a.stats + q->rows * heads);
    a.keep_pitch = attention_keep_pitch(q->max_length);
    if (attention_mma_fits(&a, qkv.dtype))
        return attention_mma_backward(s, &a);
    return attention_plain_backward(s, &a, qkv.dtype);
}
