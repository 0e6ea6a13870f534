#include "engine/base/arena.h"
#include "engine/base/config.h"
#include "engine/base/options.h"
#include "engine/base/out.h"
#include "engine/train/commands.h"

static enum status print_resolved(const char *path, const struct option_list *sets)
{
    enum status st;
    struct run_config config;
    char *text = NULL;
    size_t bytes;
    TRY(config_load(&config, path, sets->items, sets->count));
    TRY(config_check(&config));
    TRY_GOTO(st, out, config_write(&config, &text, &bytes));
    out("%s", text);
out:
    mem_free(&text);
    return st;
}

static enum status print_document(void)
{
    enum status st;
    char *text = NULL;
    size_t bytes;
    TRY_GOTO(st, out, config_document(&text, &bytes));
    out("%s", text);
out:
    mem_free(&text);
    return st;
}

enum status cmd_config(int argc, char **argv)
{
    const char *path = NULL;
    struct option_list sets = {.count = 0};
    bool document = false, help_shown;
    const struct option options[] = {
        {.name = "config",
         .kind = OPTION_TEXT,
         .value = &path,
         .metavar = "FILE",
         .help = "configuration to resolve; without it, the defaults"},
        {.name = "set",
         .kind = OPTION_LIST,
         .value = &sets,
         .metavar = "KEY=VALUE",
         .help = "override a key, as in train.zero_stage=3"},
        {.name = "document",
         .kind = OPTION_FLAG,
         .value = &document,
         .help = "print docs/configuration.md instead"},
    };
    const struct command command = {
        .name = "config",
        .summary = "Print every configuration key as a run would use it, as YAML.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    TRY(options_parse(&command, argc, argv, &help_shown));
    if (!help_shown)
        TRY(document ? print_document() : print_resolved(path, &sets));
    return out_flush();
}
