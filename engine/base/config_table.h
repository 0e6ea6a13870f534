/*
 * engine/base/config_table.h - the table of configuration fields; private to engine/base/config*.
 *
 * One row a key. Everything that the outside sees of a field (its YAML spelling, what is accepted,
 * its default, its documentation) comes from its row. Adding a field: a member in config.h, a row
 * in config_table.c, `make docs`.
 */
#ifndef ENGINE_BASE_CONFIG_TABLE_H
#define ENGINE_BASE_CONFIG_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/config.h"

C_BEGIN

enum field_kind { FIELD_INT, FIELD_REAL, FIELD_BOOL, FIELD_CHOICE, FIELD_TEXT };

struct config_field {
    const char *section, *name; /* the key is section.name */
    enum field_kind kind;
    size_t offset;                           /* of the member in struct run_config */
    int64_t int_default, int_min, int_max;   /* FIELD_INT, FIELD_BOOL; FIELD_CHOICE: the default */
    const char *word;                        /* FIELD_INT: accepted beside numbers; or NULL */
    int64_t word_value;                      /* what it stands for, outside [int_min, int_max] */
    double real_default, real_min, real_max; /* FIELD_REAL; +-DBL_MAX: no bound */
    bool above, below;                       /* FIELD_REAL: the bound itself is not accepted */
    const char *text_default;                /* FIELD_TEXT */
    const char *const *choices;              /* FIELD_CHOICE: names by value, NULL at the end */
    const char *doc;                         /* one sentence */
};

enum { FIELD_TEXT_BYTES = 640 }; /* room for a value or a description as text */

extern const struct config_field config_fields[];
extern const int config_field_count;

/** field_find() - the row of a key; NULL if there is none. */
const struct config_field *field_find(const char *section, const char *name);

/** field_set_default() - store the row's default in @config. */
void field_set_default(const struct config_field *f, struct run_config *config);

/**
 * field_parse() - store what @text says in @config.
 * @origin: stands at the start of the message, "configs/x.yaml:7" or "--set".
 *
 * Return: ST_OK; ST_INVALID, "ORIGIN: section.name: expected ..., found ...".
 */
MUST_CHECK enum status field_parse(const struct config_field *f, struct run_config *config,
                                   const char *text, const char *origin);

/** field_format() - the value in @config as plain text that field_parse() takes back. */
void field_format(const struct config_field *f, const struct run_config *config, char *text,
                  size_t text_bytes);

/** field_accepts() - what is accepted, as in "an integer from 0 to 3". */
void field_accepts(const struct config_field *f, char *text, size_t text_bytes);

/** config_read_yaml() - set every key of the YAML @text; @path stands in messages. */
MUST_CHECK enum status config_read_yaml(struct run_config *config, const char *text, size_t bytes,
                                        const char *path);

C_END

#endif
