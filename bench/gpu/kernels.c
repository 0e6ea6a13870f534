/*
 * bench/gpu/kernels.c - record every kernel, copy and fill of a program, with CUPTI.
 *
 * A shared library that the CUDA driver loads into a process that has CUDA_INJECTION64_PATH set to
 * it; the program itself stays as it is. At the end there is a file $TESSERA_KERNELS.PID.csv:
 *
 *     start_ns,end_ns,stream,blocks,threads,registers,shared_bytes,name
 *
 * Times are of one clock; names are mangled. A block has threads, of which each has registers, and
 * bytes of shared memory: what another kernel's block finds free beside it. Zeros for copies.
 *
 * bench/gpu/breakdown.py --kernels reads it. Kernels inside graphs are recorded one by one, which
 * costs a little time for each: step times come from runs without this.
 */
#include <cupti.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { BUFFERS = 8, BUFFER_BYTES = 4 << 20 };

static struct {
    _Alignas(64) uint8_t bytes[BUFFERS][BUFFER_BYTES];
    bool taken[BUFFERS];
    pthread_mutex_t lock;
    FILE *file;
    size_t dropped;
} state = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void CUPTIAPI give_buffer(uint8_t **buffer, size_t *bytes, size_t *most_records)
{
    *buffer = NULL;
    *bytes = 0;
    *most_records = 0;
    pthread_mutex_lock(&state.lock);
    for (int i = 0; i < BUFFERS && *buffer == NULL; i++) {
        if (state.taken[i])
            continue;
        state.taken[i] = true;
        *buffer = state.bytes[i];
        *bytes = BUFFER_BYTES;
    }
    pthread_mutex_unlock(&state.lock);
}

/* What a kernel takes. */
struct shape {
    long blocks;
    int threads, registers, shared_bytes;
};

static void put(uint64_t start, uint64_t end, uint32_t stream, struct shape s, const char *name)
{
    fprintf(state.file, "%llu,%llu,%u,%ld,%d,%d,%d,\"%s\"\n", (unsigned long long)start,
            (unsigned long long)end, stream, s.blocks, s.threads, s.registers, s.shared_bytes,
            name);
}

static void write_record(const CUpti_Activity *record)
{
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
        const CUpti_ActivityKernel10 *k = (const CUpti_ActivityKernel10 *)record;
        struct shape s = {(long)k->gridX * k->gridY * k->gridZ, k->blockX * k->blockY * k->blockZ,
                          k->registersPerThread, k->staticSharedMemory + k->dynamicSharedMemory};
        put(k->start, k->end, k->streamId, s, k->name != NULL ? k->name : "?");
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
        const CUpti_ActivityMemcpy6 *m = (const CUpti_ActivityMemcpy6 *)record;
        put(m->start, m->end, m->streamId, (struct shape){0}, "[copy]");
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
        const CUpti_ActivityMemset4 *m = (const CUpti_ActivityMemset4 *)record;
        put(m->start, m->end, m->streamId, (struct shape){0}, "[fill]");
    }
}

static void open_file(void)
{
    char path[1024];
    const char *prefix = getenv("TESSERA_KERNELS");
    snprintf(path, sizeof path, "%s.%d.csv", prefix != NULL ? prefix : "kernels", (int)getpid());
    state.file = fopen(path, "w");
    if (state.file != NULL)
        fprintf(state.file, "start_ns,end_ns,stream,blocks,threads,registers,shared_bytes,name\n");
}

static void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t bytes,
                                 size_t valid)
{
    (void)stream;
    (void)bytes;
    CUpti_Activity *record = NULL;
    size_t dropped = 0;
    pthread_mutex_lock(&state.lock);
    if (state.file == NULL)
        open_file();
    while (state.file != NULL &&
           cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS)
        write_record(record);
    if (cuptiActivityGetNumDroppedRecords(context, 0, &dropped) == CUPTI_SUCCESS)
        state.dropped += dropped;
    for (int i = 0; i < BUFFERS; i++)
        if (buffer == state.bytes[i])
            state.taken[i] = false;
    pthread_mutex_unlock(&state.lock);
}

static void finish(void)
{
    cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    if (state.dropped > 0)
        fprintf(stderr, "kernels: %zu records were lost\n", state.dropped);
    if (state.file != NULL)
        fclose(state.file);
    state.file = NULL;
}

/* The driver calls this when the process first uses CUDA. Returns 1 for success. */
int InitializeInjection(void);
__attribute__((visibility("default"))) int InitializeInjection(void)
{
    static const CUpti_ActivityKind kinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                               CUPTI_ACTIVITY_KIND_MEMCPY,
                                               CUPTI_ACTIVITY_KIND_MEMSET};
    if (cuptiActivityRegisterCallbacks(give_buffer, take_buffer) != CUPTI_SUCCESS)
        return 0;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (cuptiActivityEnable(kinds[i]) != CUPTI_SUCCESS)
            return 0;
    atexit(finish);
    return 1;
}
