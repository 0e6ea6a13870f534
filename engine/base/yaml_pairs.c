#include "engine/base/yaml_pairs.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <yaml.h>

enum { PATH_BYTES = 256, MAX_DEPTH = 8 };

struct walk {
    const char *file;
    yaml_parser_t parser;
    yaml_event_t event; /* the current one */
    bool has_event;
    char path[PATH_BYTES];
    size_t length[MAX_DEPTH]; /* of the path of each mapping that is open */
    int depth;
    bool has_key; /* the path ends with a key whose value comes next */
    enum status (*take)(void *context, const struct yaml_pair *pair);
    void *context;
};

static int line_of(const struct walk *w)
{
    return (int)w->event.start_mark.line + 1;
}

static enum status next_event(struct walk *w)
{
    const yaml_parser_t *p = &w->parser;
    if (w->has_event)
        yaml_event_delete(&w->event);
    w->has_event = false;
    if (yaml_parser_parse(&w->parser, &w->event)) {
        w->has_event = true;
        return ST_OK;
    }
    if (p->error == YAML_MEMORY_ERROR)
        return FAIL(MEMORY, "%s: out of memory while parsing", w->file);
    return FAIL(INVALID, "%s:%zu: %s", w->file, p->problem_mark.line + 1,
                p->problem != NULL ? p->problem : "broken YAML");
}

static bool has_extras(const yaml_event_t *e)
{
    if (e->type == YAML_SCALAR_EVENT)
        return e->data.scalar.anchor != NULL || e->data.scalar.tag != NULL;
    return e->type == YAML_MAPPING_START_EVENT &&
           (e->data.mapping_start.anchor != NULL || e->data.mapping_start.tag != NULL);
}

static enum status open_mapping(struct walk *w)
{
    if (w->depth > 0 && !w->has_key)
        return FAIL(INVALID, "%s:%d: expected a key, found a mapping", w->file, line_of(w));
    if (w->depth == MAX_DEPTH)
        return FAIL(INVALID, "%s:%d: more than %d mappings in each other", w->file, line_of(w),
                    MAX_DEPTH);
    w->length[w->depth++] = strlen(w->path);
    w->has_key = false;
    return ST_OK;
}

static void cut_path(struct walk *w)
{
    w->path[w->depth > 0 ? w->length[w->depth - 1] : 0] = '\0';
}

static bool is_null(const yaml_event_t *e, const char *text)
{
    return e->data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
           (strcmp(text, "~") == 0 || strcmp(text, "null") == 0);
}

static enum status take_scalar(struct walk *w)
{
    const char *text = (const char *)w->event.data.scalar.value;
    if (w->depth == 0 || strlen(text) != w->event.data.scalar.length)
        return FAIL(INVALID, "%s:%d: expected \"key: value\" lines", w->file, line_of(w));
    if (!w->has_key) {
        size_t used = strlen(w->path);
        int n = snprintf(w->path + used, sizeof w->path - used, "%s%s", used > 0 ? "." : "", text);
        if (n < 0 || (size_t)n >= sizeof w->path - used)
            return FAIL(INVALID, "%s:%d: the key is too long", w->file, line_of(w));
        w->has_key = true;
        return ST_OK;
    }
    const struct yaml_pair pair = {w->path, is_null(&w->event, text) ? "" : text, line_of(w)};
    TRY(w->take(w->context, &pair));
    w->has_key = false;
    cut_path(w);
    return ST_OK;
}

static enum status take_event(struct walk *w, int *documents)
{
    if (has_extras(&w->event))
        return FAIL(INVALID, "%s:%d: anchors and tags are not supported", w->file, line_of(w));
    switch (w->event.type) {
    case YAML_DOCUMENT_START_EVENT:
        if ((*documents)++ > 0)
            return FAIL(INVALID, "%s:%d: a second document begins; expected one", w->file,
                        line_of(w));
        return ST_OK;
    case YAML_MAPPING_START_EVENT:
        return open_mapping(w);
    case YAML_MAPPING_END_EVENT:
        w->depth--;
        cut_path(w);
        return ST_OK;
    case YAML_SCALAR_EVENT:
        return take_scalar(w);
    case YAML_SEQUENCE_START_EVENT:
        return FAIL(INVALID, "%s:%d: lists are not supported", w->file, line_of(w));
    case YAML_ALIAS_EVENT:
        return FAIL(INVALID, "%s:%d: aliases are not supported", w->file, line_of(w));
    default:
        return ST_OK;
    }
}

enum status yaml_pairs_read(const char *text, size_t bytes, const char *file,
                            enum status (*take)(void *context, const struct yaml_pair *pair),
                            void *context)
{
    struct walk w = {.file = file, .take = take, .context = context};
    enum status st = ST_OK;
    int documents = 0;
    if (!yaml_parser_initialize(&w.parser))
        return FAIL(MEMORY, "%s: out of memory while parsing", file);
    yaml_parser_set_input_string(&w.parser, (const unsigned char *)text, bytes);
    do {
        TRY_GOTO(st, out, next_event(&w));
        TRY_GOTO(st, out, take_event(&w, &documents));
    } while (w.event.type != YAML_STREAM_END_EVENT);
out:
    if (w.has_event)
        yaml_event_delete(&w.event);
    yaml_parser_delete(&w.parser);
    return st;
}
