#include "engine/ops/gelu.h"

#include "engine/ops/lanes.h"

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

CPU_CLONES static void gelu_gradient_loop(float *dpre, const float *dout, const float *pre,
                                          int64_t n)
{
    f32x8 distribution, density;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        f32x8 x = lanes_load(pre + i);
        normal8(&distribution, &density, x);
        lanes_store(dpre + i, lanes_load(dout + i) * (distribution + x * density));
    }
    if (i < n) {
        f32x8 x = lanes_load_tail(pre + i, n - i, 0.0f);
        f32x8 dy = lanes_load_tail(dout + i, n - i, 0.0f);
        normal8(&distribution, &density, x);
        lanes_store_tail(dpre + i, dy * (distribution + x * density), n - i);
    }
}

enum status gelu_forward_cpu(struct stream *s, struct tensor out, struct tensor pre)
{
    (void)s;
    gelu_loop(out.data, pre.data, tensor_numel(pre));
    return ST_OK;
}

enum status gelu_backward_cpu(struct stream *s, struct tensor dpre, struct tensor dout,
                              struct tensor pre)
{
    (void)s;
    gelu_gradient_loop(dpre.data, dout.data, pre.data, tensor_numel(pre));
    return ST_OK;
}
