/*
 * engine/ops/dropout.cu - CUDA backend of dropout.h's op. Arithmetic in fp32.
 *
 * One pack a thread; a grid row of blocks holds one row of the tensor, so that a pack never crosses
 * rows. Bytes: reads and writes each element once; bound by memory.
 */
#include "engine/ops/cuda_common.cuh"

enum { DROPOUT_THREADS = 128, DROPOUT_ROWS = 65535 /* of a grid, the most it may have */ };

template <typename E, int W>
__global__ static void dropout_apply_kernel(E *out, const E *x, struct sequences q,
                                            int64_t channels, struct dropout drop)
{
    int64_t c = ((int64_t)blockIdx.x * DROPOUT_THREADS + threadIdx.x) * W;
    kernel_begin();
    if (c >= channels)
        return;
    struct dropout_key mask = dropout_key(drop);
    for (int64_t row = blockIdx.y; row < q.rows; row += gridDim.y) {
        int b = q.row_sequence[row];
        float v[W] = {0.0f};
        if (b >= 0) {
            uint64_t first = (uint64_t)(row - q.cu_seqlens[b]) * (uint64_t)channels;
            load_pack<E, W>(v, x + row * channels + c);
            dropout_apply<W>(v, mask, (uint32_t)q.sample[b], first + (uint64_t)c);
        }
        store_pack<E, W>(out + row * channels + c, v);
    }
}

template <typename E>
static enum status dropout_apply_any(struct stream *s, E *out, const E *x,
                                     const struct sequences *q, int64_t channels,
                                     struct dropout drop)
{
    constexpr int W = full_pack<E>();
    unsigned rows = (unsigned)min(q->rows, (int64_t)DROPOUT_ROWS);
    if (rows == 0 || channels == 0)
        return ST_OK;
    bool packs = packs_fit(channels, sizeof(E), out, x);
    return launch_kernel(
        s, dim3((unsigned)div_up(channels, DROPOUT_THREADS * (packs ? W : 1)), rows),
        DROPOUT_THREADS, packs ? dropout_apply_kernel<E, W> : dropout_apply_kernel<E, 1>, out, x,
        *q, channels, drop);
}

enum status cuda_dropout_apply(struct stream *s, struct tensor out, struct tensor x,
                               const struct sequences *q, struct dropout drop)
{
    int64_t channels = x.shape[1];
    if (x.dtype == DTYPE_BF16)
        return dropout_apply_any(s, (bf16 *)out.data, (const bf16 *)x.data, q, channels, drop);
    return dropout_apply_any(s, (float *)out.data, (const float *)x.data, q, channels, drop);
}
