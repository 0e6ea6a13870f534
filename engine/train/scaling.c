#include "engine/train/scaling.h"

#include <string.h>

#include "engine/base/out.h"
#include "engine/base/text_buffer.h"

enum { NODE_GPUS = 8, SEQUENCES = 16, BYTES = 256 /* of buffers whose size takes no time */ };

/* A step program and what its units do. */
struct workload {
    struct setup setup; /* BERT's; else empty */
    struct program program;
    struct unit_work *units; /* owned, as the next three */
    struct program_unit *program_units;
    struct unit_bytes *bytes;
    size_t *slots;
    int unit_count;
    double width, head; /* channels of the model and of a head */
    struct batch_size micro;
};

static void workload_close(struct workload *w)
{
    program_release(&w->program);
    setup_release(&w->setup);
    mem_free(&w->units);
    mem_free(&w->program_units);
    mem_free(&w->bytes);
    mem_free(&w->slots);
}

/* ---- BERT-large ------------------------------------------------------------------------------ */

/* SQuAD's windows: 175 tokens on average, standard deviation 60. */
static enum status open_bert(struct workload *w, int ranks, int stage, bool hybrid)
{
    struct run_config config;
    struct device *device = NULL;
    enum status st = ST_OK;
    config_defaults(&config);
    w->width = 1024;
    w->head = 64;
    config.model.hidden = 1024;
    config.model.layers = 24;
    config.model.heads = 16;
    config.model.ffn = 4096;
    config.train.micro_batch = SEQUENCES;
    config.train.comm = COMM_NCCL;
    if (hybrid) /* the groups' sum is part of a REDUCE */
        config.train.tables = TABLES_WHOLE;
    w->micro = (struct batch_size){175.0 * SEQUENCES, (175.0 * 175 + 60 * 60) * SEQUENCES};
    TRY(device_open(&device, DEVICE_CPU, PRECISION_FP32, 0, 1));
    device->param_dtype = DTYPE_BF16;
    TRY_GOTO(st, out, setup_init(&w->setup, &config, device, ranks, stage, (struct setup_rows){0}));
    w->unit_count = w->setup.model.unit_count;
    TRY_GOTO(st, out, mem_alloc(&w->units, sizeof *w->units * (size_t)w->unit_count));
    for (int u = 0; u < w->unit_count; u++)
        w->units[u] = model_unit_work(&w->setup.model, u, w->micro);
    TRY_GOTO(st, out, program_build(&w->program, PROGRAM_STEP, &w->setup.spec));
out:
    device_close(&device);
    return st;
}

/* ---- a decoder ------------------------------------------------------------------------------- */

/* Llama's 7 B (arXiv:2302.13971, Table 2), untied head. */
static const struct {
    double layers, channels, ffn, vocab, sequences, length;
} decoder = {32, 4096, 11008, 32000, 2, 2048};

static double decoder_numel(int unit)
{
    double C = decoder.channels;
    if (unit == 0)
        return decoder.vocab * C;
    if (unit == decoder.layers + 1)
        return decoder.vocab * C + C;
    return 4 * C * C + 3 * C * decoder.ffn + 2 * C;
}

/* As encoder_block.c counts; a token sees half of its sequence. Bytes: two norms, the rotation of
 * queries and keys, the gated activation; the head's logits and their gradient. */
static struct unit_work decoder_work(int unit, struct batch_size micro)
{
    double C = decoder.channels, F = decoder.ffn, V = decoder.vocab, T = micro.tokens;
    double element = 2 * T, grad = 4 * decoder_numel(unit);
    if (unit == 0)
        return (struct unit_work){.forward = {.bytes = 2 * C * element, .kernels = 1},
                                  .backward = {.bytes = 2 * C * element + grad, .kernels = 2}};
    if (unit == decoder.layers + 1)
        return (struct unit_work){{2 * C * V * T, 0, (4 * C + 2 * V) * element, 0, 4},
                                  {4 * C * V * T, 0, (4 * C + 2 * V) * element, 0, 6}};
    double products = 2 * (4 * C * C + 3 * C * F) * T;
    double attention = 4 * C * micro.squared_lengths / 2;
    return (struct unit_work){
        {products, attention, (2 * 4 * C + 4 * C + 3 * F) * element, 1, 12},
        {2 * products, 2 * attention, (2 * 4 * C + 4 * C + 5 * F) * element, 0, 22}};
}

static void fill_decoder(struct workload *w, int ranks)
{
    for (int u = 0; u < w->unit_count; u++) {
        int64_t padded = round_up((int64_t)decoder_numel(u), (int64_t)ranks * LAYOUT_ALIGN);
        w->units[u] = decoder_work(u, w->micro);
        w->program_units[u] = (struct program_unit){.shard_numel = padded / ranks,
                                                    .act_in = u - 1,
                                                    .act_out = u,
                                                    .tied = -1,
                                                    .backward_reads_params = u > 0,
                                                    .backward_reads_input = u > 0};
        w->bytes[u] = (struct unit_bytes){BYTES, BYTES, BYTES};
        w->slots[u] = BYTES;
    }
}

static enum status open_decoder(struct workload *w, int ranks, int stage)
{
    size_t units = (size_t)decoder.layers + 2;
    double length = decoder.length;
    w->unit_count = (int)units;
    w->width = decoder.channels;
    w->head = 128;
    w->micro = (struct batch_size){decoder.sequences * length, decoder.sequences * length * length};
    TRY(mem_alloc(&w->units, sizeof *w->units * units));
    TRY(mem_alloc(&w->program_units, sizeof *w->program_units * units));
    TRY(mem_alloc(&w->bytes, sizeof *w->bytes * units));
    TRY(mem_alloc(&w->slots, sizeof *w->slots * units));
    fill_decoder(w, ranks);
    const struct program_spec spec = {
        .units = w->program_units,
        .unit_count = w->unit_count,
        .slot_count = w->unit_count,
        .zero_stage = stage,
        .world_size = ranks,
        .micro_batches = 1,
        .prefetch = 1,
        .param_dtype = DTYPE_BF16,
        .train = {w->bytes, w->slots},
        .evaluate = {w->bytes, w->slots},
        .batch_bytes = BYTES,
        .evaluate_batch_bytes = BYTES,
        .state_bytes = BYTES,
        .report_bytes = BYTES,
        .workspace_bytes = BYTES,
        .update_workspace_bytes = BYTES,
    };
    return program_build(&w->program, PROGRAM_STEP, &spec);
}

/* ---- one cell -------------------------------------------------------------------------------- */

static double numel_of(const struct workload *w, int ranks)
{
    double numel = 0;
    for (int u = 0; u < w->unit_count; u++)
        numel += (double)(w->program_units != NULL ? w->program_units : w->setup.spec.units)[u]
                     .shard_numel *
                 ranks;
    return numel;
}

static double flops_of(const struct workload *w)
{
    double flops = 0;
    for (int u = 0; u < w->unit_count; u++) {
        const struct unit_work *x = &w->units[u];
        flops += x->forward.product_flops + x->forward.attention_flops;
        flops += x->backward.product_flops + x->backward.attention_flops;
    }
    return flops;
}

enum status scaling_forecast(struct scaling_step *out, const struct scaling_case *c,
                             const char *name)
{
    enum status st = ST_OK;
    struct workload w = {0};
    struct machine machine;
    struct simulate_result r;
    int node = c->gpus < NODE_GPUS ? c->gpus : NODE_GPUS;
    struct simulate_world world = {c->gpus, c->gpus / node, 1};
    if (c->hybrid)
        world = (struct simulate_world){node, 1, c->gpus / node};
    TRY(machine_builtin(&machine, name));
    TRY(forecast_check(&machine, world));
    TRY_GOTO(st, out,
             c->model == SCALING_BERT_LARGE ? open_bert(&w, world.ranks, c->zero_stage, c->hybrid)
                                            : open_decoder(&w, world.ranks, c->zero_stage));
    struct simulate_rates rates = forecast_rates(&machine, w.units, w.width, w.head, w.micro);
    TRY_GOTO(st, out, simulate_program(&r, NULL, &w.program, &rates, world));
    *out = (struct scaling_step){
        .forecast = {r.seconds + machine.turn_seconds, r.compute_seconds, r.collective_seconds,
                     r.exposed_seconds},
        .gather_bytes = (double)program_collective_bytes(&w.program, OP_GATHER, world.ranks),
        .reduce_bytes = (double)program_collective_bytes(&w.program, OP_REDUCE, world.ranks),
        .numel = numel_of(&w, world.ranks),
        .model_flops = flops_of(&w),
    };
out:
    workload_close(&w);
    return st;
}

/* ---- the tables ------------------------------------------------------------------------------ */

static const char *const networks[] = {"h100+ib50", "h100+ib100", "h100+ib200", "h100+ib400"};
static const int gpus[] = {8, 16, 64, 256, 1024, 4096};

static enum status put_bytes(struct text_buffer *p)
{
    text_put(p, "\n## Bytes that a rank sends in a step\n\n"
                "8 GPUs of one node, GB.\n\n"
                "| | parameters | stage 0 | stages 1, 2 | stage 3 |\n|---|---|---|---|---|\n");
    for (int m = 0; m < SCALING_MODELS; m++) {
        static const int stages[] = {0, 1, 3};
        struct scaling_step s[3];
        for (int i = 0; i < 3; i++)
            TRY(scaling_forecast(
                &s[i], &(struct scaling_case){(enum scaling_model)m, stages[i], 8, false}, "h100"));
        text_put(p, "| %s | %.2f B |", m == SCALING_BERT_LARGE ? "BERT-large" : "decoder",
                 s[0].numel * 1e-9);
        for (int i = 0; i < 3; i++)
            text_put(p, " %.2f |", (s[i].gather_bytes + s[i].reduce_bytes) * 1e-9);
        text_put(p, "\n");
    }
    return ST_OK;
}

static enum status put_table(struct text_buffer *p, enum scaling_model model, int stage,
                             bool hybrid)
{
    text_put(p,
             "\n%s, stage %d, %s:\n\n| GPUs | 50 Gb/s | 100 Gb/s | 200 Gb/s | 400 Gb/s |\n"
             "|---|---|---|---|---|\n",
             model == SCALING_BERT_LARGE ? "BERT-large" : "Decoder", stage,
             hybrid ? "hybrid" : "flat");
    for (size_t g = 0; g < sizeof gpus / sizeof *gpus; g++) {
        if (hybrid && gpus[g] <= NODE_GPUS)
            continue; /* that is flat */
        text_put(p, "| %d |", gpus[g]);
        for (size_t n = 0; n < sizeof networks / sizeof *networks; n++) {
            struct scaling_step s;
            const struct scaling_case c = {model, stage, gpus[g], hybrid};
            TRY(scaling_forecast(&s, &c, networks[n]));
            text_put(p, " %.1f (%.0f%%) |", s.forecast.seconds * 1e3,
                     100 * s.forecast.exposed_seconds / s.forecast.seconds);
        }
        text_put(p, "\n");
    }
    return ST_OK;
}

static enum status put_all(struct text_buffer *p)
{
    TRY(put_bytes(p));
    text_put(
        p, "\n## Predicted steps\n\n"
           "Milliseconds a step; in brackets the share of it in which communication is exposed.\n");
    for (int m = 0; m < SCALING_MODELS; m++) {
        for (int stage = m == SCALING_BERT_LARGE ? 0 : 1; stage < 4; stage += stage == 1 ? 2 : 1)
            TRY(put_table(p, (enum scaling_model)m, stage, false));
        TRY(put_table(p, (enum scaling_model)m, 3, true));
    }
    return ST_OK;
}

enum status scaling_format(char **text)
{
    struct text_buffer page = {0};
    size_t bytes;
    return text_take(&page, put_all(&page), text, &bytes);
}

enum status scaling_print(void)
{
    char *text = NULL;
    enum status st = scaling_format(&text);
    if (st == ST_OK)
        out("%s", text);
    mem_free(&text);
    return st;
}
