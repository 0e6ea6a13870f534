#include "io/tensorboard.h"

#include <isa-l/crc.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "io/tensorboard.pb-c.h"

enum { HEAD_BYTES = 12, TAIL_BYTES = 4 };

static void put_little(unsigned char *to, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        to[i] = (unsigned char)(value >> (8 * i));
}

/* ISA-L's function leaves both inversions of CRC-32C to its caller. */
static uint32_t masked_crc(unsigned char *bytes, size_t count)
{
    uint32_t crc = ~crc32_iscsi(bytes, (int)count, 0xFFFFFFFFu);
    return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

static enum status append(struct tensorboard *tb, Tensorboard__Event *event)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    event->wall_time = (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
    size_t bytes = tensorboard__event__get_packed_size(event);
    ASSERT(bytes <= TENSORBOARD_MAX_TEXT);
    unsigned char *r = tb->record;
    put_little(r, bytes, 8);
    put_little(r + 8, masked_crc(r, 8), 4);
    tensorboard__event__pack(event, r + HEAD_BYTES);
    put_little(r + HEAD_BYTES + bytes, masked_crc(r + HEAD_BYTES, bytes), TAIL_BYTES);
    return file_log_append(&tb->log, (const char *)r, HEAD_BYTES + bytes + TAIL_BYTES);
}

static enum status append_summary(struct tensorboard *tb, int64_t step,
                                  Tensorboard__Summary__Value **values, size_t count)
{
    Tensorboard__Summary summary = TENSORBOARD__SUMMARY__INIT;
    Tensorboard__Event event = TENSORBOARD__EVENT__INIT;
    summary.value = values;
    summary.n_value = count;
    event.step = step;
    event.what_case = TENSORBOARD__EVENT__WHAT_SUMMARY;
    event.summary = &summary;
    return append(tb, &event);
}

static enum status begin(struct tensorboard *tb, int64_t first_step)
{
    char version[] = "brain.Event:2";
    Tensorboard__Event event = TENSORBOARD__EVENT__INIT;
    event.what_case = TENSORBOARD__EVENT__WHAT_FILE_VERSION;
    event.file_version = version;
    TRY(append(tb, &event));
    if (first_step == 0)
        return ST_OK;
    Tensorboard__SessionLog session = TENSORBOARD__SESSION_LOG__INIT;
    Tensorboard__Event start = TENSORBOARD__EVENT__INIT;
    session.status = TENSORBOARD__SESSION_LOG__STATUS__START;
    start.step = first_step;
    start.what_case = TENSORBOARD__EVENT__WHAT_SESSION_LOG;
    start.session_log = &session;
    return append(tb, &start);
}

enum status tensorboard_open(struct tensorboard *tb, const char *dir, int64_t first_step)
{
    enum status st = ST_OK;
    char host[65] = "host", name[160], path[1400];
    struct timespec now;
    memset(tb, 0, sizeof *tb);
    tb->log.fd = -1;
    gethostname(host, sizeof host - 1);
    clock_gettime(CLOCK_REALTIME, &now);
    /* Readers take the files of a folder in the order of their names, so the time comes first. */
    snprintf(name, sizeof name, "events.out.tfevents.%010lld.%09ld.%s.%d", (long long)now.tv_sec,
             now.tv_nsec, host, (int)getpid());
    TRY(file_make_dirs(dir));
    TRY(path_join(path, sizeof path, dir, name));
    TRY(mem_alloc(&tb->record, HEAD_BYTES + TENSORBOARD_MAX_TEXT + TAIL_BYTES));
    TRY_GOTO(st, out, file_log_open(&tb->log, path));
    TRY_GOTO(st, out, begin(tb, first_step));
    return ST_OK;
out:
    if (tb->log.fd >= 0 && file_log_close(&tb->log) != ST_OK)
        tb->log.fd = -1; /* the first failure is the one to tell */
    mem_free(&tb->record);
    return st;
}

enum status tensorboard_scalars(struct tensorboard *tb, int64_t step,
                                const struct tensorboard_scalar *scalars, int count)
{
    Tensorboard__Summary__Value values[TENSORBOARD_MAX_SCALARS], *pointers[TENSORBOARD_MAX_SCALARS];
    size_t used = 0;
    ASSERT(count <= TENSORBOARD_MAX_SCALARS);
    for (int i = 0; i < count; i++) {
        if (!isfinite(scalars[i].value))
            continue;
        Tensorboard__Summary__Value *v = pointers[used] = &values[used];
        used++;
        tensorboard__summary__value__init(v);
        v->tag = (char *)(uintptr_t)scalars[i].tag; /* packing only reads it */
        v->data_case = TENSORBOARD__SUMMARY__VALUE__DATA_SIMPLE_VALUE;
        v->simple_value = (float)scalars[i].value;
    }
    return append_summary(tb, step, pointers, used);
}

enum status tensorboard_text(struct tensorboard *tb, int64_t step, const char *tag,
                             const char *text)
{
    char plugin_name[] = "text";
    size_t bytes = strlen(text);
    Tensorboard__Summary__Metadata__Plugin plugin = TENSORBOARD__SUMMARY__METADATA__PLUGIN__INIT;
    Tensorboard__Summary__Metadata metadata = TENSORBOARD__SUMMARY__METADATA__INIT;
    Tensorboard__Tensor__Shape__Dim dim = TENSORBOARD__TENSOR__SHAPE__DIM__INIT, *dims = &dim;
    Tensorboard__Tensor__Shape shape = TENSORBOARD__TENSOR__SHAPE__INIT;
    Tensorboard__Tensor tensor = TENSORBOARD__TENSOR__INIT;
    Tensorboard__Summary__Value value = TENSORBOARD__SUMMARY__VALUE__INIT, *values = &value;
    ProtobufCBinaryData content = {
        .len = bytes < TENSORBOARD_MAX_TEXT / 2 ? bytes : TENSORBOARD_MAX_TEXT / 2,
        .data = (uint8_t *)(uintptr_t)text}; /* packing only reads it */
    plugin.plugin_name = plugin_name;
    metadata.plugin_data = &plugin;
    dim.size = 1;
    shape.dim = &dims;
    shape.n_dim = 1;
    tensor.dtype = TENSORBOARD__TENSOR__TYPE__STRING;
    tensor.tensor_shape = &shape;
    tensor.string_val = &content;
    tensor.n_string_val = 1;
    value.tag = (char *)(uintptr_t)tag;
    value.data_case = TENSORBOARD__SUMMARY__VALUE__DATA_TENSOR;
    value.tensor = &tensor;
    value.metadata = &metadata;
    return append_summary(tb, step, &values, 1);
}

enum status tensorboard_close(struct tensorboard *tb)
{
    if (tb->record == NULL)
        return ST_OK;
    enum status st = file_log_close(&tb->log);
    mem_free(&tb->record);
    memset(tb, 0, sizeof *tb);
    return st;
}
