#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "comm/nccl_private.h"
#include "engine/base/clock.h"
#include "engine/device/cuda_check.h"

static void *job_main(void *argument)
{
    struct job *job = argument;
    job->st = CUDA(cudaSetDevice(job->comm->device->index));
    if (job->st == ST_OK)
        job->run(job);
    snprintf(job->message, sizeof job->message, "%s", status_message());
    __atomic_store_n(&job->running, 0, __ATOMIC_SEQ_CST);
    return NULL;
}

enum status nccl_job_start(struct nccl_comm *n, int which, void (*run)(struct job *job))
{
    struct job *job = &n->jobs[which];
    job->comm = n;
    job->run = run;
    job->which = which;
    pthread_t thread;
    __atomic_store_n(&job->running, 1, __ATOMIC_SEQ_CST);
    int error = pthread_create(&thread, NULL, job_main, job);
    if (error != 0) {
        __atomic_store_n(&job->running, 0, __ATOMIC_SEQ_CST);
        return FAIL(SYSTEM, "cannot start a thread: %s", strerror(error));
    }
    pthread_detach(thread);
    return ST_OK;
}

bool nccl_job_running(const struct job *job)
{
    return __atomic_load_n(&job->running, __ATOMIC_SEQ_CST) != 0;
}

enum status nccl_job_wait(struct nccl_comm *n, int which, int64_t wait_ms, bool check,
                          const char *what)
{
    struct job *job = &n->jobs[which];
    int64_t deadline = clock_ms() + wait_ms;
    while (nccl_job_running(job)) {
        if (clock_ms() > deadline)
            return FAIL(TIMEOUT, "rank %d: %s did not end in %.1f s", n->base.rank, what,
                        (double)wait_ms / 1000.0);
        if (check && n->rv != NULL)
            TRY(rendezvous_check(n->rv));
        clock_pause_us(POLL_US);
    }
    if (job->st != ST_OK)
        status_set_message(job->message);
    return job->st;
}

enum status nccl_call_start(struct nccl_comm *n, void (*run)(struct job *job))
{
    enum status st = ST_OK;
    pthread_mutex_lock(&n->lock);
    if (n->ended)
        st = FAIL(COMM, "%s", n->cause);
    else if (nccl_job_running(&n->jobs[CALL]))
        st = FAIL(COMM, "rank %d: the NCCL call before this one has not ended", n->base.rank);
    else
        st = nccl_job_start(n, CALL, run);
    pthread_mutex_unlock(&n->lock);
    return st;
}

bool nccl_jobs_end(struct nccl_comm *n, int64_t wait_ms)
{
    bool ended = true;
    int64_t end = clock_ms() + wait_ms;
    for (int i = 0; i < JOBS; i++) {
        int64_t left = end - clock_ms();
        if (nccl_job_wait(n, i, left > 0 ? left : 0, false, "an NCCL call") == ST_TIMEOUT)
            ended = false;
    }
    return ended;
}
