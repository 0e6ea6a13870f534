#include <stdio.h>
#include <string.h>
#include <yaml.h>

#include "engine/base/config_table.h"
#include "engine/base/text.h"

/*
 * The events of a file that we accept, as a grammar; anything else is refused where it stands:
 *
 *   stream-start [ document-start ( empty | mapping( section ( empty | mapping( key value )* ) )* )
 *   document-end ] stream-end
 */
struct reader {
    struct run_config *config;
    const char *path;
    yaml_parser_t parser;
    yaml_event_t event; /* the current one */
    bool has_event;
    const char *section;    /* of the table; NULL outside sections */
    int section_lines[128]; /* by index of a section's first field: where it was given, 0 = not */
    int field_lines[128];   /* by index of the field */
};

static int line_of(const struct reader *r)
{
    return (int)r->event.start_mark.line + 1;
}

/* libyaml's own words for text that is not YAML at all. */
static enum status broken_yaml(const struct reader *r)
{
    const yaml_parser_t *p = &r->parser;
    const char *problem = p->problem != NULL ? p->problem : "broken YAML";
    if (p->error == YAML_MEMORY_ERROR)
        return FAIL(MEMORY, "%s: out of memory while parsing", r->path);
    if (p->error == YAML_READER_ERROR)
        return FAIL(INVALID, "%s: byte %zu: %s", r->path, p->problem_offset, problem);
    return FAIL(INVALID, "%s:%zu:%zu: %s%s%s", r->path, p->problem_mark.line + 1,
                p->problem_mark.column + 1, problem, p->context != NULL ? " " : "",
                p->context != NULL ? p->context : "");
}

static enum status refuse_extras(const struct reader *r)
{
    const yaml_event_t *e = &r->event;
    const yaml_char_t *anchor = NULL, *tag = NULL;
    if (e->type == YAML_ALIAS_EVENT)
        return FAIL(INVALID, "%s:%d: aliases (*%s) are not supported", r->path, line_of(r),
                    (const char *)e->data.alias.anchor);
    if (e->type == YAML_SCALAR_EVENT) {
        anchor = e->data.scalar.anchor;
        tag = e->data.scalar.tag;
    } else if (e->type == YAML_MAPPING_START_EVENT) {
        anchor = e->data.mapping_start.anchor;
        tag = e->data.mapping_start.tag;
    }
    if (anchor != NULL)
        return FAIL(INVALID, "%s:%d: anchors (&%s) are not supported", r->path, line_of(r),
                    (const char *)anchor);
    if (tag != NULL)
        return FAIL(INVALID, "%s:%d: tags (%s) are not supported", r->path, line_of(r),
                    (const char *)tag);
    return ST_OK;
}

static enum status next_event(struct reader *r)
{
    if (r->has_event)
        yaml_event_delete(&r->event);
    r->has_event = false;
    if (!yaml_parser_parse(&r->parser, &r->event))
        return broken_yaml(r);
    r->has_event = true;
    return refuse_extras(r);
}

static bool is_plain(const yaml_event_t *e)
{
    return e->type == YAML_SCALAR_EVENT && e->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
}

/* YAML's null: nothing at all, "~" or "null". */
static bool is_null(const yaml_event_t *e)
{
    const char *text = (const char *)e->data.scalar.value;
    return is_plain(e) && (text[0] == '\0' || strcmp(text, "~") == 0 || strcmp(text, "null") == 0);
}

/* The current event as text. */
static enum status scalar_text(const struct reader *r, const char **text, const char *what)
{
    const yaml_event_t *e = &r->event;
    if (e->type != YAML_SCALAR_EVENT)
        return FAIL(INVALID, "%s:%d: %s: expected one value, found a %s", r->path, line_of(r), what,
                    e->type == YAML_SEQUENCE_START_EVENT ? "list" : "mapping");
    *text = (const char *)e->data.scalar.value;
    if (strlen(*text) != e->data.scalar.length)
        return FAIL(INVALID, "%s:%d: %s: the text holds a zero byte", r->path, line_of(r), what);
    return ST_OK;
}

static enum status unknown_name(const struct reader *r, const char *name)
{
    struct text_nearest nearest = {name, NULL, 0};
    for (int i = 0; i < config_field_count; i++) {
        const struct config_field *f = &config_fields[i];
        if (r->section == NULL)
            text_nearest_offer(&nearest, f->section);
        else if (strcmp(f->section, r->section) == 0)
            text_nearest_offer(&nearest, f->name);
    }
    const char *dot = r->section != NULL ? "." : "";
    const char *section = r->section != NULL ? r->section : "";
    const char *what = r->section != NULL ? "key" : "section";
    if (nearest.name != NULL)
        return FAIL(INVALID, "%s:%d: unknown %s \"%s%s%.100s\"; did you mean \"%s%s%s\"?", r->path,
                    line_of(r), what, section, dot, name, section, dot, nearest.name);
    return FAIL(INVALID, "%s:%d: unknown %s \"%s%s%.100s\" (docs/configuration.md lists them)",
                r->path, line_of(r), what, section, dot, name);
}

static enum status read_field(struct reader *r)
{
    const char *name, *value;
    char origin[1200], key[128];
    TRY(scalar_text(r, &name, r->section));
    const struct config_field *f = field_find(r->section, name);
    if (f == NULL)
        return unknown_name(r, name);
    int *given = &r->field_lines[f - config_fields];
    if (*given != 0)
        return FAIL(INVALID, "%s:%d: %s.%s: already given on line %d", r->path, line_of(r),
                    f->section, f->name, *given);
    *given = line_of(r);
    snprintf(key, sizeof key, "%s.%s", f->section, f->name);
    TRY(next_event(r));
    TRY(scalar_text(r, &value, key));
    if (is_null(&r->event) && f->kind == FIELD_TEXT)
        value = "";
    snprintf(origin, sizeof origin, "%s:%d", r->path, line_of(r));
    return field_parse(f, r->config, value, origin);
}

static enum status read_section(struct reader *r)
{
    const char *name;
    r->section = NULL;
    TRY(scalar_text(r, &name, "section"));
    int first = 0;
    while (first < config_field_count && strcmp(config_fields[first].section, name) != 0)
        first++;
    if (first == config_field_count)
        return unknown_name(r, name);
    if (r->section_lines[first] != 0)
        return FAIL(INVALID, "%s:%d: section %s: already given on line %d", r->path, line_of(r),
                    config_fields[first].section, r->section_lines[first]);
    r->section_lines[first] = line_of(r);
    r->section = config_fields[first].section;
    TRY(next_event(r));
    if (r->event.type == YAML_SCALAR_EVENT && is_null(&r->event))
        return ST_OK;
    if (r->event.type != YAML_MAPPING_START_EVENT)
        return FAIL(INVALID, "%s:%d: section %s: expected \"key: value\" lines, found a %s",
                    r->path, line_of(r), r->section,
                    r->event.type == YAML_SEQUENCE_START_EVENT ? "list" : "single value");
    TRY(next_event(r));
    while (r->event.type != YAML_MAPPING_END_EVENT) {
        TRY(read_field(r));
        TRY(next_event(r));
    }
    return ST_OK;
}

static enum status read_document(struct reader *r)
{
    TRY(next_event(r));
    if (r->event.type == YAML_SCALAR_EVENT && is_null(&r->event))
        return next_event(r);
    if (r->event.type != YAML_MAPPING_START_EVENT)
        return FAIL(INVALID, "%s:%d: expected sections (\"train:\") with keys, found a %s", r->path,
                    line_of(r),
                    r->event.type == YAML_SEQUENCE_START_EVENT ? "list" : "single value");
    TRY(next_event(r));
    while (r->event.type != YAML_MAPPING_END_EVENT) {
        TRY(read_section(r));
        TRY(next_event(r));
    }
    return next_event(r);
}

static enum status read_stream(struct reader *r)
{
    TRY(next_event(r)); /* stream start */
    TRY(next_event(r));
    if (r->event.type == YAML_STREAM_END_EVENT)
        return ST_OK;
    TRY(read_document(r));
    ASSERT(r->event.type == YAML_DOCUMENT_END_EVENT);
    TRY(next_event(r));
    if (r->event.type == YAML_DOCUMENT_START_EVENT)
        return FAIL(INVALID, "%s:%d: a second document begins; expected one", r->path, line_of(r));
    return ST_OK;
}

enum status config_read_yaml(struct run_config *config, const char *text, size_t bytes,
                             const char *path)
{
    struct reader r = {.config = config, .path = path};
    ASSERT(config_field_count <= (int)(sizeof r.field_lines / sizeof r.field_lines[0]));
    if (!yaml_parser_initialize(&r.parser))
        return FAIL(MEMORY, "%s: out of memory while parsing", path);
    yaml_parser_set_input_string(&r.parser, (const unsigned char *)text, bytes);
    enum status st;
    TRY_GOTO(st, out, read_stream(&r));
out:
    if (r.has_event)
        yaml_event_delete(&r.event);
    yaml_parser_delete(&r.parser);
    return st;
}
