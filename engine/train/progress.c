#include "engine/train/progress.h"

#include <stdio.h>

/* Upper byte: kind of program + 1, so that no mark is 0. Below: the instruction. */
enum { KIND_SHIFT = 24, INSTR_MASK = (1 << KIND_SHIFT) - 1 };

uint32_t progress_mark(const struct program *p, int instr)
{
    switch (p->instrs[instr].op) {
    case OP_GATHER:
    case OP_FORWARD:
    case OP_RECOMPUTE:
    case OP_BACKWARD:
    case OP_REDUCE:
    case OP_AGREE:
    case OP_COLLECT:
        return ((uint32_t)p->kind + 1) << KIND_SHIFT | (uint32_t)instr;
    default: /* short, and nothing in them waits for a peer */
        return 0;
    }
}

void progress_name(const struct plan *plan, const struct model *model, uint32_t mark,
                   char out[PROGRESS_NAME_BYTES])
{
    static const char *const where[] = {"", " of the prologue", " of the flush",
                                        " of an evaluation"};
    _Static_assert(sizeof where / sizeof *where == PROGRAM_KINDS, "a word for each kind");
    uint32_t kind = (mark >> KIND_SHIFT) - 1;
    int instr = (int)(mark & INSTR_MASK);
    if (mark == 0 || kind >= PROGRAM_KINDS || instr >= plan->programs[kind].instr_count) {
        snprintf(out, PROGRESS_NAME_BYTES, mark == 0 ? "nothing yet" : "an unknown mark");
        return;
    }
    const struct instr *in = &plan->programs[kind].instrs[instr];
    const char *unit = in->unit >= 0 ? model->units[in->unit].name : "";
    char micro[32] = "";
    if (in->micro_batch >= 0)
        snprintf(micro, sizeof micro, ", micro-batch %d", in->micro_batch);
    snprintf(out, PROGRESS_NAME_BYTES, "%s%s%.40s%s%s", program_op_name(in->op),
             unit[0] != '\0' ? " of " : "", unit, micro, where[kind]);
}
