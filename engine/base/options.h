/*
 * engine/base/options.h - command lines, as people expect of a Unix tool.
 *
 * A sub-command is a table; the table parses the arguments and prints --help. Accepted are
 * "--name value", "--name=value" and flags; "--" ends the options. Options that may be repeated
 * (OPTION_LIST) keep their order. An unknown option, a missing or a bad value is ST_INVALID with a
 * message that names the option, what was given and what is accepted (and the nearest known name).
 */
#ifndef ENGINE_BASE_OPTIONS_H
#define ENGINE_BASE_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

enum option_kind {
    OPTION_FLAG,  /* bool: true when given */
    OPTION_INT,   /* int64_t in [min, max] */
    OPTION_REAL,  /* double in [min, max] */
    OPTION_BYTES, /* size_t: text_to_bytes() */
    OPTION_TEXT,  /* const char *, borrowed from argv */
    OPTION_LIST   /* struct option_list: every occurrence */
};

enum { OPTION_LIST_MAX = 64 };

struct option_list {
    const char *items[OPTION_LIST_MAX]; /* borrowed from argv */
    int count;
};

struct option {
    const char *name; /* without dashes */
    enum option_kind kind;
    void *value;         /* the variable, holding its default; unchanged if not given */
    const char *metavar; /* "N", "FILE", or NULL for a flag */
    const char *help;    /* one line */
    double min, max;     /* for OPTION_INT and OPTION_REAL; both 0: any value */
    bool required;
};

struct command {
    const char *name;    /* "train" */
    const char *summary; /* one sentence */
    const char *details; /* more lines for --help, or NULL */
    const struct option *options;
    int option_count;
    const char *operands; /* "PATH DIR" of its usage, or NULL; who parses takes them out before */
};

/**
 * options_parse() - parse argv[1..argc) (argv[0] is the sub-command's name).
 * @help_shown: set when --help was given and printed; the caller then returns at once.
 *
 * Return: ST_OK; ST_INVALID.
 */
MUST_CHECK enum status options_parse(const struct command *command, int argc, char **argv,
                                     bool *help_shown);

C_END

#endif
