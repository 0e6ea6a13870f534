#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "comm/local.h"
#include "engine/base/log.h"
#include "engine/train/run.h"

struct rank_thread {
    struct rank_run run;
    struct binding binding;
    struct local_world *world;
    int rank, threads;
    pthread_t thread;
    enum status st;
    char message[4096];
};

/* @rank has no thread or no communicator: speak for it, so that the others do not wait. */
static void abort_world(struct local_world *world, int rank)
{
    char cause[4096];
    struct comm *comm = NULL;
    snprintf(cause, sizeof cause, "%s", status_message());
    if (local_comm_open(&comm, world, rank) == ST_OK)
        comm_abort(comm, cause);
    comm_close(&comm);
    status_set_message(cause);
}

static enum status rank_body(struct rank_thread *r, struct comm **comm)
{
    enum status st = ST_OK;
    struct device *device = NULL;
    binding_apply(&r->binding); /* before there are other threads, which inherit it */
    TRY_GOTO(st, out, local_comm_open(comm, r->world, r->rank));
    if (r->run.options->wrap_comm != NULL)
        TRY_GOTO(st, out, r->run.options->wrap_comm(r->run.options->context, comm));
    binding_check(&r->binding, "the communicator");
    TRY_GOTO(st, out,
             device_open(&device, DEVICE_CPU, r->run.config->train.precision, 0, r->threads));
    binding_check(&r->binding, "BLAS");
    if (r->run.options->alone != NULL)
        TRY_GOTO(st, out, r->run.options->alone(r->run.options->context, device, *comm));
    else
        TRY_GOTO(st, out, run_rank(&r->run, device, *comm));
out:
    if (st != ST_OK && *comm == NULL)
        abort_world(r->world, r->rank);
    else if (st != ST_OK && st != ST_INTERRUPTED)
        comm_abort(*comm, status_message());
    device_close(&device);
    return st;
}

static void *rank_main(void *argument)
{
    struct rank_thread *r = argument;
    struct comm *comm = NULL;
    log_set_rank(r->rank);
    r->st = rank_body(r, &comm);
    snprintf(r->message, sizeof r->message, "%s", status_message());
    comm_close(&comm);
    return NULL;
}

/* A rank that failed by itself names the cause; the others only say that a peer is gone. */
static enum status first_cause(const struct rank_thread *ranks, int count)
{
    const struct rank_thread *cause = NULL;
    for (int i = 0; i < count; i++) {
        if (ranks[i].st == ST_OK)
            continue;
        if (cause == NULL || (cause->st == ST_COMM && ranks[i].st != ST_COMM))
            cause = &ranks[i];
    }
    if (cause == NULL)
        return ST_OK;
    status_set_message(cause->message);
    return cause->st;
}

enum status run_local(const struct run_config *config, const struct run_data *data,
                      const struct run_options *options, const int *signal_flag)
{
    int count = (int)config->train.ranks, started = 0;
    enum status st = ST_OK;
    struct rank_thread *ranks = NULL;
    struct binding *bindings = NULL;
    struct local_world *world = NULL;
    struct metrics metrics = {0};
    TRY(mem_alloc(&ranks, sizeof *ranks * (size_t)count));
    TRY_GOTO(st, out, mem_alloc(&bindings, sizeof *bindings * (size_t)count));
    TRY_GOTO(st, out, binding_plan_threads(bindings, config, count));
    TRY_GOTO(st, out, local_world_open(&world, count, config->train.timeout_s * 1000));
    if (!options->quiet)
        TRY_GOTO(st, out, metrics_open(&metrics, config));
    for (; started < count; started++) {
        struct rank_thread *r = &ranks[started];
        *r = (struct rank_thread){.run = {config, data, options, signal_flag,
                                          started == 0 && !options->quiet ? &metrics : NULL,
                                          &r->binding},
                                  .binding = bindings[started],
                                  .world = world,
                                  .rank = started,
                                  .threads = run_threads(config, count)};
        int error = pthread_create(&r->thread, NULL, rank_main, r);
        if (error != 0) {
            st = FAIL(SYSTEM, "cannot start the thread of rank %d: %s", started, strerror(error));
            abort_world(world, started);
            break;
        }
    }
    for (int i = 0; i < started; i++)
        pthread_join(ranks[i].thread, NULL);
    if (st == ST_OK)
        st = first_cause(ranks, count);
out:
    metrics_close(&metrics);
    local_world_close(&world);
    mem_free(&bindings);
    mem_free(&ranks);
    return st;
}
