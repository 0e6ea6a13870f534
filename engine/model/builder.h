/*
 * engine/model/builder.h - how a family's file lists its units and parameters; for engine/model.
 *
 *     builder_slot(b, C, dtype)             -> slot
 *     builder_unit(b, unit)                 -> later parameters are this unit's
 *     builder_tensor(b, name, shape, init)  -> tensor
 *     builder_param(b, name, shape, decay)  then builder_piece(b, tensor, first) for each piece
 *
 * Decayed parameters of a unit come first (asserted). Calls after a failure do nothing, so that a
 * family looks at the status once, at builder_finish().
 */
#ifndef ENGINE_MODEL_BUILDER_H
#define ENGINE_MODEL_BUILDER_H

#include "engine/model/model.h"

C_BEGIN

struct model_builder {
    struct model *model; /* borrowed; empty at first */
    size_t unit_capacity, param_capacity, tensor_capacity, slot_capacity;
    enum status status; /* of the first call that failed */
};

/** builder_name() - printf into the room of a name; one that does not fit is a bug. */
void builder_name(char out[PARAM_NAME_BYTES], const char *format, ...) PRINTF_LIKE(2, 3);

int builder_slot(struct model_builder *b, int64_t columns, enum dtype dtype);

/** builder_unit() - append a unit. @unit: copied; its name becomes "@kind.index" and its parameter
 * range follows from the builder_param() calls. */
void builder_unit(struct model_builder *b, const char *kind, struct model_unit unit);

/** builder_tensor() - declare a tensor of the files. @columns: 0 for a vector. */
int builder_tensor(struct model_builder *b, const char *name, int64_t rows, int64_t columns,
                   enum param_init init);

/** builder_param() - append an empty parameter to the last unit. @columns: 0 for a vector. */
void builder_param(struct model_builder *b, const char *name, int64_t rows, int64_t columns,
                   bool decay);

/** builder_piece() - the next @numel elements of the last parameter are those of @tensor. */
void builder_piece(struct model_builder *b, int tensor, int64_t tensor_first, int64_t numel);

/** builder_whole() - a tensor and the parameter that is all of it. */
void builder_whole(struct model_builder *b, const char *name, int64_t rows, int64_t columns,
                   enum param_init init, bool decay);

/** builder_finish() - freeze what @freeze names, place the parameters. Returns the status. */
MUST_CHECK enum status builder_finish(struct model_builder *b, const char *freeze);

/* A parameter of a unit in a call: its values, or its gradient (data NULL when it is frozen).
 * @i: which of the unit's parameters. */
struct tensor unit_param(const struct model *m, const struct model_unit *u,
                         const struct unit_call *call, int i);
struct tensor unit_grad(const struct model *m, const struct model_unit *u,
                        const struct unit_call *call, int i);

/** unit_grads_begin() - first thing in BACKWARD: zeros where no op will write (see unit_call). */
MUST_CHECK enum status unit_grads_begin(const struct model *m, const struct model_unit *u,
                                        const struct unit_call *call);

/** unit_act() - a (T, @columns) view of an activation. */
static inline struct tensor unit_act(const struct model *m, const struct unit_call *call,
                                     void *data, int64_t columns)
{
    return tensor_2d(data, m->param_dtype, call->sequences->rows, columns);
}

C_END

#endif
