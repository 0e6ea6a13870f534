/*
 * engine/train/op_profile.h - op by op: calls, time, rates, how near to the machine's limits
 * (tessera train --profile N).
 *
 * While a step is profiled the device's table of ops is another one (op_profile_table.c), whose
 * entries put a timer before and behind the entry of the real table. So every op is seen at one
 * place, and a step that is not profiled does not know of it.
 *
 *     op                       calls/step   ms/step  share   GFLOP/s    GB/s  of floor
 *     linear_forward                 24.0    41.203  24.1%      98.1     3.2     88%
 *     ...
 *     (collectives, copies, gaps)             1.310   0.8%
 *
 * FLOPs are those of matrix products, attention and the head, a multiplication and an addition
 * being two, as MFU counts them (model_step_flops()): on packed CPU batches their sum is the same.
 * Bytes are each tensor once, read or written, twice where it is added to. The floor of an op is
 * max(FLOPs / peak, bytes / bandwidth), call by call; the peak is that of a large product, the
 * bandwidth that of adding a large vector to another, both measured by op_profile_open() with the
 * device's own ops. What fits in a cache may be faster than its floor.
 *
 * Late updates are done before an evaluation or a save, and there are none before the first step:
 * the step behind has them as calls that move no bytes.
 *
 * On CUDA a profiled step is issued op by op, not replayed from a graph, so a short op's time holds
 * its launch, and ops of the update stream may run beside others. Results stay as they are.
 */
#ifndef ENGINE_TRAIN_OP_PROFILE_H
#define ENGINE_TRAIN_OP_PROFILE_H

#include "engine/device/device.h"
#include "engine/ops/ops.h"

C_BEGIN

/* The entries of struct ops that enqueue work; finish_sums counts as a gap. */
#define OP_KINDS(X)                                                                                \
    X(embedding_forward)                                                                           \
    X(embedding_backward)                                                                          \
    X(embedding_norm_forward)                                                                      \
    X(embedding_norm_backward)                                                                     \
    X(residual_norm_forward)                                                                       \
    X(residual_norm_backward)                                                                      \
    X(linear_forward)                                                                              \
    X(linear_backward_data)                                                                        \
    X(linear_backward_weight)                                                                      \
    X(gelu_forward)                                                                                \
    X(gelu_backward)                                                                               \
    X(attention_forward)                                                                           \
    X(attention_backward)                                                                          \
    X(dropout_apply)                                                                               \
    X(span_logits_forward)                                                                         \
    X(span_logits_backward)                                                                        \
    X(span_loss)                                                                                   \
    X(accumulate)                                                                                  \
    X(cast)                                                                                        \
    X(master_split)                                                                                \
    X(squared_norm)                                                                                \
    X(squared_norm_rows)                                                                           \
    X(step_begin)                                                                                  \
    X(agree)                                                                                       \
    X(adamw)

enum op_kind {
#define OP_KIND_ENUM(name) KIND_##name,
    OP_KINDS(OP_KIND_ENUM)
#undef OP_KIND_ENUM
        OP_KIND_COUNT
};

struct op_sum {
    int64_t calls;
    double ms, flops, bytes, floor_ms;
};

struct op_call {
    struct device_timer begin, end;
    enum op_kind kind;
    double flops, bytes;
};

struct op_profile {
    struct ops table; /* first: the device's table while a step is profiled */
    const struct ops *real;
    struct device *device; /* borrowed */
    char device_name[128];
    struct op_call *calls;      /* owned; of the step at hand */
    int call_count, call_limit; /* those that have been made; room */
    struct device_timer begin, end;
    const struct sequences *micro; /* borrowed; the micro-batches of the step at hand */
    const double *squared;         /* borrowed; for each the sum of its squared lengths */
    bool updates;                  /* false: its UPDATEs do nothing */
    double peak, bandwidth;        /* FLOP/s and bytes/s, measured */
    /* All profiled steps together. */
    int64_t steps, first_step;
    double step_ms, model_flops;
    struct op_sum sums[OP_KIND_COUNT];
};

/**
 * op_profile_open() - measure peak and bandwidth, make room.
 * @call_limit: no step has more calls of ops.
 *
 * Return: ST_OK; ST_MEMORY; ST_DEVICE. Cost: some 0.2 s.
 */
MUST_CHECK enum status op_profile_open(struct op_profile **out, struct device *device,
                                       int call_limit);
void op_profile_close(struct op_profile **p); /* of NULL is fine */

/** op_profile_begin() - a step of these micro-batches will be issued; the device is idle.
 * @squared: of each, the sum of its squared lengths.
 * @updates: false: its UPDATEs do nothing. ST_DEVICE. */
MUST_CHECK enum status op_profile_begin(struct op_profile *p, const struct sequences *micro,
                                        const double *squared, bool updates);

/** op_profile_end() - it was issued: wait for it, add its times; @model_flops as MFU counts.
 * ST_DEVICE. */
MUST_CHECK enum status op_profile_end(struct op_profile *p, double model_flops);

/** op_profile_print() - the table above, the longest first. */
void op_profile_print(const struct op_profile *p);

/** op_profile_write() - the sums as JSON. ST_OK; ST_IO. */
MUST_CHECK enum status op_profile_write(const struct op_profile *p, const char *path);

/* For op_profile_table.c: around each call of an op. ST_DEVICE. */
void op_profile_bind(struct ops *table, const struct ops *real);
MUST_CHECK enum status op_profile_call(struct op_profile *p, struct stream *s, enum op_kind kind,
                                       double flops, double bytes);
MUST_CHECK enum status op_profile_called(struct op_profile *p, struct stream *s);

C_END

#endif
