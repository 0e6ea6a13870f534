/*
 * engine/model/model.h - a model is a list of units that declare what they need.
 *
 * A unit is what is gathered and released together. It reads its parameters as one flat array and
 * writes their gradients to another; where these come from, and who owns which part, is the
 * executor's business. Units are linked by activation slots: a unit reads slot act_in and writes
 * slot act_out; BACKWARD reads the gradient of act_out and writes that of act_in. Several units may
 * write one slot one after the other (parts of a split table: act_in == act_out).
 *
 *     BERT: [word table part 0..k] -> 0 -> [embedding norm] -> 1 -> [block 0] -> 2 .. -> [head]
 *
 * What a unit keeps from FORWARD to BACKWARD is its saved buffer, which BACKWARD may write over;
 * scratch lives within one call. One bind function sizes and lays out each, so the two agree (STYLE
 * section 7).
 *
 * A model never sees a collective, its rank or the zero stage.
 */
#ifndef ENGINE_MODEL_MODEL_H
#define ENGINE_MODEL_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/base/config.h"
#include "engine/base/tensor.h"
#include "engine/base/work.h"
#include "engine/ops/ops.h"

C_BEGIN

enum { PARAM_NAME_BYTES = 96, PARAM_MAX_PIECES = 3, MODEL_MAX_UNITS = 512 };

enum param_init { INIT_NORMAL, INIT_ZERO, INIT_ONE };

/*
 * A tensor as Hugging Face's files have it: what is imported, exported and initialised. Parameters
 * are made of pieces of tensors: one piece that is a whole tensor (most), a range of rows (a part
 * of a split table), or three one after the other (query, key and value fused).
 */
struct model_tensor {
    char name[PARAM_NAME_BYTES];
    int dims;
    int64_t shape[2];
    enum param_init init;
    int64_t init_zeros; /* its first elements start as zeros whatever @init is: row of [PAD] */
};

struct param_piece {
    int tensor;
    int64_t first, numel; /* elements of the parameter */
    int64_t tensor_first; /* where the piece begins in the tensor, element */
};

struct model_param {
    char name[PARAM_NAME_BYTES]; /* unique; the tensor's, but for fused and split ones */
    int dims;
    int64_t shape[2];
    int unit;
    bool decay;  /* weight decay applies (not to biases and norms) */
    bool frozen; /* not trained (train.freeze) */
    int piece_count;
    struct param_piece piece[PARAM_MAX_PIECES]; /* ascending, they cover the parameter */
};

/* How much a micro-batch is to compute. */
struct batch_size {
    double tokens;
    double squared_lengths; /* of its sequences, summed */
};

/* Sizes of one micro-batch: rows and sequences that buffers must hold. */
struct micro_dims {
    int64_t rows, sequences, max_length;
};

/*
 * What a unit gets in FORWARD, RECOMPUTE and BACKWARD. Device memory; all borrowed.
 *
 * BACKWARD with grads_add false writes every element of @grads up to model_unit_numel(): gaps and
 * frozen parameters get zeros. It does not change dact_out; dact_in is another buffer, but for
 * units with act_in == act_out, which leave it alone.
 */
struct unit_call {
    struct stream *stream;
    const struct sequences *sequences;
    const struct step_state *state;
    struct step_report *report; /* the head adds the loss */
    const void *params;         /* flat, param_dtype; offsets from model.param_offset */
    void *grads;                /* flat fp32; NULL if the whole unit is frozen */
    /* Of a look-up unit that is run for the rows of all ranks: their act_out (FORWARD) or dact_out
     * (BACKWARD), end to end, and which elements of the flat parameter or gradient @params or
     * @grads has. FORWARD then writes what these give, and the first part of a table all else
     * (embedding.h). NULL: by its own rows, all elements. */
    void *all_rows;
    int64_t part_first, part_numel;
    bool grads_add;          /* false: the first writer of the step overwrites */
    bool grads_mark;         /* a look-up unit marks the rows of no token (ops.h) */
    const void *tied_params; /* of unit.tied, or NULL */
    void *tied_grads;
    bool tied_grads_add;
    void *act_in, *act_out;   /* in: NULL for the first unit; out: NULL in RECOMPUTE */
    void *dact_in, *dact_out; /* BACKWARD; in: NULL for the first unit, out: for the head */
    void *saved, *scratch;
    bool training; /* the head computes dlogits */
};

struct model;

struct model_unit {
    const char *name;
    int first_param, param_count;
    int act_in, act_out; /* slots; act_in -1: none */
    int tied;            /* a unit whose parameters this one also reads and writes; -1: none */
    bool backward_reads_params; /* false for look-up tables: no gather for BACKWARD */
    bool backward_reads_input;  /* act_in lives until BACKWARD */
    bool recompute;             /* may be recomputed from act_in */
    /* One table: FORWARD reads the rows of its tokens, BACKWARD clears or marks the others. */
    bool look_up;
    int index; /* of its kind (block number, part number) */
    size_t (*saved_bytes)(const struct model *m, const struct model_unit *u, struct micro_dims d);
    size_t (*forward_scratch_bytes)(const struct model *m, const struct model_unit *u,
                                    struct micro_dims d);
    size_t (*backward_scratch_bytes)(const struct model *m, const struct model_unit *u,
                                     struct micro_dims d);
    struct unit_work (*work)(const struct model *m, const struct model_unit *u,
                             struct batch_size size);
    enum status (*forward)(const struct model *m, const struct model_unit *u,
                           const struct unit_call *call);
    enum status (*backward)(const struct model *m, const struct model_unit *u,
                            const struct unit_call *call);
};

struct model_slot {
    int64_t columns;
    enum dtype dtype;
};

struct model {
    const char *family; /* "bert"; in the files its encoder's tensors are "bert.NAME" */
    struct {
        int64_t vocab, hidden, layers, heads, ffn, positions;
        int64_t types; /* 0: the family has no token types */
        float hidden_dropout, attention_dropout, projection_dropout, qa_dropout;
        float norm_eps, init_range;
    } dims;
    enum dtype param_dtype;
    bool keep_all;            /* a block keeps GELU's output and attention's masks, too */
    struct model_unit *units; /* owned; forward order */
    int unit_count;
    struct model_param *params; /* owned; grouped by unit */
    int param_count;
    struct model_tensor *tensors; /* owned; in the order of first use */
    int tensor_count;
    int64_t *param_offset;    /* owned; element of each parameter in its unit's flat parameter */
    struct model_slot *slots; /* owned; the last unit's act_out is the logits (T, 2) fp32 */
    int slot_count;
    struct pool pool; /* names */
};

/**
 * model_open() - build the model that a configuration asks for.
 * @config: family and sizes; train.max_unit_numel (larger tables are split into ranges of rows);
 * train.freeze; train.recompute.
 * @param_dtype: of weights and activations.
 *
 * Tensor starts are multiples of MODEL_PARAM_ALIGN elements. In a unit the parameters with weight
 * decay come first. A name in train.freeze freezes the tensor of that name and all whose names
 * continue it after a dot ("bert.embeddings", "bert.encoder.layer.0").
 *
 * Return: ST_OK; ST_INVALID (sizes that do not fit together, a norm_eps that the family does not
 * have, too many units, a name in train.freeze that fits no tensor or only a part of a fused one);
 * ST_MEMORY.
 */
MUST_CHECK enum status model_open(struct model *m, const struct run_config *config,
                                  enum dtype param_dtype);
void model_release(struct model *m);

enum { MODEL_PARAM_ALIGN = 128 }; /* elements, whatever the dtype */

static inline int64_t model_param_numel(const struct model_param *p)
{
    return p->shape[0] * (p->dims == 2 ? p->shape[1] : 1);
}

/** model_family_name() - struct model's family of a configuration. */
const char *model_family_name(enum model_family family);

/** model_unit_numel() - elements of a unit's flat parameter up to its last tensor's end. */
int64_t model_unit_numel(const struct model *m, int unit);

/** model_total_numel() - parameters as people count them: no padding, frozen ones included. */
int64_t model_total_numel(const struct model *m);

/** model_only_looked_up() - has a unit's gradient nothing but zeros in rows that no token of a
 * batch looks up? Not where another unit is tied to it. */
bool model_only_looked_up(const struct model *m, int unit);

/** model_first_row() - of the whole table, which a look-up unit begins with. */
int64_t model_first_row(const struct model *m, int unit);

/** model_find_tensor() - index of the one with this name; -1: none. */
int model_find_tensor(const struct model *m, const char *name);

/**
 * model_init_range() - random or constant initial values of a range of a unit's flat parameter.
 * @out: fp32, @count elements from @first on; gaps between tensors get zeros.
 *
 * Keyed by (seed, name and element of the model_tensor): the same values however tensors are
 * split, fused and cut. As Hugging Face does: weights of linear layers and tables from
 * N(0, init_range^2), biases 0, norms 1 and 0, the word table's row of [PAD] (token 0) 0.
 */
void model_init_range(const struct model *m, int unit, float *out, int64_t first, int64_t count,
                      uint64_t seed);

/** model_unit_work() - what FORWARD and BACKWARD of a unit do. */
struct unit_work model_unit_work(const struct model *m, int unit, struct batch_size size);

/** model_step_flops() - floating-point operations of one forward and backward over @tokens rows in
 * sequences with the given sum of squared lengths (multiply and add count as two). */
double model_step_flops(const struct model *m, int64_t tokens, double squared_lengths);

C_END

#endif
