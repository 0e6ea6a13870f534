#include "engine/base/options.h"

#include <stdio.h>
#include <string.h>

#include "engine/base/out.h"
#include "engine/base/text.h"

/* ---- help ----------------------------------------------------------------------------------- */

enum { HELP_COLUMN = 28, HELP_WIDTH = 80 };

/* Print words, broken before HELP_WIDTH; later lines start at HELP_COLUMN. */
static void print_wrapped(const char *text, int column)
{
    while (*text != '\0') {
        int len = (int)strcspn(text, " ");
        if (column + len > HELP_WIDTH && column > HELP_COLUMN) {
            out("\n%*s", HELP_COLUMN, "");
            column = HELP_COLUMN;
        } else if (column > HELP_COLUMN) {
            out(" ");
            column++;
        }
        out("%.*s", len, text);
        column += len;
        text += len;
        text += strspn(text, " ");
    }
    out("\n");
}

static bool has_range(const struct option *o)
{
    return o->min < o->max || o->min > 0.0 || o->max < 0.0;
}

/* The default in brackets, as in "(default 384)". */
static void describe_default(char *text, size_t bytes, const struct option *o)
{
    char number[32];
    text[0] = '\0';
    if (o->required) {
        snprintf(text, bytes, " (required)");
    } else if (o->kind == OPTION_INT) {
        if (has_range(o) && (double)*(const int64_t *)o->value < o->min)
            return; /* not given is something of its own */
        snprintf(text, bytes, " (default %lld)", (long long)*(const int64_t *)o->value);
    } else if (o->kind == OPTION_REAL) {
        text_of_real(number, *(const double *)o->value);
        snprintf(text, bytes, " (default %s)", number);
    } else if (o->kind == OPTION_LIST) {
        snprintf(text, bytes, " (may be repeated)");
    } else if (o->kind == OPTION_TEXT) {
        const char *value = *(const char *const *)o->value;
        if (value != NULL && value[0] != '\0')
            snprintf(text, bytes, " (default %s)", value);
    }
}

static void print_option(const char *left, const char *help)
{
    out("%s", left);
    int column = (int)strlen(left);
    if (column + 2 > HELP_COLUMN) {
        out("\n");
        column = 0;
    }
    out("%*s", HELP_COLUMN - column, "");
    print_wrapped(help, HELP_COLUMN);
}

static void print_help(const struct command *c)
{
    out("Usage: tessera %s%s%s", c->name, c->operands != NULL ? " " : "",
        c->operands != NULL ? c->operands : "");
    for (int i = 0; i < c->option_count; i++) {
        const struct option *o = &c->options[i];
        if (o->required)
            out(" --%s %s", o->name, o->metavar != NULL ? o->metavar : "VALUE");
    }
    out(" [OPTION]...\n%s\n\nOptions:\n", c->summary);
    for (int i = 0; i < c->option_count; i++) {
        const struct option *o = &c->options[i];
        char left[128], suffix[256], help[1024];
        bool valued = o->kind != OPTION_FLAG;
        snprintf(left, sizeof left, "      --%s%s%s", o->name, valued ? " " : "",
                 !valued              ? ""
                 : o->metavar != NULL ? o->metavar
                                      : "VALUE");
        describe_default(suffix, sizeof suffix, o);
        snprintf(help, sizeof help, "%s%s", o->help, suffix);
        print_option(left, help);
    }
    print_option("  -h, --help", "show this help and exit");
    if (c->details != NULL)
        out("\n%s%s", c->details, c->details[strlen(c->details) - 1] == '\n' ? "" : "\n");
}

/* ---- parsing -------------------------------------------------------------------------------- */

static const struct option *find_option(const struct command *c, const char *name, size_t len)
{
    for (int i = 0; i < c->option_count; i++) {
        if (strlen(c->options[i].name) == len && memcmp(c->options[i].name, name, len) == 0)
            return &c->options[i];
    }
    return NULL;
}

static enum status unknown_option(const struct command *c, const char *arg)
{
    char given[256];
    const char *name = arg + strspn(arg, "-");
    snprintf(given, sizeof given, "%.*s", (int)strcspn(name, "="), name);
    struct text_nearest nearest = {given, NULL, 0};
    for (int i = 0; i < c->option_count; i++)
        text_nearest_offer(&nearest, c->options[i].name);
    text_nearest_offer(&nearest, "help");
    if (nearest.name != NULL)
        return FAIL(INVALID, "unknown option \"%s\"; did you mean \"--%s\"? (tessera %s --help)",
                    arg, nearest.name, c->name);
    return FAIL(INVALID, "unknown option \"%s\" (tessera %s --help lists them)", arg, c->name);
}

/* A bound as an integer; bounds beyond int64_t mean "as far as it goes". */
static int64_t bound_to_int(double bound)
{
    if (bound >= 9223372036854775808.0)
        return INT64_MAX;
    if (bound <= -9223372036854775808.0)
        return INT64_MIN;
    return (int64_t)bound;
}

static enum status parse_int(const struct option *o, const char *text)
{
    int64_t min = INT64_MIN, max = INT64_MAX, value;
    if (has_range(o)) {
        min = bound_to_int(o->min);
        max = bound_to_int(o->max);
    }
    if (text_to_int(&value, text) && value >= min && value <= max) {
        *(int64_t *)o->value = value;
        return ST_OK;
    }
    if (min == INT64_MIN && max == INT64_MAX)
        return FAIL(INVALID, "--%s: expected an integer, found \"%s\"", o->name, text);
    if (max == INT64_MAX)
        return FAIL(INVALID, "--%s: expected an integer of at least %lld, found \"%s\"", o->name,
                    (long long)min, text);
    return FAIL(INVALID, "--%s: expected an integer from %lld to %lld, found \"%s\"", o->name,
                (long long)min, (long long)max, text);
}

static enum status parse_real(const struct option *o, const char *text)
{
    double value;
    bool parsed = text_to_real(&value, text);
    if (parsed && (!has_range(o) || (value >= o->min && value <= o->max))) {
        *(double *)o->value = value;
        return ST_OK;
    }
    if (!has_range(o))
        return FAIL(INVALID, "--%s: expected a number, found \"%s\"", o->name, text);
    return FAIL(INVALID, "--%s: expected a number from %g to %g, found \"%s\"", o->name, o->min,
                o->max, text);
}

static enum status store_value(const struct option *o, const char *text)
{
    if (o->kind == OPTION_INT)
        return parse_int(o, text);
    if (o->kind == OPTION_REAL)
        return parse_real(o, text);
    if (o->kind == OPTION_BYTES)
        return text_to_bytes(o->value, text)
                   ? ST_OK
                   : FAIL(INVALID, "--%s: expected " TEXT_BYTES_ACCEPTED ", found \"%s\"", o->name,
                          text);
    if (o->kind == OPTION_TEXT) {
        *(const char **)o->value = text;
        return ST_OK;
    }
    ASSERT(o->kind == OPTION_LIST);
    struct option_list *list = o->value;
    if (list->count == OPTION_LIST_MAX)
        return FAIL(INVALID, "--%s: given more than %d times", o->name, OPTION_LIST_MAX);
    list->items[list->count++] = text;
    return ST_OK;
}

/* Parse the option at argv[*i]; move *i to the last argument it took. */
static enum status parse_option(const struct command *c, int argc, char **argv, int *i,
                                const struct option **found)
{
    const char *arg = argv[*i], *name = arg + 2;
    size_t len = strcspn(name, "=");
    const struct option *o = strncmp(arg, "--", 2) == 0 ? find_option(c, name, len) : NULL;
    *found = o;
    if (o == NULL)
        return unknown_option(c, arg);
    const char *value = name[len] == '=' ? name + len + 1 : NULL;
    if (o->kind == OPTION_FLAG) {
        if (value != NULL)
            return FAIL(INVALID, "--%s takes no value, found \"%s\"", o->name, value);
        *(bool *)o->value = true;
        return ST_OK;
    }
    if (value == NULL) {
        const char *what = o->metavar != NULL ? o->metavar : "a value";
        if (*i + 1 >= argc)
            return FAIL(INVALID, "--%s: %s is missing", o->name, what);
        if (strncmp(argv[*i + 1], "--", 2) == 0)
            return FAIL(INVALID, "--%s: %s is missing before \"%s\" (if it is meant: --%s=%s)",
                        o->name, what, argv[*i + 1], o->name, argv[*i + 1]);
        value = argv[++*i];
    }
    return store_value(o, value);
}

static bool asks_for_help(int argc, char **argv)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
            return true;
    }
    return false;
}

enum status options_parse(const struct command *command, int argc, char **argv, bool *help_shown)
{
    enum { MAX_OPTIONS = 64 };
    bool given[MAX_OPTIONS] = {false};
    ASSERT(command->option_count <= MAX_OPTIONS);
    /* Before anything is parsed, so that the defaults shown are the defaults. */
    *help_shown = asks_for_help(argc, argv);
    if (*help_shown) {
        print_help(command);
        return ST_OK;
    }
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--") == 0 && i + 1 == argc)
            break;
        if (argv[i][0] != '-' || strcmp(argv[i], "-") == 0 || strcmp(argv[i], "--") == 0)
            return FAIL(INVALID, "unexpected argument \"%s\" (tessera %s --help)",
                        strcmp(argv[i], "--") == 0 ? argv[i + 1] : argv[i], command->name);
        const struct option *found;
        TRY(parse_option(command, argc, argv, &i, &found));
        given[found - command->options] = true;
    }
    for (int i = 0; i < command->option_count; i++) {
        const struct option *o = &command->options[i];
        if (o->required && !given[i])
            return FAIL(INVALID, "--%s %s is required (tessera %s --help)", o->name,
                        o->metavar != NULL ? o->metavar : "VALUE", command->name);
    }
    return ST_OK;
}
