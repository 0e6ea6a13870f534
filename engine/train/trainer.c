#include "engine/train/trainer.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/log.h"
#include "engine/base/text.h"
#include "engine/train/auto_stage.h"
#include "engine/train/bus.h"
#include "engine/train/capture.h"
#include "engine/train/checkpoint.h"
#include "engine/train/checkpoint_model.h"
#include "engine/train/evaluate.h"
#include "engine/train/growth.h"
#include "engine/train/products.h"
#include "engine/train/weights.h"

int64_t trainer_total_steps(const struct run_config *config, int64_t samples, int world_size)
{
    if (config->train.steps >= 0)
        return config->train.steps;
    int64_t batch = config->train.micro_batch * config->train.grad_accum * world_size;
    return (samples + batch - 1) / batch * config->train.epochs;
}

static int64_t larger_of(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

void trainer_rows(struct setup_rows *rows, const struct run_config *config,
                  const struct run_data *data, struct sampler *sampler, int64_t steps)
{
    int64_t micro_batch = config->eval.micro_batch;
    int64_t eval = evaluator_max_rows(&data->eval, micro_batch);
    if (config->eval.train_samples > 0)
        eval = larger_of(eval, evaluator_max_rows(&data->train, micro_batch));
    *rows = (struct setup_rows){.train = 1, .eval = larger_of(eval, 1)};
    if (data->train.count == 0)
        return;
    rows->train = larger_of(sampler_max_tokens(sampler, steps), 1);
    rows->train_mean = sampler_mean_length(sampler) * (double)config->train.micro_batch;
}

/* ---- opening ---- */

/* What all ranks must have in common. Of the data and its order all: a rank may need the others'
 * tokens. The arena stands for what else of the configuration decides what is sent. */
enum {
    SAME_MODEL,
    SAME_DATA,
    SAME_VOCAB,
    SAME_SAMPLES,
    SAME_SEED,
    SAME_BATCH,
    SAME_STEPS,
    SAME_ARENA,
    SAMES
};
static const char *const same_names[SAMES] = {"the layout of the model",
                                              "the content of data.train",
                                              "the content of data.vocab",
                                              "the number of samples",
                                              "train.seed",
                                              "the sequences of a step",
                                              "the number of steps",
                                              "the bytes of the arena, by its configuration"};

static enum status compare_ranks(struct trainer *t)
{
    const uint64_t mine[SAMES] = {
        [SAME_MODEL] = layout_fingerprint(&t->setup.layout),
        [SAME_DATA] = t->data->train.data.content_hash,
        [SAME_VOCAB] = t->data->vocab.content_hash,
        [SAME_SAMPLES] = (uint64_t)t->sampler.count,
        [SAME_SEED] = (uint64_t)t->config->train.seed,
        [SAME_BATCH] = (uint64_t)t->sampler.global_batch,
        [SAME_STEPS] = (uint64_t)t->total_steps,
        [SAME_ARENA] = t->account.arena_bytes,
    };
    uint64_t *all = NULL;
    enum status st = ST_OK;
    TRY(mem_alloc(&all, sizeof mine * (size_t)t->comm->world_size));
    TRY_GOTO(st, out, comm_exchange(t->comm, all, mine, sizeof mine));
    for (int i = SAMES; i < t->comm->world_size * SAMES && st == ST_OK; i++)
        if (all[i] != all[i % SAMES])
            st = FAIL(INVALID,
                      "rank %d differs from rank 0 in %s: %" PRIu64 " and %" PRIu64
                      "; all ranks take the same model, data and configuration",
                      i / SAMES, same_names[i % SAMES], all[i], all[i % SAMES]);
out:
    mem_free(&all);
    return st;
}

static enum status open_slots(struct trainer *t)
{
    size_t block_bytes = t->setup.spec.batch_bytes;
    for (int i = 0; i < STEP_SLOTS; i++) {
        struct step_slot *slot = &t->slots[i];
        slot->step = -1;
        TRY(device_alloc_host(t->device, (void **)&slot->host, sizeof *slot->host));
        TRY(device_alloc_host(t->device, (void **)&slot->block, block_bytes));
        TRY(device_alloc_host(t->device, (void **)&slot->result, sizeof *slot->result));
        TRY(event_open(t->device, &slot->done));
        t->mail.slot[i] = (struct step_slot_mail){slot->host, slot->block, slot->result};
    }
    t->mail.batch = executor_shared(&t->executor, SHARED_BATCH);
    t->mail.batch_bytes = block_bytes;
    t->executor.mail = &t->mail;
    const struct batch_layout *l = &t->setup.train_batch;
    TRY(mem_alloc(&t->micro, sizeof *t->micro * (size_t)t->config->train.grad_accum));
    TRY(mem_alloc(&t->picked, sizeof *t->picked * (size_t)l->sequences));
    int64_t sorted = l->ranks > 0 ? l->ranks * l->rows : l->rows;
    return mem_alloc(&t->sort_scratch, sizeof *t->sort_scratch * (size_t)sorted);
}

static struct optim_hyper hyper_of(const struct run_config *config, int64_t total_steps)
{
    int64_t warmup = config->optim.warmup_steps;
    if (warmup < 0)
        warmup = (int64_t)ceil(config->optim.warmup_ratio * (double)total_steps);
    return (struct optim_hyper){
        .lr = (float)config->optim.lr,
        .beta1 = (float)config->optim.beta1,
        .beta2 = (float)config->optim.beta2,
        .eps = (float)config->optim.eps,
        .weight_decay = (float)config->optim.weight_decay,
        .max_grad_norm = (float)config->optim.max_grad_norm,
        .warmup_steps = warmup,
        .total_steps = total_steps,
        .schedule = config->optim.schedule,
    };
}

static enum status plan_run(struct trainer *t)
{
    const struct run_config *config = t->config;
    const struct split *train = &t->data->train;
    int world = t->comm->world_size;
    struct setup_rows rows;
    if (train->count > 0) {
        TRY(sampler_init(&t->sampler, train->rows, train->count, world,
                         (int)config->train.grad_accum, config->train.micro_batch,
                         (uint64_t)config->train.seed));
        t->total_steps = trainer_total_steps(config, train->count, world);
    }
    trainer_rows(&rows, config, t->data, &t->sampler, t->total_steps);
    int stage = (int)config->train.zero_stage;
    if (stage == ZERO_STAGE_AUTO) {
        TRY(comm_ready(t->comm)); /* what is free counts, and a communicator takes some */
        TRY(auto_stage(&stage, t, rows));
    }
    TRY(setup_init(&t->setup, config, t->device, world, stage, rows));
    if (t->metrics != NULL)
        t->metrics->zero_stage = stage;
    t->setup.train_batch.pad_id = t->setup.eval_batch.pad_id = t->data->vocab.pad_id;
    return plan_build(&t->plan, &t->account, &t->setup.spec);
}

/* What does not fit ends here, and not with a process that the system kills. Rank 0 asks for all
 * ranks of its process, before any of them has memory. Cards say so themselves. */
static enum status check_room(const struct trainer *t)
{
    size_t room = 0, arena = t->account.arena_bytes;
    bool threads = strcmp(t->comm->ops->name, "local") == 0;
    size_t ranks = threads ? (size_t)t->comm->world_size : 1;
    char needs[32], has[32];
    if (t->device->library != NULL || (threads && t->comm->rank != 0))
        return ST_OK;
    TRY(device_memory_free(t->device, &room));
    if (arena <= room / ranks)
        return ST_OK;
    text_of_bytes(needs, arena);
    text_of_bytes(has, room);
    return FAIL(MEMORY,
                "out of memory: a rank needs %s, and %zu of them share the %s that are free "
                "(tessera plan shows what for)",
                needs, ranks, has);
}

/* Of what came with the arena, the part that its registration took. Where the communicator was
 * opened meanwhile (@overlapped), it has what the arena, whose size is known, did not take, and the
 * registration came with its end. */
static void name_windows(struct trainer *t, bool overlapped)
{
    enum { GRAIN = 2 << 20 /* the card gives memory in pieces of that */ };
    struct card_memory *m = &t->card;
    size_t windows = t->comm->window_bytes, both = m->communicator + m->arena;
    size_t arena = (size_t)round_up((int64_t)t->executor.arena_bytes, GRAIN);
    size_t *of = overlapped ? &m->communicator : &m->arena;
    if (overlapped) {
        m->arena = arena < both ? arena : both;
        m->communicator = both - m->arena;
    }
    m->windows = windows < *of ? windows : *of;
    *of -= m->windows;
    if (t->comm->memory_text[0] != '\0')
        log_info("train", "%s", t->comm->memory_text);
}

/* While the ranks are still being connected, what a rehearsal can do without them. */
static enum status meet(struct trainer *t, bool overlapped)
{
    if (overlapped) {
        TRY(capture_rehearse_alone(t));
        start_times_part(t->start, "kernels");
    }
    TRY(comm_ready(t->comm));
    if (overlapped)
        TRY(card_grown(t, &t->card.communicator));
    name_windows(t, overlapped);
    if (overlapped)
        start_times_part(t->start, "connections");
    return ST_OK;
}

/* In what is no state, and will be written before it is read. */
static enum status say_bus(const struct trainer *t)
{
    const struct executor *ex = &t->executor;
    size_t state = (size_t)round_up((int64_t)t->account.persistent_bytes, ARENA_ALIGN);
    if (!t->says_bus || ex->arena == NULL || state >= ex->arena_bytes)
        return ST_OK;
    TRY(bus_report(t->device, t->comm, ex->arena + state, ex->arena_bytes - state));
    start_times_part(t->start, "bus");
    return ST_OK;
}

/* The state of a checkpoint, the weights of one or of a model's folder, or random ones. */
static enum status fill_weights(struct trainer *t)
{
    bool resumed = false;
    TRY(checkpoint_resume(t, &resumed));
    if (resumed)
        return ST_OK;
    const char *dir = t->config->model.init_from;
    if (dir[0] == '\0')
        return weights_init(t);
    return checkpoint_is_one(dir) ? checkpoint_load_weights(t, dir) : weights_load(t, dir);
}

enum status trainer_open(struct trainer *t, const struct run_config *config,
                         const struct run_data *data, struct device *device, struct comm *comm,
                         struct metrics *metrics, const struct executor_options *options)
{
    t->config = config;
    t->data = data;
    t->device = device;
    t->comm = comm;
    t->metrics = metrics;
    t->best_metric = t->best_value = (double)-INFINITY;
    t->best_step = -1;
    TRY(plan_run(t));
    TRY(process_grown(t)); /* the others wait in compare_ranks() for rank 0 */
    TRY(check_room(t));
    TRY(compare_ranks(t));
    start_times_part(t->start, "plan");
    TRY(card_grown(t, &t->card.communicator));
    struct optim_hyper hyper = hyper_of(config, t->total_steps);
    TRY(executor_open(&t->executor, device, comm, &t->setup.model, &t->setup.layout, &t->plan,
                      &t->account, &hyper, options));
    TRY(card_grown(t, &t->card.arena));
    TRY(open_slots(t));
    TRY(evaluator_open(&t->evaluator, t));
    start_times_part(t->start, "memory");
#ifdef TESSERA_CUDA
    if (device->fixed_rows)
        TRY(products_open(t));
#endif
    bool overlapped = comm->opening && device->fixed_rows;
    TRY(meet(t, overlapped));
    TRY(say_bus(t));
    if (device->fixed_rows) {
        TRY(capture_rehearse(t));
        start_times_part(t->start, overlapped ? "rehearsal" : "kernels");
    }
    TRY(fill_weights(t));
    start_times_part(t->start, "weights");
#ifdef TESSERA_CUDA
    if (device->fixed_rows)
        TRY(products_plan(t));
#endif
    if (device->fixed_rows)
        start_times_part(t->start, "products");
    TRY(card_grown(t, &t->card.set_up));
    if (device->fixed_rows && config->train.graphs && t->total_steps > 0)
        TRY(capture_steps(t));
    if (device->fixed_rows)
        start_times_part(t->start, "graphs");
    TRY(card_grown(t, &t->card.graphs));
    TRY(checkpointer_open(&t->checkpointer, t));
    TRY(card_grown(t, &t->card.checkpoints));
    card_log(&t->card);
    return ST_OK;
}

void trainer_close(struct trainer *t)
{
    if (t->device == NULL)
        return;
    device_settle(t->device);
    for (int i = 0; i < STEP_SLOTS; i++) {
        struct step_slot *slot = &t->slots[i];
        if (slot->result != NULL)
            event_close(&slot->done);
        device_free_host(t->device, (void **)&slot->host);
        device_free_host(t->device, (void **)&slot->block);
        device_free_host(t->device, (void **)&slot->result);
    }
#ifdef TESSERA_CUDA
    if (t->device->fixed_rows)
        products_close(t);
#endif
    weights_save_drop(&t->writing);
    checkpointer_close(&t->checkpointer);
    trace_close(&t->trace);
    op_profile_close(&t->profile);
    mem_free(&t->squared);
    evaluator_close(&t->evaluator, t);
    mem_free(&t->micro);
    mem_free(&t->picked);
    mem_free(&t->sort_scratch);
    executor_close(&t->executor);
    mem_free(&t->beside);
    gemm_table_release(&t->gemm_plan);
    plan_release(&t->plan);
    setup_release(&t->setup);
    sampler_release(&t->sampler);
    memset(t, 0, sizeof *t);
}
