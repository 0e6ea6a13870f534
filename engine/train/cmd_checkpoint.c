/* `tessera checkpoint`: look at checkpoints, check them, compare two. */
#include "engine/train/commands.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <string.h>

#include "engine/base/options.h"
#include "engine/base/out.h"
#include "io/checkpoint.h"
#include "io/safetensors.h"

static const char DETAILS[] =
    "  checkpoint list DIR       the checkpoints in a folder: step, size, ratio, whether complete\n"
    "  checkpoint show PATH      tensors, states, sizes and the training state of one\n"
    "  checkpoint verify PATH    the hash of every file and every chunk; exit code 1 if one "
    "differs\n"
    "  checkpoint diff A B       the largest difference of every state of every tensor\n"
    "PATH is one checkpoint, such as run/checkpoints/step-00000100. Checkpoints may be larger "
    "than\n"
    "memory: they are read in pieces.\n";

static double ratio(int64_t plain_bytes, int64_t bytes)
{
    return bytes > 0 ? (double)plain_bytes / (double)bytes : 0;
}

/* ---- list ------------------------------------------------------------------------------------ */

static enum status list(char **paths)
{
    enum status st;
    struct checkpoint_list l = {0};
    TRY_GOTO(st, out, checkpoint_list(&l, paths[0]));
    out("%12s  %14s  %6s  %s\n", "step", "bytes", "ratio", "state");
    for (int i = 0; i < l.count; i++) {
        const struct checkpoint_entry *e = &l.entries[i];
        if (e->status == ST_OK)
            out("%12" PRId64 "  %14" PRId64 "  %6.3f  complete  %s\n", e->step, e->bytes,
                ratio(e->plain_bytes, e->bytes), e->path);
        else
            out("%12" PRId64 "  %14s  %6s  damaged   %s\n", e->step, "-", "-", e->problem);
    }
out:
    checkpoint_list_release(&l);
    return st;
}

/* ---- show ------------------------------------------------------------------------------------ */

static void show_tensor(const struct checkpoint *c, const struct checkpoint_tensor *t)
{
    char shape[SAFETENSORS_SHAPE_BYTES];
    safetensors_shape(shape, t->dims, t->shape);
    out("%-60s %-16s", t->name, shape);
    for (int i = 0; i < t->state_count; i++)
        out("  %s %.3f", t->states[i],
            ratio(4 * t->numel, checkpoint_stored_bytes(c, t->states[i], t->name)));
    out("\n");
}

static int print_json(const char *text, size_t bytes, void *context)
{
    (void)context;
    out("%.*s", (int)bytes, text);
    return 0;
}

/* Each name of a state that any tensor has, once, with its sum. */
static void show_states(const struct checkpoint *c)
{
    for (int t = 0; t < c->tensor_count; t++)
        for (int k = 0; k < c->tensors[t].state_count; k++) {
            const char *state = c->tensors[t].states[k];
            int64_t plain = 0, stored = 0;
            bool seen = false;
            for (int i = 0; i < t && !seen; i++)
                seen = checkpoint_has_state(&c->tensors[i], state);
            for (int i = t; i < c->tensor_count && !seen; i++)
                if (checkpoint_has_state(&c->tensors[i], state)) {
                    plain += 4 * c->tensors[i].numel;
                    stored += checkpoint_stored_bytes(c, state, c->tensors[i].name);
                }
            if (!seen)
                out("state     %s: %" PRId64 " bytes, ratio %.3f\n", state, stored,
                    ratio(plain, stored));
        }
}

static enum status show(char **paths)
{
    enum status st;
    struct checkpoint c = {0};
    TRY_GOTO(st, out, checkpoint_open(&c, paths[0]));
    out("step      %" PRId64 "\nfiles     %d\nbytes     %" PRId64 " of %" PRId64
        ", ratio %.3f\ntensors   %d\n",
        c.step, c.file_count, c.bytes, c.plain_bytes, ratio(c.plain_bytes, c.bytes),
        c.tensor_count);
    show_states(&c);
    out("\n%-60s %-16s  ratio of each state\n", "tensor", "shape");
    for (int i = 0; i < c.tensor_count; i++)
        show_tensor(&c, &c.tensors[i]);
    out("\ntraining state\n");
    if (json_dump_callback(c.training, print_json, NULL, JSON_INDENT(4) | JSON_ENSURE_ASCII) != 0)
        st = FAIL(MEMORY, "out of memory while printing the training state");
    out("\n");
out:
    checkpoint_close(&c);
    return st;
}

/* ---- verify ---------------------------------------------------------------------------------- */

static void print_problem(void *context, const char *problem)
{
    ++*(int *)context;
    out("%s\n", problem);
}

static enum status verify(char **paths)
{
    enum status st;
    struct checkpoint c = {0};
    int problems = 0;
    TRY_GOTO(st, out, checkpoint_open(&c, paths[0]));
    st = checkpoint_verify(&c, print_problem, &problems);
    if (problems > 0)
        st = FAIL(CORRUPT, "%s: is damaged: %d problems", paths[0], problems);
    else if (st == ST_OK)
        out("%s: step %" PRId64 ", %d files, %" PRId64 " bytes: all hashes are right\n", paths[0],
            c.step, c.file_count, c.bytes);
out:
    checkpoint_close(&c);
    return st;
}

/* ---- diff ------------------------------------------------------------------------------------ */

enum { SIDES = 2, PIECE_NUMEL = 1 << 18 };

struct comparison {
    struct checkpoint side[SIDES];
    struct checkpoint_reader reader[SIDES];
    float *piece[SIDES]; /* owned */
    int equal, different, alone;
};

struct difference {
    int64_t count; /* elements whose bits differ */
    int64_t where; /* of the largest */
    double max;    /* absolute; NaN if one of them is */
};

static void compare_piece(struct difference *d, const float *a, const float *b, int64_t first,
                          int64_t numel)
{
    if (memcmp(a, b, sizeof *a * (size_t)numel) == 0)
        return;
    for (int64_t i = 0; i < numel; i++) {
        if (memcmp(a + i, b + i, sizeof *a) == 0)
            continue;
        double by = fabs((double)a[i] - (double)b[i]);
        if (d->count++ == 0 || by > d->max || (isnan(by) && !isnan(d->max))) {
            d->max = by;
            d->where = first + i;
        }
    }
}

static enum status compare_state(struct comparison *x, const struct checkpoint_tensor *t,
                                 const char *state)
{
    struct difference d = {0};
    for (int64_t at = 0; at < t->numel; at += PIECE_NUMEL) {
        int64_t n = t->numel - at < PIECE_NUMEL ? t->numel - at : PIECE_NUMEL;
        for (int i = 0; i < SIDES; i++)
            TRY(checkpoint_read_range(&x->reader[i], state, t->name, at, n, x->piece[i]));
        compare_piece(&d, x->piece[0], x->piece[1], at, n);
    }
    x->equal += d.count == 0;
    x->different += d.count != 0;
    if (d.count != 0)
        out("%-60s %-10s %14.6g  %" PRId64 " of %" PRId64 " elements, largest at %" PRId64 "\n",
            t->name, state, d.max, d.count, t->numel, d.where);
    return ST_OK;
}

static bool same_shape(const struct checkpoint_tensor *a, const struct checkpoint_tensor *b)
{
    return a->dims == b->dims && memcmp(a->shape, b->shape, sizeof a->shape) == 0;
}

/* The tensors of one side; what both have is compared once, from the first side. */
static enum status compare_side(struct comparison *x, int side)
{
    const struct checkpoint *mine = &x->side[side], *other = &x->side[1 - side];
    for (int i = 0; i < mine->tensor_count; i++) {
        const struct checkpoint_tensor *t = &mine->tensors[i], *u = checkpoint_find(other, t->name);
        if (u != NULL && !same_shape(t, u)) {
            if (side == 0)
                out("%-60s the shapes differ\n", t->name);
            x->alone += side == 0;
            continue;
        }
        for (int k = 0; k < t->state_count; k++) {
            if (u == NULL || !checkpoint_has_state(u, t->states[k])) {
                out("%-60s %-10s only in %s\n", t->name, t->states[k], mine->path);
                x->alone++;
            } else if (side == 0) {
                TRY(compare_state(x, t, t->states[k]));
            }
        }
    }
    return ST_OK;
}

static enum status diff(char **paths)
{
    enum status st = ST_OK;
    struct comparison x = {0};
    for (int i = 0; i < SIDES; i++) {
        TRY_GOTO(st, out, checkpoint_open(&x.side[i], paths[i]));
        TRY_GOTO(st, out, checkpoint_reader_open(&x.reader[i], &x.side[i]));
        TRY_GOTO(st, out, mem_alloc(&x.piece[i], sizeof(float) * PIECE_NUMEL));
    }
    out("%-60s %-10s %14s\n", "tensor", "state", "difference");
    for (int i = 0; i < SIDES; i++)
        TRY_GOTO(st, out, compare_side(&x, i));
    out("%d states are equal to the bit, %d differ, %d cannot be compared; training state: %s\n",
        x.equal, x.different, x.alone,
        json_equal(x.side[0].training, x.side[1].training) ? "equal" : "differs");
out:
    for (int i = 0; i < SIDES; i++) {
        mem_free(&x.piece[i]);
        checkpoint_reader_close(&x.reader[i]);
        checkpoint_close(&x.side[i]);
    }
    return st;
}

/* ---------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    enum status (*run)(char **paths);
    int path_count;
} actions[] = {{"list", list, 1}, {"show", show, 1}, {"verify", verify, 1}, {"diff", diff, 2}};

enum status cmd_checkpoint(int argc, char **argv)
{
    const struct command command = {.name = "checkpoint",
                                    .summary = "list, show, verify or compare checkpoints",
                                    .details = DETAILS};
    bool help_shown = false;
    for (int i = 1; i < argc; i++)
        if (argv[i][0] == '-') { /* there is no option but --help */
            char *option[] = {argv[0], argv[i]};
            TRY(options_parse(&command, 2, option, &help_shown));
            if (help_shown)
                return ST_OK;
        }
    for (size_t i = 0; argc > 1 && i < sizeof actions / sizeof *actions; i++)
        if (strcmp(actions[i].name, argv[1]) == 0) {
            if (argc - 2 != actions[i].path_count)
                return FAIL(INVALID, "checkpoint %s takes %d path%s (tessera checkpoint --help)",
                            argv[1], actions[i].path_count, actions[i].path_count == 1 ? "" : "s");
            return actions[i].run(argv + 2);
        }
    if (argc < 2)
        return FAIL(INVALID, "checkpoint: list, show, verify or diff? (tessera checkpoint --help)");
    return FAIL(INVALID, "checkpoint: unknown action \"%s\" (tessera checkpoint --help)", argv[1]);
}
