/*
 * tests/support/program_spec.h - units and bytes to build step programs from, without a model.
 *
 * Sizes are those of a BERT: word-table parts in place on slot 0, embedding norm, blocks, head.
 */
#ifndef TESTS_SUPPORT_PROGRAM_SPEC_H
#define TESTS_SUPPORT_PROGRAM_SPEC_H

#include "shard/program.h"

C_BEGIN

enum { SPEC_MAX_UNITS = 96 };

struct spec_sizes {
    int layers;
    int64_t channels, ffn, heads, vocab, positions;
    int64_t rows; /* tokens of a micro-batch */
    int64_t max_unit_numel;
};

/* Holds what spec points to: do not copy. */
struct spec_case {
    struct program_unit units[SPEC_MAX_UNITS];
    struct unit_bytes train[SPEC_MAX_UNITS], evaluate[SPEC_MAX_UNITS];
    size_t train_slots[SPEC_MAX_UNITS], evaluate_slots[SPEC_MAX_UNITS];
    int parts; /* of the word table: units 0 .. parts - 1 */
    struct program_spec spec;
};

extern const struct spec_sizes spec_bert_base, spec_bert_large;

/** spec_bert() - one micro-batch, prefetch 1, fp32; change c->spec after it, but not world_size. */
void spec_bert(struct spec_case *c, const struct spec_sizes *sizes, enum dtype param_dtype,
               int zero_stage, int world_size);

/** spec_by_rows() - move the word table by rows. */
void spec_by_rows(struct spec_case *c);

/** spec_random() - small random sizes, stage, world, policies, frozen and tied units, tables by
 * rows. */
void spec_random(struct spec_case *c, uint64_t *random);

/** spec_text() - the choices of a spec in one line, for messages; valid until the next call. */
const char *spec_text(const struct spec_case *c);

C_END

#endif
