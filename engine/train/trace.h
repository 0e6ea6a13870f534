/*
 * engine/train/trace.h - one step as a time line (tessera train --trace FILE).
 *
 * Every instruction of the step gets two timers on its own stream, one before and one behind it;
 * what lies between two instructions of a stream is waiting. The file is a Chrome trace, for
 * https://ui.perfetto.dev or chrome://tracing, one a rank: pid is the rank, tid the stream.
 *
 *     {"traceEvents": [
 *       {"name":"BACKWARD block.3 m0","cat":"compute","ph":"X","pid":0,"tid":0,
 *         "ts":1024.250,"dur":310.500,
 *         "args":{"instr":71,"op":"BACKWARD","unit":"block.3","micro_batch":0,"bytes":0,
 *           "busy":310.500}}, ...],
 *     "otherData": {"step":5,"rank":0,"world_size":4,"device":"...","captured":true,"step_us":..}}
 *
 * ts and dur are microseconds since the begin of the step's first instruction on this rank; "bytes"
 * is what a collective gathers or reduces, whole; "busy" is dur, but for a collective of the CPU
 * only what the rank itself spent on it, issuing and waiting: these add up to the step. On CUDA a
 * captured step is captured once more with the timers in it, so that the time line is that of a
 * replay. On the CPU a collective ends when the rank first waits for it: peers may have been done
 * before.
 */
#ifndef ENGINE_TRAIN_TRACE_H
#define ENGINE_TRAIN_TRACE_H

#include "engine/device/device.h"
#include "engine/model/model.h"
#include "shard/program.h"

C_BEGIN

/* What a user asks for. */
struct trace_request {
    const char *path; /* NULL: no trace */
    int64_t step;     /* counted from 1; the last one if the run has fewer */
};

struct trace; /* the timers of one program */

/**
 * trace_open() - timers for every instruction of @p.
 * @out: trace_close() releases it. Borrows @device, @p and @model.
 *
 * Return: ST_OK; ST_MEMORY; ST_DEVICE, as the next ones.
 */
MUST_CHECK enum status trace_open(struct trace **out, struct device *device,
                                  const struct program *p, const struct model *model);
void trace_close(struct trace **trace); /* of NULL is fine */

/** trace_begin() - @s is about to run an instruction, and has waited for what that needs. */
MUST_CHECK enum status trace_begin(struct trace *t, int instr, struct stream *s);

/** trace_end() - the instruction was issued. @pending: a CPU collective that is not done yet. */
MUST_CHECK enum status trace_end(struct trace *t, int instr, struct stream *s, bool pending);

/** trace_waits() - @s is about to wait for @instr. */
MUST_CHECK enum status trace_waits(struct trace *t, int instr, struct stream *s);

/** trace_completed() - a wait for @instr ended; if it is a collective of the CPU, all earlier ones
 * have too. trace_waits() came before. */
MUST_CHECK enum status trace_completed(struct trace *t, int instr, struct stream *s);

/** trace_join() - all streams have joined @s at the end of the step. */
MUST_CHECK enum status trace_join(struct trace *t, struct stream *s);

struct trace_facts {
    int rank, world_size;
    int64_t step, tokens; /* tokens: of this rank */
    bool captured;
};

/**
 * trace_write() - wait for the end of the step and write the file: @path itself for one rank, with
 * ".rankN.json" in place of ".json" for several.
 *
 * Return: ST_OK; ST_DEVICE (an instruction was not timed), ST_IO, ST_MEMORY, ST_INVALID (the name
 * is too long).
 */
MUST_CHECK enum status trace_write(const struct trace *t, const char *path,
                                   const struct trace_facts *facts);

C_END

#endif
