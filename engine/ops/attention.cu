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
    a.keep_pitch = attention_keep_pitch(q->max_length);
    a.part_slots = attention_part_slots(q->rows, q->count);
    return a;
}

enum status cuda_attention_for_hopper(bool *out)
{
    *out = false;
#ifdef TESSERA_SM90A
    int device, major, minor;
    TRY(CUDA(cudaGetDevice(&device)));
    TRY(CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)));
    TRY(CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device)));
    *out = major == 9 && minor == 0;
#endif
    return ST_OK;
}

enum status attention_cuda_open(void)
{
    bool hopper;
    TRY(cuda_attention_for_hopper(&hopper));
    if (hopper) {
        TRY(attention_wgmma_forward_open());
        TRY(attention_wgmma_backward_open());
    }
    TRY(attention_mma_forward_open());
    return attention_mma_backward_open();
}

enum attention_kind { ATTENTION_PLAIN, ATTENTION_MMA, ATTENTION_WGMMA };

/* The kernels that run these tensors. */
static enum status attention_kind(enum attention_kind *out, const struct attention_args *a,
                                  enum dtype dtype)
{
    enum { INFINITE_HALF = 0x7C00 }; /* the largest threshold that compares as a number does */
    bool width = a->width == 32 || a->width == 64 || a->width == 128, hopper;
    bool dropout = a->drop.p == 0.0f ||
                   (a->q.positions % 8 == 0 && dropout_threshold(a->drop.p) <= INFINITE_HALF);
    *out = ATTENTION_PLAIN;
    if (dtype != DTYPE_BF16 || !width || !dropout ||
        !packs_fit(0, 1, a->qkv, a->out, a->dout, a->dqkv))
        return ST_OK;
    TRY(cuda_attention_for_hopper(&hopper));
    *out = hopper && a->width < 128 ? ATTENTION_WGMMA : ATTENTION_MMA;
    return ST_OK;
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
    enum attention_kind kind;
    TRY(attention_check(&a));
    if (q->rows == 0)
        return ST_OK;
    TRY(attention_kind(&kind, &a, qkv.dtype));
    if (kind == ATTENTION_WGMMA)
        return attention_wgmma_forward(s, &a);
    if (kind == ATTENTION_MMA)
        return attention_mma_forward(s, &a);
    return attention_plain_forward(s, &a, qkv.dtype);
}

static enum status attention_backward(struct stream *s, const struct attention_args *a,
                                      enum attention_kind kind, enum dtype dtype)
{
    if (kind == ATTENTION_WGMMA)
        return attention_wgmma_backward(s, a);
    if (kind == ATTENTION_MMA)
        return attention_mma_backward(s, a);
    return attention_plain_backward(s, a, dtype);
}

enum status cuda_attention_backward(struct stream *s, struct tensor dqkv, struct tensor dbias,
                                    struct tensor dout, struct tensor out, struct tensor lse,
                                    struct tensor qkv, const struct sequences *q, int heads,
                                    struct dropout drop, bool add)
{
    struct attention_args a = attention_args(qkv, out, lse, q, heads, drop);
    size_t bytes = attention_workspace_bytes_cuda(heads, q->rows, q->count, q->max_length);
    int64_t columns = dqkv.shape[1], sums = q->count * columns;
    struct column_sets sets = {{(float *)dbias.data}, 1};
    enum attention_kind kind;
    void *workspace;
    a.dout = dout.data;
    a.dqkv = dqkv.data;
    TRY(attention_check(&a));
    TRY(attention_kind(&kind, &a, qkv.dtype));
    bool summed = kind == ATTENTION_WGMMA && q->rows > 0 && dbias.data; /* by the kernel itself */
    TRY(stream_scratch(&workspace, s, bytes + (summed ? (size_t)sums * sizeof(float) : 0)));
    if (summed)
        TRY(columns_reserve(&a.sums, s, sums));
    a.delta = (float *)workspace;
    a.parts = (float4 *)workspace;
    a.keep = (uint8_t *)workspace;
    a.stats = (float2 *)(a.keep + heads * q->rows * a.keep_pitch);
    if (q->rows > 0)
        TRY(attention_backward(s, &a, kind, qkv.dtype));
    if (summed)
        return columns_finish(s, sets, a.sums, q->count, columns, add);
    return dbias.data ? columns_sum(s, (float *)dbias.data, dqkv, NULL, 0, add) : ST_OK;
}
