#include "engine/model/model.h"

#include <string.h>

#include "engine/base/rng.h"
#include "engine/model/bert.h"
#include "engine/model/distilbert.h"

static const struct encoder_family *const families[] = {
    [FAMILY_BERT] = &bert_family, [FAMILY_DISTILBERT] = &distilbert_family};

const char *model_family_name(enum model_family family)
{
    return families[family]->name;
}

static enum status set_dims(struct model *m, const struct run_config *config)
{
    double norm_eps = families[config->model.family]->norm_eps;
    const int64_t sizes[] = {config->model.vocab_size, config->model.hidden,
                             config->model.layers,     config->model.heads,
                             config->model.ffn,        config->model.max_positions,
                             config->model.type_vocab, config->train.max_unit_numel};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i] < 1)
            return FAIL(INVALID, "a size of the model is %lld", (long long)sizes[i]);
    if (config->model.hidden % config->model.heads != 0)
        return FAIL(INVALID, "model.hidden = %lld is not a multiple of model.heads = %lld",
                    (long long)config->model.hidden, (long long)config->model.heads);
    if (norm_eps > 0.0 && config->model.norm_eps != norm_eps)
        return FAIL(INVALID, "model.norm_eps is %g; for %s it is %g and cannot be another",
                    config->model.norm_eps, m->family, norm_eps);
    m->dims.vocab = config->model.vocab_size;
    m->dims.hidden = config->model.hidden;
    m->dims.layers = config->model.layers;
    m->dims.heads = config->model.heads;
    m->dims.ffn = config->model.ffn;
    m->dims.positions = config->model.max_positions;
    m->dims.types = config->model.type_vocab;
    m->dims.hidden_dropout = (float)config->model.hidden_dropout;
    m->dims.attention_dropout = (float)config->model.attention_dropout;
    m->dims.qa_dropout = (float)config->model.qa_dropout;
    m->dims.norm_eps = (float)config->model.norm_eps;
    m->dims.init_range = (float)config->model.init_range;
    return ST_OK;
}

enum status model_open(struct model *m, const struct run_config *config, enum dtype param_dtype)
{
    enum status st = ST_OK;
    struct model_builder b = {.model = m};
    memset(m, 0, sizeof *m);
    m->family = model_family_name(config->model.family);
    m->param_dtype = param_dtype;
    m->keep_all = config->train.recompute == RECOMPUTE_NONE;
    TRY_GOTO(st, out, set_dims(m, config));
    encoder_build(&b, families[config->model.family], config->train.max_unit_numel);
    TRY_GOTO(st, out, builder_finish(&b, config->train.freeze));
out:
    if (st != ST_OK)
        model_release(m);
    return st;
}

void model_release(struct model *m)
{
    mem_free(&m->units);
    mem_free(&m->params);
    mem_free(&m->tensors);
    mem_free(&m->param_offset);
    mem_free(&m->slots);
    pool_release(&m->pool);
    memset(m, 0, sizeof *m);
}

int64_t model_unit_numel(const struct model *m, int unit)
{
    const struct model_unit *u = &m->units[unit];
    if (u->param_count == 0)
        return 0;
    int last = u->first_param + u->param_count - 1;
    return m->param_offset[last] + model_param_numel(&m->params[last]);
}

int64_t model_total_numel(const struct model *m)
{
    int64_t total = 0;
    for (int i = 0; i < m->param_count; i++)
        total += model_param_numel(&m->params[i]);
    return total;
}

bool model_only_looked_up(const struct model *m, int unit)
{
    for (int u = 0; u < m->unit_count; u++)
        if (m->units[u].tied == unit)
            return false;
    return m->units[unit].look_up;
}

int64_t model_first_row(const struct model *m, int unit)
{
    const struct model_param *p = &m->params[m->units[unit].first_param];
    ASSERT(m->units[unit].look_up);
    return div_exact(p->piece[0].tensor_first, p->shape[1]);
}

int model_find_tensor(const struct model *m, const char *name)
{
    for (int i = 0; i < m->tensor_count; i++)
        if (strcmp(m->tensors[i].name, name) == 0)
            return i;
    return -1;
}

/* Elements [first, first + count) of a tensor. */
static void init_tensor_range(const struct model *m, const struct model_tensor *t, float *out,
                              int64_t first, int64_t count, uint64_t seed)
{
    if (t->init == INIT_NORMAL)
        rng_fill_normal(out, first, count, seed, rng_name_key(t->name), m->dims.init_range);
    else
        for (int64_t i = 0; i < count; i++)
            out[i] = t->init == INIT_ONE ? 1.0f : 0.0f;
    for (int64_t i = 0; i < count && first + i < t->init_zeros; i++)
        out[i] = 0.0f;
}

void model_init_range(const struct model *m, int unit, float *out, int64_t first, int64_t count,
                      uint64_t seed)
{
    const struct model_unit *u = &m->units[unit];
    for (int64_t i = 0; i < count; i++)
        out[i] = 0.0f;
    for (int i = u->first_param; i < u->first_param + u->param_count; i++) {
        const struct model_param *p = &m->params[i];
        for (int k = 0; k < p->piece_count; k++) {
            const struct param_piece *piece = &p->piece[k];
            int64_t start = m->param_offset[i] + piece->first; /* element of the flat parameter */
            int64_t from = start > first ? start : first;
            int64_t end = start + piece->numel, stop = first + count;
            int64_t to = end < stop ? end : stop;
            if (from < to)
                init_tensor_range(m, &m->tensors[piece->tensor], out + (from - first),
                                  piece->tensor_first + (from - start), to - from, seed);
        }
    }
}

struct unit_work model_unit_work(const struct model *m, int unit, struct batch_size size)
{
    return m->units[unit].work(m, &m->units[unit], size);
}

double model_step_flops(const struct model *m, int64_t tokens, double squared_lengths)
{
    struct batch_size size = {(double)tokens, squared_lengths};
    double flops = 0;
    for (int u = 0; u < m->unit_count; u++) {
        struct unit_work w = model_unit_work(m, u, size);
        flops += w.forward.product_flops + w.forward.attention_flops;
        flops += w.backward.product_flops + w.backward.attention_flops;
    }
    return flops;
}
