/*
 * engine/base/yaml_pairs.h - a YAML file of nested mappings as a list of "path: value" pairs.
 *
 *     memory:            ->   "memory.source", "measured", line 2
 *       source: measured      "memory.copy", "4200", line 3
 *       copy: 4200
 *
 * For files with a table of known paths (engine/train/machine_file.c). Lists, anchors, aliases,
 * tags and further documents are refused. The run configuration has a reader of its own
 * (config_yaml.c), which knows sections and keys while it reads.
 */
#ifndef ENGINE_BASE_YAML_PAIRS_H
#define ENGINE_BASE_YAML_PAIRS_H

#include <stddef.h>

#include "engine/base/status.h"

C_BEGIN

struct yaml_pair {
    const char *path, *value; /* borrowed for the call; null is "" */
    int line;
};

/**
 * yaml_pairs_read() - call @take for each pair, in the order of the file.
 * @file: for messages.
 *
 * Return: ST_OK; ST_INVALID with file and line; ST_MEMORY; the first failure of @take.
 */
MUST_CHECK enum status
yaml_pairs_read(const char *text, size_t bytes, const char *file,
                enum status (*take)(void *context, const struct yaml_pair *pair), void *context);

C_END

#endif
