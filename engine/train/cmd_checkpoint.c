/* `tessera checkpoint`: look at checkpoints, check them, compare two, convert them. */
#include "engine/train/cmd_checkpoint.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/out.h"
#include "engine/train/commands.h"
#include "io/checkpoint.h"
#include "io/safetensors.h"

static const char DETAILS[] =
    "  checkpoint list DIR         the checkpoints in a folder: step, size, ratio, whether "
    "complete\n"
    "  checkpoint show PATH        tensors, states, sizes and the training state of one\n"
    "  checkpoint verify PATH      the hash of every file and every chunk; exit code 1 if one "
    "differs\n"
    "  checkpoint diff A B         the largest difference of every state of every tensor; exit "
    "code 1\n"
    "                              if there is one\n"
    "  checkpoint reshard PATH DIR --ranks N\n"
    "                              write it again, to DIR, in the files of N ranks; a run needs "
    "this\n"
    "                              never: it goes on from any number of them\n"
    "  checkpoint export PATH DIR  its weights as a Hugging Face folder\n"
    "  checkpoint import FOLDER DIR\n"
    "                              a Hugging Face folder as a checkpoint of step 0, in DIR\n"
    "PATH is one checkpoint, such as run/checkpoints/step-00000100. Checkpoints and models may be\n"
    "larger than memory: they are read in pieces. The last three have options, see their --help.\n";

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
    if (l.count == 0 && access(paths[0], F_OK) != 0)
        TRY_GOTO(st, out, FAIL(IO, "%s: %s", paths[0], strerror(errno)));
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

/* ---- the command ----------------------------------------------------------------------------- */

/* Does this argument take the next one as its value? */
static bool takes_value(const struct command *command, const char *argument)
{
    for (int i = 0; i < command->option_count; i++)
        if (strcmp(command->options[i].name, argument + strspn(argument, "-")) == 0)
            return command->options[i].kind != OPTION_FLAG;
    return false;
}

enum status checkpoint_arguments(const struct command *command, int argc, char **argv, char **paths,
                                 int path_count, bool *help_shown)
{
    enum { MOST = 32 };
    char *rest[MOST] = {argv[0]};
    int options = 1, found = 0;
    for (int i = 1; i < argc; i++) {
        bool is_option = argv[i][0] == '-' && argv[i][1] != '\0';
        if (options + 2 > MOST)
            return FAIL(INVALID, "%s: too many arguments", command->name);
        if (!is_option && found++ < path_count)
            paths[found - 1] = argv[i];
        if (!is_option)
            continue;
        rest[options++] = argv[i];
        if (i + 1 < argc && takes_value(command, argv[i]))
            rest[options++] = argv[++i];
    }
    TRY(options_parse(command, options, rest, help_shown));
    if (!*help_shown && found != path_count)
        return FAIL(INVALID, "%s takes %d path%s, found %d (tessera %s --help)", command->name,
                    path_count, path_count == 1 ? "" : "s", found, command->name);
    return ST_OK;
}

/* Those without options of their own. */
static const struct {
    const char *name, *full, *operands, *summary;
    enum status (*run)(char **paths);
    int path_count;
} looks[] = {
    {"list", "checkpoint list", "DIR", "The checkpoints in a folder.", list, 1},
    {"show", "checkpoint show", "PATH", "What is in a checkpoint.", show, 1},
    {"verify", "checkpoint verify", "PATH", "Check every hash of a checkpoint.", verify, 1},
    {"diff", "checkpoint diff", "A B", "Compare two checkpoints.", checkpoint_diff, 2}};

static const struct {
    const char *name;
    enum status (*run)(int argc, char **argv);
} conversions[] = {{"reshard", cmd_checkpoint_reshard},
                   {"export", cmd_checkpoint_export},
                   {"import", cmd_checkpoint_import}};

static enum status look(int which, int argc, char **argv)
{
    char *paths[2] = {NULL, NULL};
    bool help_shown = false;
    const struct command command = {.name = looks[which].full,
                                    .operands = looks[which].operands,
                                    .summary = looks[which].summary,
                                    .details = DETAILS};
    TRY(checkpoint_arguments(&command, argc, argv, paths, looks[which].path_count, &help_shown));
    return help_shown ? ST_OK : looks[which].run(paths);
}

enum status cmd_checkpoint(int argc, char **argv)
{
    const struct command command = {.name = "checkpoint",
                                    .operands = "list|show|verify|diff|reshard|export|import",
                                    .summary = "Look at, check, compare and convert checkpoints.",
                                    .details = DETAILS};
    bool help_shown = false;
    if (argc < 2)
        return FAIL(INVALID, "checkpoint: list, show, verify, diff, reshard, export or import? "
                             "(tessera checkpoint --help)");
    for (size_t i = 0; i < sizeof looks / sizeof *looks; i++)
        if (strcmp(looks[i].name, argv[1]) == 0)
            return look((int)i, argc - 1, argv + 1);
    for (size_t i = 0; i < sizeof conversions / sizeof *conversions; i++)
        if (strcmp(conversions[i].name, argv[1]) == 0)
            return conversions[i].run(argc - 1, argv + 1);
    if (argv[1][0] == '-')
        return options_parse(&command, argc, argv, &help_shown);
    return FAIL(INVALID, "checkpoint: unknown action \"%s\" (tessera checkpoint --help)", argv[1]);
}
