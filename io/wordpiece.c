#include "io/wordpiece.h"

#include <string.h>
#include <utf8proc.h>

#include "engine/base/arena.h"
#include "io/wordpiece_char.h"

/* ---- words to tokens ------------------------------------------------------------------------- */

/*
 * The word being read. Two bytes in front leave room for the "##" that goes before a piece inside
 * the word: it overwrites bytes that earlier pieces have used up.
 */
enum { WORD_LEAD = 2 };

struct word {
    char text[WORD_LEAD + 4 * WORDPIECE_MAX_WORD_CHARS];
    uint16_t char_end[WORDPIECE_MAX_WORD_CHARS]; /* byte behind each character, without lead */
    int32_t origin[WORDPIECE_MAX_WORD_CHARS];    /* where in the text it came from */
    int32_t char_count;                          /* goes on counting when the word is too long */
    int32_t first_origin, last_origin;
};

struct reader {
    const struct wordpiece *tok;
    struct token_list *list;
    size_t mark_count;          /* characters in list->marks */
    int32_t last_origin_placed; /* see place_marks() */
    struct word word;
};

static enum status push_token(struct token_list *list, int32_t id, int32_t first, int32_t last)
{
    if (list->count == list->capacity)
        TRY(mem_grow(&list->tokens, &list->capacity, list->count + 1, sizeof *list->tokens));
    list->tokens[list->count++] = (struct token){id, first, last + 1};
    return ST_OK;
}

/* The longest token for characters [first, ...): returns how many characters, 0 if none. */
static int32_t longest_piece(const struct vocab *vocab, struct word *word, int32_t first,
                             int32_t *id)
{
    size_t begin = first == 0 ? 0 : word->char_end[first - 1];
    size_t lead = first == 0 ? 0 : WORD_LEAD;
    char *piece = word->text + WORD_LEAD + begin - lead;
    memset(piece, '#', lead);
    int32_t last = word->char_count;
    while (last > first && word->char_end[last - 1] - begin + lead > vocab->max_token_bytes)
        last--;
    for (; last > first; last--) {
        *id = vocab_find(vocab, piece, word->char_end[last - 1] - begin + lead);
        if (*id >= 0)
            return last - first;
    }
    return 0;
}

static enum status end_word(struct reader *r)
{
    struct word *word = &r->word;
    const struct vocab *vocab = r->tok->vocab;
    int32_t char_count = word->char_count;
    if (char_count == 0)
        return ST_OK;
    size_t count_before = r->list->count;
    for (int32_t first = 0; first < char_count && char_count <= WORDPIECE_MAX_WORD_CHARS;) {
        int32_t id;
        int32_t length = longest_piece(vocab, word, first, &id);
        if (length == 0) {
            r->list->count = count_before;
            break;
        }
        TRY(push_token(r->list, id, word->origin[first], word->origin[first + length - 1]));
        first += length;
    }
    word->char_count = 0;
    if (r->list->count == count_before)
        return push_token(r->list, vocab->unk_id, word->first_origin, word->last_origin);
    return ST_OK;
}

static void add_to_word(struct word *word, int32_t c, int32_t origin)
{
    if (word->char_count == 0)
        word->first_origin = origin;
    word->last_origin = origin;
    if (word->char_count < WORDPIECE_MAX_WORD_CHARS) {
        size_t begin = word->char_count == 0 ? 0 : word->char_end[word->char_count - 1];
        utf8proc_uint8_t *to = (utf8proc_uint8_t *)word->text + WORD_LEAD + begin;
        utf8proc_ssize_t bytes = 1;
        if (c < 128)
            *to = (utf8proc_uint8_t)c;
        else
            bytes = utf8proc_encode_char(c, to);
        word->char_end[word->char_count] = (uint16_t)(begin + (size_t)bytes);
        word->origin[word->char_count] = origin;
    }
    word->char_count++;
}

/* Step 4: a character in its final form. */
static enum status add_char(struct reader *r, int32_t c, enum char_class class, int32_t origin)
{
    if (class == CHAR_SPACE)
        return end_word(r);
    if (class == CHAR_PUNCTUATION) {
        TRY(end_word(r));
        add_to_word(&r->word, c, origin);
        return end_word(r);
    }
    add_to_word(&r->word, c, origin);
    return ST_OK;
}

/* ---- step 3: canonical decomposition without non-spacing marks ------------------------------- */

struct token_mark {
    int32_t c;
    int32_t origin;
    int32_t combining_class; /* > 0 */
    bool inserted;           /* not the first character of a decomposition */
};

static enum status add_uncased(struct reader *r, int32_t c, int32_t origin)
{
    enum char_class class = char_class_of(c);
    if (class == CHAR_MARK)
        return ST_OK;
    return add_char(r, utf8proc_tolower(c), class, origin);
}

/*
 * Characters with a combining class wait until one without comes (a starter), and are then placed
 * in the order of their classes. Offsets stay in place: the k-th character that is not an insertion
 * takes the k-th origin, whatever was moved there, and an insertion takes the origin before it.
 * (Few characters survive here, and fewer move; it is what the library does.) At most 55 classes
 * exist, so a pass a class is linear.
 */
static enum status place_marks(struct reader *r)
{
    const struct token_mark *marks = r->list->marks;
    size_t next_origin = 0;
    for (int32_t class = 0, next_class;; class = next_class) {
        next_class = INT32_MAX;
        for (size_t i = 0; i < r->mark_count; i++) {
            if (marks[i].combining_class > class && marks[i].combining_class < next_class)
                next_class = marks[i].combining_class;
            if (marks[i].combining_class != class)
                continue;
            if (!marks[i].inserted) {
                while (marks[next_origin].inserted)
                    next_origin++;
                r->last_origin_placed = marks[next_origin++].origin;
            }
            TRY(add_uncased(r, marks[i].c, r->last_origin_placed));
        }
        if (next_class == INT32_MAX)
            break;
    }
    r->mark_count = 0;
    return ST_OK;
}

static enum status add_decomposed(struct reader *r, int32_t c, int32_t origin, bool inserted)
{
    int32_t class = char_combining_class(c);
    if (class != 0) {
        struct token_list *list = r->list;
        TRY(mem_grow(&list->marks, &list->mark_capacity, r->mark_count + 1, sizeof *list->marks));
        list->marks[r->mark_count++] = (struct token_mark){c, origin, class, inserted};
        return ST_OK;
    }
    if (r->mark_count > 0)
        TRY(place_marks(r));
    r->last_origin_placed = origin;
    return add_uncased(r, c, origin);
}

static enum status decompose(struct reader *r, int32_t c, int32_t origin)
{
    enum { DECOMPOSITION_MAX = 16 }; /* Unicode: canonical decompositions have at most 4 */
    utf8proc_int32_t parts[DECOMPOSITION_MAX];
    int boundary = 0;
    utf8proc_ssize_t count =
        utf8proc_decompose_char(c, parts, DECOMPOSITION_MAX, UTF8PROC_DECOMPOSE, &boundary);
    ASSERT(count >= 0 && count <= DECOMPOSITION_MAX);
    for (utf8proc_ssize_t i = 0; i < count; i++)
        TRY(add_decomposed(r, parts[i], origin, i > 0));
    return ST_OK;
}

/* ---- steps 1 and 2 --------------------------------------------------------------------------- */

static enum status add_ascii(struct reader *r, int32_t c, int32_t origin)
{
    enum char_class class = (enum char_class)r->tok->ascii[c];
    if (class == CHAR_DROP)
        return ST_OK;
    if (r->mark_count > 0)
        TRY(place_marks(r));
    r->last_origin_placed = origin;
    return add_char(r, r->tok->ascii_lower[c], class, origin);
}

static enum status add_unicode(struct reader *r, int32_t c, int32_t origin)
{
    enum char_class class = char_class_of(c);
    if (class == CHAR_DROP)
        return ST_OK;
    if (class == CHAR_SPACE)
        return add_ascii(r, ' ', origin);
    bool alone = char_is_ideograph(c);
    if (alone)
        TRY(add_ascii(r, ' ', origin));
    TRY(r->tok->cased ? add_char(r, c, class, origin) : decompose(r, c, origin));
    return alone ? add_ascii(r, ' ', origin) : ST_OK;
}

static enum status read_text(struct reader *r, const utf8proc_uint8_t *text, size_t bytes)
{
    int32_t origin = 0;
    for (size_t at = 0; at < bytes; origin++) {
        if (text[at] < 128) {
            TRY(add_ascii(r, text[at++], origin));
            continue;
        }
        utf8proc_int32_t c;
        utf8proc_ssize_t n = utf8proc_iterate(text + at, (utf8proc_ssize_t)(bytes - at), &c);
        if (n <= 0)
            return FAIL(CORRUPT, "the text is not valid UTF-8 at byte %zu", at);
        TRY(add_unicode(r, c, origin));
        at += (size_t)n;
    }
    if (r->mark_count > 0)
        TRY(place_marks(r));
    return end_word(r);
}

/* ---- the interface --------------------------------------------------------------------------- */

void wordpiece_init(struct wordpiece *tok, const struct vocab *vocab, bool cased)
{
    *tok = (struct wordpiece){.vocab = vocab, .cased = cased};
    for (int32_t c = 0; c < 128; c++) {
        tok->ascii[c] = (uint8_t)char_class_of(c);
        tok->ascii_lower[c] = (char)(!cased && c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
    }
}

enum status wordpiece_tokenize(const struct wordpiece *tok, struct token_list *list,
                               const char *text, size_t bytes)
{
    if (bytes >= INT32_MAX)
        return FAIL(INVALID, "a text of %zu bytes is too long for the tokenizer", bytes);
    struct reader r; /* not zeroed as a whole: texts may be short, and the word buffer is not */
    r.tok = tok;
    r.list = list;
    r.mark_count = 0;
    r.last_origin_placed = 0;
    r.word.char_count = 0;
    size_t count_before = list->count;
    enum status st = read_text(&r, (const utf8proc_uint8_t *)text, bytes);
    if (st != ST_OK)
        list->count = count_before;
    return st;
}

void token_list_release(struct token_list *list)
{
    mem_free(&list->tokens);
    mem_free(&list->marks);
    *list = (struct token_list){0};
}
