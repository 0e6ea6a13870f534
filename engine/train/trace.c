#include "engine/train/trace.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "engine/base/text_buffer.h"

struct times {
    struct device_timer begin, end;
    struct device_timer issued; /* of a collective of the CPU, as the next two */
    double waited_ms;
    bool pending; /* it was not done when it had been issued */
    bool open;    /* and nobody has waited for it yet */
};

struct trace {
    struct device *device; /* borrowed, as the next two */
    const struct program *program;
    const struct model *model;
    struct times *times; /* owned; one an instruction */
    struct device_timer joined, wait_begin;
    int waits_for; /* the instruction since wait_begin */
};

/* ---- timers ---- */

static enum status open_timers(struct trace *t)
{
    TRY(device_timer_open(t->device, &t->joined));
    TRY(device_timer_open(t->device, &t->wait_begin));
    TRY(mem_alloc(&t->times, sizeof *t->times * (size_t)t->program->instr_count));
    for (int i = 0; i < t->program->instr_count; i++) {
        TRY(device_timer_open(t->device, &t->times[i].begin));
        TRY(device_timer_open(t->device, &t->times[i].end));
        TRY(device_timer_open(t->device, &t->times[i].issued));
    }
    return ST_OK;
}

enum status trace_open(struct trace **out, struct device *device, const struct program *p,
                       const struct model *model)
{
    struct trace *t = NULL;
    *out = NULL;
    TRY(mem_alloc(&t, sizeof *t));
    t->device = device;
    t->program = p;
    t->model = model;
    enum status st = open_timers(t);
    if (st != ST_OK)
        trace_close(&t);
    *out = t;
    return st;
}

void trace_close(struct trace **trace)
{
    struct trace *t = *trace;
    if (t == NULL)
        return;
    for (int i = 0; t->times != NULL && i < t->program->instr_count; i++) {
        device_timer_close(&t->times[i].begin);
        device_timer_close(&t->times[i].end);
        device_timer_close(&t->times[i].issued);
    }
    device_timer_close(&t->joined);
    device_timer_close(&t->wait_begin);
    mem_free(&t->times);
    mem_free(trace);
}

enum status trace_begin(struct trace *t, int instr, struct stream *s)
{
    return device_timer_record(&t->times[instr].begin, s);
}

enum status trace_end(struct trace *t, int instr, struct stream *s, bool pending)
{
    struct times *x = &t->times[instr];
    x->open = x->pending = pending;
    return device_timer_record(pending ? &x->issued : &x->end, s);
}

enum status trace_waits(struct trace *t, int instr, struct stream *s)
{
    t->waits_for = instr;
    return device_timer_record(&t->wait_begin, s);
}

/* Those issued up to @instr are complete. */
static enum status close_until(struct trace *t, int instr, struct stream *s)
{
    for (int i = 0; i <= instr; i++) {
        if (!t->times[i].open)
            continue;
        t->times[i].open = false;
        TRY(device_timer_record(&t->times[i].end, s));
    }
    return ST_OK;
}

enum status trace_completed(struct trace *t, int instr, struct stream *s)
{
    struct times *x = &t->times[instr];
    if (!x->open) /* then the wait was for no collective, and none is known to be complete */
        return ST_OK;
    TRY(close_until(t, instr, s));
    ASSERT(t->waits_for == instr);
    return device_timer_elapsed_ms(&t->wait_begin, &x->end, &x->waited_ms);
}

enum status trace_join(struct trace *t, struct stream *s)
{
    TRY(close_until(t, t->program->instr_count - 1, s));
    return device_timer_record(&t->joined, s);
}

/* ---- the file ---- */

/* Names come from the driver and the model; nothing in a JSON string may end it early. */
static const char *plain(char out[128], const char *name)
{
    snprintf(out, 128, "%s", name);
    for (char *c = out; *c != '\0'; c++)
        if (*c == '"' || *c == '\\' || (unsigned char)*c < ' ')
            *c = '_';
    return out;
}

static size_t collective_bytes(const struct trace *t, const struct instr *in)
{
    if (in->op != OP_GATHER && in->op != OP_REDUCE)
        return 0;
    size_t most = 0; /* the whole flat buffer, beside its shard */
    for (int k = 0; k < in->operand_count; k++) {
        size_t bytes = t->program->buffers[in->operands[k].buffer].bytes;
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* What the instruction took of its stream's time, on a CPU of the rank's: a collective that was
 * not done at once is away between its issue and the wait for it. */
static enum status busy_ms(const struct times *x, double dur, double *busy)
{
    *busy = dur;
    if (!x->pending)
        return ST_OK;
    TRY(device_timer_elapsed_ms(&x->begin, &x->issued, busy));
    *busy += x->waited_ms;
    return ST_OK;
}

static enum status put_instr(struct text_buffer *text, const struct trace *t, int index, int rank)
{
    const struct instr *in = &t->program->instrs[index];
    double ts = 0, dur = 0, busy = 0;
    char unit[128], label[64] = "";
    TRY(device_timer_elapsed_ms(&t->times[0].begin, &t->times[index].begin, &ts));
    TRY(device_timer_elapsed_ms(&t->times[index].begin, &t->times[index].end, &dur));
    TRY(busy_ms(&t->times[index], dur, &busy));
    plain(unit, in->unit >= 0 ? t->model->units[in->unit].name : "");
    if (in->micro_batch >= 0)
        snprintf(label, sizeof label, " m%d", in->micro_batch);
    text_put(text,
             ",\n{\"name\":\"%s%s%s%s\",\"cat\":\"%s\",\"ph\":\"X\",\"pid\":%d,\"tid\":%d,"
             "\"ts\":%.3f,\"dur\":%.3f,",
             program_op_name(in->op), unit[0] != '\0' ? " " : "", unit, label,
             program_stream_name(in->stream), rank, (int)in->stream, ts * 1e3, dur * 1e3);
    text_put(text,
             "\"args\":{\"instr\":%d,\"op\":\"%s\",\"unit\":\"%s\",\"micro_batch\":%d,"
             "\"bytes\":%zu,\"busy\":%.3f}}",
             index, program_op_name(in->op), unit, in->micro_batch, collective_bytes(t, in),
             busy * 1e3);
    return ST_OK;
}

static enum status put_all(struct text_buffer *text, const struct trace *t,
                           const struct trace_facts *f)
{
    double step_ms = 0;
    char device[128];
    text_put(text,
             "{\"traceEvents\":[\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,"
             "\"args\":{\"name\":\"rank %d\"}}",
             f->rank, f->rank);
    for (int s = 0; s < PROGRAM_STREAMS; s++)
        text_put(text,
                 ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,"
                 "\"args\":{\"name\":\"%s\"}}",
                 f->rank, s, program_stream_name((enum program_stream)s));
    for (int i = 0; i < t->program->instr_count; i++)
        if (t->program->instrs[i].op != OP_CUT)
            TRY(put_instr(text, t, i, f->rank));
    TRY(device_timer_elapsed_ms(&t->times[0].begin, &t->joined, &step_ms));
    text_put(text,
             "],\n\"displayTimeUnit\":\"ms\",\n\"otherData\":{\"step\":%" PRId64
             ",\"rank\":%d,\"world_size\":%d,\"tokens\":%" PRId64
             ",\"device\":\"%s\",\"captured\":%s,\"step_us\":%.3f}}\n",
             f->step, f->rank, f->world_size, f->tokens, plain(device, t->device->name),
             f->captured ? "true" : "false", step_ms * 1e3);
    return text->st;
}

enum status trace_write(const struct trace *t, const char *path, const struct trace_facts *facts)
{
    enum status st = ST_OK;
    struct text_buffer text = {0};
    char name[1024];
    size_t stem = strlen(path);
    int n;
    if (stem > 5 && strcmp(path + stem - 5, ".json") == 0)
        stem -= 5;
    if (facts->world_size > 1)
        n = snprintf(name, sizeof name, "%.*s.rank%d.json", (int)stem, path, facts->rank);
    else
        n = snprintf(name, sizeof name, "%s", path);
    if (n < 0 || (size_t)n >= sizeof name)
        return FAIL(INVALID, "--trace: the file's name is too long");
    TRY_GOTO(st, out, put_all(&text, t, facts));
    TRY_GOTO(st, out, file_write(name, text.data, text.bytes));
out:
    mem_free(&text.data);
    return st;
}
