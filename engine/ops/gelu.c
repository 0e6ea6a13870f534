#include "engine/ops/gelu.h"

#include "engine/ops/columns.h"
#include "engine/ops/lanes.h"
#include "engine/ops/pieces.h"

CPU_CLONES static void gelu_loop(float *out, const float *pre, int64_t n)
{
    f32x8 distribution, density;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        f32x8 x = lanes_load(pre + i);
        normal8(&distribution, &density, x);
        lanes_store(out + i, x * distribution);
    }
    if (i < n) {
        f32x8 x = lanes_load_tail(pre + i, n - i, 0.0f);
        normal8(&distribution, &density, x);
        lanes_store_tail(out + i, x * distribution, n - i);
    }
}

/* @act may be @pre or NULL, @dpre may be @dout. */
CPU_CLONES static void gelu_gradient_loop(float *dpre, float *act, const float *dout,
                                          const float *pre, int64_t n)
{
    f32x8 distribution, density;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        f32x8 x = lanes_load(pre + i);
        normal8(&distribution, &density, x);
        lanes_store(dpre + i, lanes_load(dout + i) * (distribution + x * density));
        if (act != NULL)
            lanes_store(act + i, x * distribution);
    }
    if (i < n) {
        f32x8 x = lanes_load_tail(pre + i, n - i, 0.0f);
        f32x8 dy = lanes_load_tail(dout + i, n - i, 0.0f);
        normal8(&distribution, &density, x);
        lanes_store_tail(dpre + i, dy * (distribution + x * density), n - i);
        if (act != NULL)
            lanes_store_tail(act + i, x * distribution, n - i);
    }
}

struct gelu {
    float *out;
    const float *dout, *pre;
    float *act; /* this and dout: of backward alone */
};

static void forward_piece(void *context, int64_t first, int64_t end, int worker)
{
    const struct gelu *g = context;
    (void)worker;
    gelu_loop(g->out + first, g->pre + first, end - first);
}

static void backward_piece(void *context, int64_t first, int64_t end, int worker)
{
    const struct gelu *g = context;
    (void)worker;
    gelu_gradient_loop(g->out + first, g->act == NULL ? NULL : g->act + first, g->dout + first,
                       g->pre + first, end - first);
}

enum status gelu_forward_cpu(struct stream *s, struct tensor out, struct tensor pre)
{
    struct gelu g = {out.data, NULL, pre.data, NULL};
    pieces_run(s, forward_piece, &g, tensor_numel(pre), PIECE_NUMEL);
    return ST_OK;
}

enum status gelu_backward_cpu(struct stream *s, struct tensor dpre, struct tensor act,
                              struct tensor dbias, struct tensor dout, struct tensor pre, bool add)
{
    struct gelu g = {dpre.data, dout.data, pre.data, act.data};
    pieces_run(s, backward_piece, &g, tensor_numel(pre), PIECE_NUMEL);
    if (dbias.data)
        columns_sum_cpu(s, dbias.data, dpre.data, pre.shape[0], pre.shape[1], add);
    return ST_OK;
}
