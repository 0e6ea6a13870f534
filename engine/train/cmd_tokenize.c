/* `tessera tokenize`: WordPiece tokens of lines of text, as a JSON object a line. */
#include "engine/train/commands.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "engine/base/options.h"
#include "engine/base/out.h"
#include "io/wordpiece.h"

static const char DETAILS[] =
    "For each line of the input:\n"
    "  {\"tokens\":[\"zurich\",\"##s\"],\"ids\":[10204,2015],\"offsets\":[[0,6],[6,7]]}\n"
    "Offsets count code points of the line, the end excluded. No special tokens are added.\n";

struct job {
    struct vocab vocab;
    struct wordpiece tok;
    struct token_list list;
    int64_t line; /* lines done */
};

/* Tokens are valid UTF-8 without zero bytes, which vocab_load() sees to. */
static void print_string(const char *text)
{
    out("\"");
    for (size_t plain; *text != '\0'; text += plain) {
        for (plain = 0; (unsigned char)text[plain] >= ' '; plain++)
            if (text[plain] == '"' || text[plain] == '\\')
                break;
        if (plain > 0) {
            out("%.*s", (int)plain, text);
            continue;
        }
        plain = 1;
        if (*text == '"' || *text == '\\')
            out("\\%c", *text);
        else
            out("\\u%04x", (unsigned)*text);
    }
    out("\"");
}

static enum status print_line(struct job *job, const char *text, size_t bytes)
{
    struct token_list *list = &job->list;
    job->line++;
    if (bytes > 0 && text[bytes - 1] == '\r')
        bytes--;
    list->count = 0;
    enum status st = wordpiece_tokenize(&job->tok, list, text, bytes);
    if (st == ST_CORRUPT)
        return FAIL(CORRUPT, "input line %lld: %s", (long long)job->line, status_message());
    TRY(st);
    out("{\"tokens\":[");
    for (size_t i = 0; i < list->count; i++) {
        out(i > 0 ? "," : "");
        print_string(vocab_token(&job->vocab, list->tokens[i].id));
    }
    out("],\"ids\":[");
    for (size_t i = 0; i < list->count; i++)
        out("%s%d", i > 0 ? "," : "", list->tokens[i].id);
    out("],\"offsets\":[");
    for (size_t i = 0; i < list->count; i++)
        out("%s[%d,%d]", i > 0 ? "," : "", list->tokens[i].start, list->tokens[i].end);
    out("]}\n");
    return ST_OK;
}

/* All whole lines, and what follows them if @at_end; returns the bytes used up in @used. */
static enum status print_lines(struct job *job, size_t *used, const char *text, size_t bytes,
                               bool at_end)
{
    size_t at = 0;
    while (at < bytes) {
        const char *line_end = memchr(text + at, '\n', bytes - at);
        if (line_end == NULL && !at_end)
            break;
        size_t length = line_end != NULL ? (size_t)(line_end - text) - at : bytes - at;
        TRY(print_line(job, text + at, length));
        at += length + (line_end != NULL);
    }
    *used = at;
    return ST_OK;
}

static enum status read_stdin(size_t *got, char *to, size_t room)
{
    ssize_t n;
    do
        n = read(STDIN_FILENO, to, room);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return FAIL(IO, "standard input: %s", strerror(errno));
    *got = (size_t)n;
    return ST_OK;
}

/* Answer each line as it comes: somebody may be typing. */
static enum status tokenize_stdin(struct job *job)
{
    enum { CHUNK = 1 << 16 };
    char *buffer = NULL;
    size_t capacity = 0, filled = 0, got = 0, used = 0;
    enum status st;
    do {
        TRY_GOTO(st, out, mem_grow(&buffer, &capacity, filled + CHUNK, 1));
        TRY_GOTO(st, out, read_stdin(&got, buffer + filled, CHUNK));
        bool ends_a_line = got == 0 || memchr(buffer + filled, '\n', got) != NULL;
        filled += got;
        if (!ends_a_line)
            continue;
        TRY_GOTO(st, out, print_lines(job, &used, buffer, filled, got == 0));
        filled -= used;
        memmove(buffer, buffer + used, filled);
        TRY_GOTO(st, out, out_flush());
    } while (got > 0);
out:
    mem_free(&buffer);
    return st;
}

static enum status tokenize_file(struct job *job, const char *path)
{
    struct file_text file = {0};
    size_t used;
    enum status st;
    TRY_GOTO(st, out, file_read(&file, path));
    TRY_GOTO(st, out, print_lines(job, &used, file.data, file.bytes, true));
out:
    mem_free(&file.data);
    return st;
}

static enum status tokenize(const char *vocab, bool cased, const char *input)
{
    struct job job = {0};
    enum status st;
    TRY_GOTO(st, out, vocab_load(&job.vocab, vocab));
    wordpiece_init(&job.tok, &job.vocab, cased);
    if (strcmp(input, "-") == 0)
        TRY_GOTO(st, out, tokenize_stdin(&job));
    else
        TRY_GOTO(st, out, tokenize_file(&job, input));
    TRY_GOTO(st, out, out_flush());
out:
    token_list_release(&job.list);
    vocab_release(&job.vocab);
    return st;
}

enum status cmd_tokenize(int argc, char **argv)
{
    const char *vocab = NULL, *input = "-";
    bool cased = false, help_shown = false;
    const struct option options[] = {
        {.name = "vocab",
         .kind = OPTION_TEXT,
         .value = &vocab,
         .metavar = "FILE",
         .help = "BERT vocabulary, a token a line",
         .required = true},
        {.name = "cased",
         .kind = OPTION_FLAG,
         .value = &cased,
         .help = "keep case and accents, for a cased vocabulary"},
        {.name = "input",
         .kind = OPTION_TEXT,
         .value = &input,
         .metavar = "FILE",
         .help = "text, plain or gzip; - is standard input"},
    };
    const struct command command = {.name = "tokenize",
                                    .summary = "Split lines of text into WordPiece tokens.",
                                    .details = DETAILS,
                                    .options = options,
                                    .option_count = sizeof options / sizeof options[0]};
    TRY(options_parse(&command, argc, argv, &help_shown));
    if (help_shown)
        return ST_OK;
    return tokenize(vocab, cased, input);
}
