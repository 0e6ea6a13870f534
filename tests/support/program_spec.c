#include "tests/support/program_spec.h"

#include <stdio.h>
#include <string.h>

#include "shard/layout.h"
#include "tests/support/support.h"

const struct spec_sizes spec_bert_base = {12, 768, 3072, 12, 30522, 512, 2048, 8388608};
const struct spec_sizes spec_bert_large = {24, 1024, 4096, 16, 30522, 512, 2048, 8388608};

static int64_t aligned(int64_t numel)
{
    return round_up(numel, LAYOUT_ALIGN);
}

static size_t bytes_of(int64_t numel, enum dtype dtype)
{
    return (size_t)round_up(numel * (int64_t)dtype_bytes(dtype), ARENA_ALIGN);
}

static int add_unit(struct spec_case *c, struct program_unit unit, int64_t numel, int world_size)
{
    int i = c->spec.unit_count++;
    assert_true(i < SPEC_MAX_UNITS);
    unit.shard_numel = aligned((numel + world_size - 1) / world_size);
    unit.tied = -1;
    c->units[i] = unit;
    return i;
}

/* The tensors that engine/model keeps, one by one. */
static void size_units(struct spec_case *c, struct unit_bytes *units, size_t *slots,
                       const struct spec_sizes *s, int64_t rows)
{
    enum dtype dtype = c->spec.param_dtype;
    size_t hidden = bytes_of(rows * s->channels, dtype), ffn = bytes_of(rows * s->ffn, dtype);
    size_t qkv = bytes_of(rows * 3 * s->channels, dtype), stats = bytes_of(2 * rows, DTYPE_F32);
    int U = c->spec.unit_count;
    for (int u = 0; u < U; u++) {
        units[u] = (struct unit_bytes){0};
        slots[c->units[u].act_out] = hidden;
        if (u < c->parts)
            continue;
        if (u == c->parts) {
            units[u].saved = hidden + stats;
        } else if (u < U - 1) {
            units[u].saved =
                qkv + 4 * hidden + ffn + bytes_of(s->heads * rows, DTYPE_F32) + 2 * stats;
            units[u].forward_scratch = ffn;
            units[u].backward_scratch = hidden + (ffn > hidden + qkv ? ffn : hidden + qkv);
        } else {
            units[u].saved = bytes_of(2 * rows, DTYPE_F32);
        }
    }
    slots[c->spec.slot_count - 1] = bytes_of(2 * rows, DTYPE_F32);
}

static void build(struct spec_case *c, const struct spec_sizes *s, enum dtype param_dtype,
                  int zero_stage, int world_size, int64_t evaluate_rows)
{
    memset(c, 0, sizeof *c);
    int64_t C = s->channels, F = s->ffn, left = s->vocab, part = s->max_unit_numel / C;
    int slot = 0;
    for (; left > 0; left -= part, c->parts++)
        add_unit(c, (struct program_unit){.act_in = c->parts == 0 ? -1 : 0, .act_out = 0},
                 (left < part ? left : part) * C, world_size);
    add_unit(c, (struct program_unit){.act_in = 0, .act_out = 1, .backward_reads_params = true},
             aligned(s->positions * C) + aligned(2 * C) + 2 * aligned(C), world_size);
    for (slot = 1; slot <= s->layers; slot++)
        add_unit(c,
                 (struct program_unit){.act_in = slot,
                                       .act_out = slot + 1,
                                       .backward_reads_params = true,
                                       .backward_reads_input = true,
                                       .recompute = true},
                 4 * aligned(C * C) + 2 * aligned(F * C) + aligned(F) + 9 * aligned(C), world_size);
    add_unit(c,
             (struct program_unit){.act_in = slot,
                                   .act_out = slot + 1,
                                   .backward_reads_params = true,
                                   .backward_reads_input = true},
             aligned(2 * C) + aligned(2), world_size);
    c->spec.slot_count = slot + 2;
    c->spec.units = c->units;
    c->spec.zero_stage = zero_stage;
    c->spec.world_size = world_size;
    c->spec.micro_batches = 1;
    c->spec.prefetch = 1;
    c->spec.param_dtype = param_dtype;
    size_units(c, c->train, c->train_slots, s, s->rows);
    size_units(c, c->evaluate, c->evaluate_slots, s, evaluate_rows);
    c->spec.train = (struct micro_bytes){c->train, c->train_slots};
    c->spec.evaluate = (struct micro_bytes){c->evaluate, c->evaluate_slots};
    c->spec.batch_bytes = (size_t)s->rows * 40;
    c->spec.evaluate_batch_bytes = (size_t)evaluate_rows * 40;
    c->spec.state_bytes = 96;
    c->spec.report_bytes = 128;
    c->spec.workspace_bytes = 4096;
    c->spec.update_workspace_bytes = 512;
}

void spec_bert(struct spec_case *c, const struct spec_sizes *sizes, enum dtype param_dtype,
               int zero_stage, int world_size)
{
    build(c, sizes, param_dtype, zero_stage, world_size, sizes->rows);
}

void spec_by_rows(struct spec_case *c)
{
    for (int u = 0; u < c->parts; u++)
        c->units[u].by_rows = true;
}

static int below(uint64_t *random, int n)
{
    return (int)(test_random(random) % (uint64_t)n);
}

void spec_random(struct spec_case *c, uint64_t *random)
{
    int64_t channels = 1 + below(random, 48);
    struct spec_sizes s = {.layers = below(random, 9),
                           .channels = channels,
                           .ffn = 1 + below(random, 96),
                           .heads = 1,
                           .vocab = 1 + below(random, 60),
                           .positions = 1 + below(random, 40),
                           .rows = 1 + below(random, 40)};
    s.max_unit_numel = channels * (s.vocab / (1 + below(random, 3)) + 1);
    build(c, &s, below(random, 2) ? DTYPE_F32 : DTYPE_BF16, below(random, 4), 1 + below(random, 9),
          1 + below(random, 60));
    struct program_spec *p = &c->spec;
    p->micro_batches = 1 + below(random, 4);
    p->prefetch = below(random, 4) ? below(random, 5) : p->unit_count * 2 + below(random, 9);
    p->recompute = below(random, 2);
    p->update = below(random, 2) ? UPDATE_LATE : UPDATE_EARLY;
    p->reduce = (enum reduce_policy)below(random, 3);
    if (p->zero_stage >= 2 && p->reduce == REDUCE_PER_STEP)
        p->reduce = REDUCE_PER_MICRO_BATCH;
    if (below(random, 3) == 0)
        c->units[p->unit_count - 1].tied = below(random, c->parts);
    int freeze = below(random, 4); /* none, none, some, all but one */
    for (int u = 0; u < p->unit_count; u++)
        c->units[u].frozen = freeze == 3 || (freeze == 2 && below(random, 2));
    c->units[below(random, p->unit_count)].frozen = false;
    bool by_rows = below(random, 2) && c->units[p->unit_count - 1].tied < 0;
    if (by_rows)
        spec_by_rows(c);
}

const char *spec_text(const struct spec_case *c)
{
    static char text[512];
    const struct program_spec *p = &c->spec;
    int n = snprintf(text, sizeof text,
                     "stage %d, world %d, micro-batches %d, prefetch %d, recompute %d, reduce %d, "
                     "update %s, %s, %d units, %d parts, head tied to %d, by rows %d, frozen",
                     p->zero_stage, p->world_size, p->micro_batches, p->prefetch, p->recompute,
                     (int)p->reduce, p->update == UPDATE_EARLY ? "early" : "late",
                     dtype_name(p->param_dtype), p->unit_count, c->parts,
                     c->units[p->unit_count - 1].tied, c->units[0].by_rows);
    for (int u = 0; u < p->unit_count && n < (int)sizeof text - 8; u++)
        if (c->units[u].frozen)
            n += snprintf(text + n, sizeof text - (size_t)n, " %d", u);
    return text;
}
