#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "comm/topology.h"
#include "engine/base/log.h"
#include "engine/base/out.h"
#include "engine/device/device.h"
#include "engine/train/commands.h"
#include "engine/train/interrupt.h"

#define TESSERA_VERSION "0.1.0"

enum { EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_SIGNAL = 128 };

struct entry {
    const char *name;
    enum status (*run)(int argc, char **argv);
    const char *summary;
};

static const struct entry entries[] = {
    {"train", cmd_train, "fine-tune a model for question answering, and evaluate it"},
    {"eval", cmd_eval, "exact match and F1 of a stored model on a file of questions"},
    {"predict", cmd_predict, "answer a question from a text"},
    {"score", cmd_score, "exact match and F1 of a predictions file"},
    {"checkpoint", cmd_checkpoint, "look at, check, compare and convert checkpoints"},
    {"plan", cmd_plan, "predict the memory of a run at every zero stage"},
    {"compare", cmd_compare, "run stages, ranks and batches briefly, side by side"},
    {"lr-find", cmd_lr_find, "suggest a learning rate from a short run"},
    {"report", cmd_report, "finished runs as one page with charts"},
    {"calibrate", cmd_calibrate, "measure this machine, for predictions of step times"},
    {"topo", cmd_topo, "the machine, and which part of it each rank gets"},
    {"features", cmd_features, "the windows of a SQuAD file"},
    {"tokenize", cmd_tokenize, "WordPiece tokens of lines of text"},
    {"config", cmd_config, "print or document the configuration"},
};

enum { ENTRIES = sizeof entries / sizeof *entries };

static void help(void)
{
    out("Tessera trains transformers whose parameters, gradients and optimizer states are\n"
        "partitioned across ranks (ZeRO stages 0-3).\n\nUsage: tessera COMMAND [OPTION]...\n\n");
    for (int i = 0; i < ENTRIES; i++)
        out("  %-10s %s\n", entries[i].name, entries[i].summary);
    out("\n  --version  what is built in\n  --help     this text; tessera COMMAND --help for each "
        "command\n");
}

static enum status version(void)
{
    struct device *device = NULL;
    char library[32];
    topology_library(library);
    TRY(device_open(&device, DEVICE_CPU, PRECISION_FP32, 0, 1));
    out("tessera " TESSERA_VERSION "\ncpu: %s\ntopology: %s\ncomm: local%s%s\ncuda: %s\n",
        device->name, library,
#ifdef TESSERA_MPI
        ", mpi",
#else
        "",
#endif
#ifdef TESSERA_CUDA
        ", nccl", "built in"
#else
        "", "not built in"
#endif
    );
    device_close(&device);
    return ST_OK;
}

static enum status dispatch(int argc, char **argv)
{
    if (argc < 2) {
        help();
        return FAIL(INVALID, "no command is given");
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        help();
        return ST_OK;
    }
    if (strcmp(argv[1], "--version") == 0)
        return version();
    for (int i = 0; i < ENTRIES; i++)
        if (strcmp(argv[1], entries[i].name) == 0)
            return entries[i].run(argc - 1, argv + 1);
    return FAIL(INVALID, "unknown command \"%s\"; tessera --help lists them", argv[1]);
}

/* People want the cause; where it came from in the code is for those who ask. */
static void report(enum status st)
{
    const char *message = status_message(), *trace = strstr(message, "\n  from ");
    if (st == ST_INTERRUPTED)
        log_warn("tessera", "%.*s", (int)(trace != NULL ? trace - message : (long)strlen(message)),
                 message);
    else
        log_cause("tessera", message);
    log_debug("tessera", "%s %s", status_name(st), status_message());
}

int main(int argc, char **argv)
{
    /* A full disk and a closed pipe are errors of the write, not the end of the process. */
    signal(SIGXFSZ, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    enum status st = dispatch(argc, argv);
    if (st == ST_OK)
        st = out_flush();
    if (st == ST_OK)
        return 0;
    report(st);
    if (st == ST_INTERRUPTED)
        return EXIT_SIGNAL + interrupt_read(interrupt_flag());
    return st == ST_INVALID ? EXIT_USAGE : EXIT_FAILED;
}
