#include <string.h>

#include "engine/base/rng.h"
#include "engine/ops/ops.h"
#include "engine/train/calibrate.h"

enum { POSITIONS = 512, TINY = 256, TINY_CALLS = 200, EDGES = 32, NOISE = 1 << 18 };
enum { BLOCK_PRODUCTS = 12, WARM_MS = 200 };

/* What the ops work on; tensors have room for the most rows. */
struct stage {
    struct sequences q;
    int32_t *index, *host_index; /* device memory behind q's arrays; the same, pinned, owned */
    int64_t most_rows, rows;     /* rows: of the op that is timed */
    int64_t most_channels, channels, heads; /* the latter two also */
    int64_t update_numel;
    struct step_state *state; /* device memory */
    float *noise;             /* device memory */
    void *x, *y, *z, *wide, *wide2, *qkv, *dqkv, *lse, *stats, *gamma, *beta, *bias, *w, *param;
    float *dgamma, *dbeta, *dw, *dbias;
    uint16_t *low;        /* of the master weights whose upper halves are param */
    float *adam[3];       /* m, v, gradient */
    struct event turn[2]; /* of two streams that take turns */
    struct graph *tiny;   /* owned, of one operation */
};

static struct tensor rows_of(struct bench *b, void *data, int64_t columns)
{
    return tensor_2d(data, b->device->param_dtype, b->stage->rows, columns);
}

static struct tensor vector_of(struct bench *b, void *data)
{
    return tensor_1d(data, b->device->param_dtype, b->stage->channels);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Numbers like those of a network: products of zeros are faster than others on some cards. */
static enum status take_noise(struct bench *b, void **out, int64_t numel)
{
    struct stage *g = b->stage;
    size_t element = dtype_bytes(b->device->param_dtype);
    TRY(bench_take(b, out, (size_t)numel * element));
    for (int64_t at = 0; at < numel; at += NOISE) {
        int64_t n = numel - at < NOISE ? numel - at : NOISE;
        TRY(op_cast(b->s, tensor_1d((char *)*out + (size_t)at * element, b->device->param_dtype, n),
                    tensor_1d(g->noise, DTYPE_F32, n)));
    }
    return ST_OK;
}

static enum status make_noise(struct bench *b)
{
    struct stage *g = b->stage;
    float *host = NULL;
    enum status st = ST_OK;
    TRY(bench_take(b, (void **)&g->noise, NOISE * sizeof *g->noise));
    TRY(device_alloc_host(b->device, (void **)&host, NOISE * sizeof *host));
    rng_fill_normal(host, 0, NOISE, 1, 2, 0.02f);
    TRY_GOTO(st, out, device_copy(b->s, g->noise, host, NOISE * sizeof *host));
    TRY_GOTO(st, out, stream_sync(b->s));
out:
    device_free_host(b->device, (void **)&host);
    return st;
}

static enum status make_state(struct bench *b)
{
    struct stage *g = b->stage;
    struct step_state *host = NULL;
    enum status st = ST_OK;
    TRY(bench_take(b, (void **)&g->state, sizeof *g->state));
    TRY(device_alloc_host(b->device, (void **)&host, sizeof *host));
    *host = (struct step_state){.host = {.seed = 1, .training = 1, .inv_count = 1.0f},
                                .lr = 1e-4f,
                                .clip = 1.0f,
                                .correction1 = 0.1f,
                                .correction2 = 0.001f};
    TRY_GOTO(st, out, device_copy(b->s, g->state, host, sizeof *host));
    TRY_GOTO(st, out, stream_sync(b->s));
out:
    device_free_host(b->device, (void **)&host);
    return st;
}

static enum status make_workspace(struct bench *b)
{
    const struct stage *g = b->stage;
    struct op_limits limits = {.rows = g->most_rows,
                               .channels = g->most_channels,
                               .ffn = 4 * g->most_channels,
                               .heads = g->most_channels / b->sizes.heads[0],
                               .sequences = g->most_rows,
                               .max_length = POSITIONS,
                               .vocab_rows = TINY,
                               .world_size = b->comm->world_size};
    b->s->workspace_bytes = op_workspace_bytes(b->device, &limits);
    return bench_take(b, &b->s->workspace, b->s->workspace_bytes);
}

static enum status make_tensors(struct bench *b)
{
    struct stage *g = b->stage;
    int64_t T = g->most_rows, C = g->most_channels, F = 4 * C;
    const struct {
        void **data;
        int64_t numel;
    } activations[] = {{&g->x, T * C},        {&g->y, T * C},     {&g->z, T * C},
                       {&g->wide, T * F},     {&g->wide2, T * F}, {&g->qkv, T * 3 * C},
                       {&g->dqkv, T * 3 * C}, {&g->gamma, C},     {&g->beta, C},
                       {&g->bias, F},         {&g->w, F * C},     {&g->param, g->update_numel}};
    for (size_t i = 0; i < sizeof activations / sizeof *activations; i++)
        TRY(take_noise(b, activations[i].data, activations[i].numel));
    TRY(bench_take(b, &g->lse, (size_t)(C / b->sizes.heads[0] * T) * sizeof(float)));
    TRY(bench_take(b, &g->stats, (size_t)(2 * T) * sizeof(float)));
    TRY(bench_take(b, (void **)&g->dw, (size_t)(F * C) * sizeof *g->dw));
    TRY(bench_take(b, (void **)&g->dbias, (size_t)F * sizeof *g->dbias));
    TRY(bench_take(b, (void **)&g->dgamma, (size_t)C * sizeof *g->dgamma));
    TRY(bench_take(b, (void **)&g->dbeta, (size_t)C * sizeof *g->dbeta));
    size_t update_bytes = (size_t)g->update_numel * sizeof *g->adam[0];
    for (int i = 0; i < 3; i++)
        TRY(bench_take(b, (void **)&g->adam[i], update_bytes));
    TRY(bench_take(b, (void **)&g->low, (size_t)g->update_numel * sizeof *g->low));
    /* Zeros would be the rows of a table that no token has met, which take less. */
    return device_fill(b->s, g->adam[2], 0x3C, update_bytes);
}

/* Sequences of @length, or of all @rows if these are fewer, that fill them; by turns @spread
 * shorter and longer. */
static enum status set_batch(struct bench *b, int64_t rows, int64_t length, int64_t spread)
{
    struct stage *g = b->stage;
    length = length < rows ? length : rows;
    int64_t most = g->most_rows, count = rows / length, end = 0;
    int32_t *cu = g->host_index, *kv = cu + most + 1, *sample = kv + most, *row = sample + most;
    for (int64_t i = 0; i < count; i++) {
        int64_t n = i % 2 == 0 ? length - spread : length + spread;
        cu[i] = (int32_t)end;
        kv[i] = (int32_t)n;
        sample[i] = (int32_t)i;
        for (int64_t k = 0; k < n; k++)
            row[end++] = (int32_t)i;
    }
    cu[count] = (int32_t)end;
    ASSERT(end == count * length);
    for (; end < rows; end++)
        row[end] = (int32_t)(count - 1);
    TRY(device_copy(b->s, g->index, g->host_index, (size_t)(4 * most + 1) * sizeof *g->index));
    TRY(stream_sync(b->s));
    const int32_t *at = g->index, *zeros = at + 4 * most + 1;
    g->rows = rows;
    g->q = (struct sequences){.rows = rows,
                              .count = (int32_t)count,
                              .max_length = (int32_t)(length + spread),
                              .positions = POSITIONS,
                              .cu_seqlens = at,
                              .kv_len = at + most + 1,
                              .sample = at + 2 * most + 1,
                              .token = zeros,
                              .token_type = zeros,
                              .row_sequence = at + 3 * most + 1,
                              .token_order = zeros,
                              .start = zeros,
                              .end = zeros};
    return ST_OK;
}

static enum status make_all(struct bench *b)
{
    struct stage *g = b->stage;
    size_t numel = (size_t)(5 * g->most_rows + 1);
    TRY(make_workspace(b));
    TRY(make_noise(b));
    TRY(make_state(b));
    TRY(make_tensors(b));
    for (int i = 0; i < 2; i++)
        TRY(event_open(b->device, &g->turn[i]));
    TRY(bench_take(b, (void **)&g->index, numel * sizeof *g->index));
    TRY(device_alloc_host(b->device, (void **)&g->host_index, numel * sizeof *g->host_index));
    memset(g->host_index, 0, numel * sizeof *g->host_index);
    return stream_sync(b->s);
}

/* ---- what is timed --------------------------------------------------------------------------- */

static struct dropout drop(struct bench *b)
{
    return (struct dropout){.p = 0.1f, .layer_site = 1, .state = b->stage->state};
}

/* A linear layer: its output, and the gradients of its input and weights from its output's. */
struct layer {
    void *in, *out, *dout, *din;
    int64_t from, to; /* channels */
};

static enum status run_layer(struct bench *b, const struct layer *l)
{
    struct stage *g = b->stage;
    struct tensor w = tensor_2d(g->w, b->device->param_dtype, l->to, l->from);
    struct tensor in = rows_of(b, l->in, l->from), dout = rows_of(b, l->dout, l->to);
    TRY(op_linear_forward(b->s, rows_of(b, l->out, l->to), in, w,
                          tensor_1d(g->bias, b->device->param_dtype, l->to)));
    TRY(op_linear_backward_data(b->s, rows_of(b, l->din, l->from), dout, w, false));
    return op_linear_backward_weight(b->s, tensor_2d(g->dw, DTYPE_F32, l->to, l->from), dout, in,
                                     false);
}

static enum status run_products(struct bench *b)
{
    const struct stage *g = b->stage;
    int64_t C = g->channels, F = 4 * C;
    const struct layer layers[] = {{g->x, g->qkv, g->dqkv, g->y, C, 3 * C},
                                   {g->x, g->y, g->z, g->y, C, C},
                                   {g->x, g->wide, g->wide2, g->y, C, F},
                                   {g->wide2, g->y, g->z, g->wide, F, C}};
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++)
        TRY(run_layer(b, &layers[i]));
    return ST_OK;
}

static enum status run_attention(struct bench *b)
{
    struct stage *g = b->stage;
    int64_t C = g->channels;
    int heads = (int)g->heads;
    struct tensor qkv = rows_of(b, g->qkv, 3 * C), out = rows_of(b, g->y, C);
    struct tensor lse = tensor_2d(g->lse, DTYPE_F32, heads, g->rows);
    TRY(op_attention_forward(b->s, out, lse, qkv, &g->q, heads, drop(b)));
    TRY(op_attention_backward(b->s, rows_of(b, g->dqkv, 3 * C),
                              tensor_1d(g->dbias, DTYPE_F32, 3 * C), rows_of(b, g->x, C), out, lse,
                              qkv, &g->q, heads, drop(b), false));
    return op_finish_sums(b->s);
}

/* What a block does beside products and attention. */
static enum status run_elementwise(struct bench *b)
{
    struct stage *g = b->stage;
    int64_t C = g->channels, F = 4 * C;
    const struct tensor none = {0};
    struct tensor gamma = vector_of(b, g->gamma), beta = vector_of(b, g->beta);
    struct tensor dgamma = tensor_1d(g->dgamma, DTYPE_F32, C);
    struct tensor dbeta = tensor_1d(g->dbeta, DTYPE_F32, C);
    struct tensor stats = tensor_2d(g->stats, DTYPE_F32, 2, g->rows);
    struct tensor x = rows_of(b, g->x, C), y = rows_of(b, g->y, C), z = rows_of(b, g->z, C);
    struct tensor pre = rows_of(b, g->wide, F), out = rows_of(b, g->wide2, F);
    struct tensor dx = rows_of(b, g->qkv, C), dy = rows_of(b, g->dqkv, C);
    for (int i = 0; i < 2; i++)
        TRY(op_residual_norm_forward(b->s, y, z, stats, x, z, gamma, beta, &g->q, 1e-12f, drop(b)));
    TRY(op_gelu_forward(b->s, out, pre));
    TRY(op_gelu_backward(b->s, out, pre, tensor_1d(g->dbias, DTYPE_F32, F), out, pre, false));
    for (int i = 0; i < 2; i++)
        TRY(op_residual_norm_backward(b->s, dx, dy, dgamma, dbeta, none, y, z, stats, gamma, &g->q,
                                      drop(b), false));
    return op_finish_sums(b->s);
}

static enum status run_update(struct bench *b)
{
    struct stage *g = b->stage;
    int64_t n = g->update_numel;
    bool halves = b->device->param_dtype == DTYPE_BF16;
    const struct adam_range all = {0, n, true, false};
    const struct optim_hyper hyper = {
        .lr = 1e-4f, .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f, .weight_decay = 0.01f};
    return op_adamw(b->s, tensor_1d(g->param, b->device->param_dtype, n),
                    tensor_1d(halves ? g->low : NULL, DTYPE_U16, n),
                    tensor_1d(g->adam[0], DTYPE_F32, n), tensor_1d(g->adam[1], DTYPE_F32, n),
                    tensor_1d(g->adam[2], DTYPE_F32, n), &all, 1, 0, g->state, &hyper);
}

static enum status sum_of(struct bench *b, int64_t n)
{
    const struct stage *g = b->stage;
    return op_accumulate(b->s, tensor_1d(g->adam[0], DTYPE_F32, n),
                         tensor_1d(g->adam[2], DTYPE_F32, n), true);
}

static enum status run_copy(struct bench *b)
{
    return sum_of(b, b->stage->update_numel);
}

static enum status run_tiny(struct bench *b)
{
    for (int i = 0; i < TINY_CALLS; i++)
        TRY(sum_of(b, TINY));
    return ST_OK;
}

/* A graph of one tiny operation: state and batch come, and the report goes, inside a step's. */
static enum status run_turn(struct bench *b)
{
    return graph_launch(b->s, b->stage->tiny);
}

static enum status time_turn(struct bench *b, struct calibrate_times *t)
{
    TRY(stream_capture_begin(b->s));
    enum status st = sum_of(b, TINY);
    enum status ended = stream_capture_end(b->s, &b->stage->tiny);
    TRY(st);
    TRY(ended);
    return bench_time(b, &t->turn, run_turn);
}

/* Each waits for the one before it, on the other stream. */
static enum status run_edges(struct bench *b)
{
    struct stream *mine = b->s, *other = &b->device->streams[STREAM_UPDATE];
    enum status st = ST_OK;
    for (int i = 0; i < EDGES && st == ST_OK; i++) {
        struct event *turn = &b->stage->turn[i % 2];
        st = sum_of(b, TINY);
        if (st == ST_OK)
            st = event_record(turn, b->s);
        b->s = i % 2 == 0 ? other : mine;
        if (st == ST_OK)
            st = stream_wait(b->s, turn);
    }
    b->s = mine;
    return st;
}

static enum status time_block(struct bench *b, struct calibrate_times *t)
{
    const struct calibrate_sizes *z = &b->sizes;
    for (int w = 0; w < CALIBRATE_WIDTHS; w++)
        for (int i = 0; i < CALIBRATE_ROWS; i++) {
            b->stage->channels = z->widths[w];
            b->warm_ms = b->device->asynchronous && i == CALIBRATE_ROWS - 1 ? WARM_MS : 0;
            TRY(set_batch(b, z->rows[i], z->lengths[0], 0));
            TRY(bench_time_compute(b, &t->product[w][i], run_products));
            TRY(bench_time_compute(b, &t->elementwise[w][i], run_elementwise));
        }
    b->warm_ms = 0;
    return ST_OK;
}

static enum status time_attention(struct bench *b, struct calibrate_times *t)
{
    const struct calibrate_sizes *z = &b->sizes;
    b->stage->channels = z->channels;
    for (int h = 0; h < CALIBRATE_HEADS; h++)
        for (int i = 0; i < CALIBRATE_LENGTHS; i++) {
            b->stage->heads = z->channels / z->heads[h];
            TRY(set_batch(b, z->many_rows, z->lengths[i], z->lengths[i] / 2));
            TRY(bench_time_compute(b, &t->many[h][i], run_attention));
            if (z->few_rows == 0)
                continue;
            TRY(set_batch(b, z->few_rows, z->lengths[i], z->lengths[i] / 2));
            TRY(bench_time_compute(b, &t->few[h][i], run_attention));
        }
    return ST_OK;
}

static enum status time_launches(struct bench *b, struct calibrate_times *t)
{
    TRY(bench_time_compute(b, &t->launch, run_tiny));
    t->launch /= TINY_CALLS;
    b->stage->channels = b->sizes.tiny_width;
    TRY(set_batch(b, b->sizes.tiny_rows, b->sizes.tiny_rows, 0));
    TRY(bench_time_compute(b, &t->floor, run_products));
    t->floor /= BLOCK_PRODUCTS;
    if (!b->device->asynchronous)
        return ST_OK;
    TRY(bench_time_compute(b, &t->edges, run_edges));
    t->edges /= EDGES;
    return time_turn(b, t);
}

static enum status time_all(struct bench *b, struct calibrate_times *t)
{
    TRY(time_block(b, t));
    TRY(time_attention(b, t));
    TRY(bench_time_compute(b, &t->update, run_update));
    TRY(bench_time_compute(b, &t->copy, run_copy));
    return time_launches(b, t);
}

enum status bench_products(struct bench *b)
{
    return run_products(b);
}

enum status calibrate_compute(struct bench *b, struct calibrate_times *times)
{
    const struct calibrate_sizes *z = &b->sizes;
    struct stage *g = NULL;
    TRY(pool_take(&b->pool, &g, sizeof *g));
    g->most_channels = z->widths[CALIBRATE_WIDTHS - 1];
    g->update_numel = z->update_numel;
    g->most_rows = z->rows[CALIBRATE_ROWS - 1];
    ASSERT(z->channels <= g->most_channels);
    ASSERT(z->many_rows <= g->most_rows);
    b->stage = g;
    TRY(make_all(b));
    TRY(time_all(b, times));
    g->channels = g->most_channels; /* for bench_products() */
    return set_batch(b, g->most_rows, z->lengths[0], 0);
}

void calibrate_compute_close(struct bench *b)
{
    if (b->stage == NULL)
        return;
    device_free_host(b->device, (void **)&b->stage->host_index);
    graph_close(&b->stage->tiny);
    for (int i = 0; i < 2; i++)
        event_close(&b->stage->turn[i]);
    b->s->workspace = NULL;
    b->s->workspace_bytes = 0;
}
