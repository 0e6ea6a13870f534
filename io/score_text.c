#include "io/score_text.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "engine/base/arena.h"

enum {
    CAPITAL_I_DOT = 0x130,
    COMBINING_DOT = 0x307,
    CAPITAL_SIGMA = 0x3A3,
    SMALL_SIGMA = 0x3C3,
    FINAL_SIGMA = 0x3C2,
    REPLACEMENT = 0xFFFD
};

static bool in_table(int32_t c, const int32_t (*ranges)[2], size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (c >= ranges[i][0] && c <= ranges[i][1])
            return true;
    return false;
}
#define IN_TABLE(c, table) in_table((c), (table), sizeof(table) / sizeof(table)[0])

/* Unicode's Cased: categories Lu, Ll, Lt, and what has Other_Lowercase or Other_Uppercase. */
static bool is_cased(int32_t c)
{
    static const int32_t other[][2] = {
        {0xAA, 0xAA},       {0xBA, 0xBA},       {0x2B0, 0x2B8},    {0x2C0, 0x2C1},
        {0x2E0, 0x2E4},     {0x345, 0x345},     {0x37A, 0x37A},    {0x1D2C, 0x1D6A},
        {0x1D78, 0x1D78},   {0x1D9B, 0x1DBF},   {0x2071, 0x2071},  {0x207F, 0x207F},
        {0x2090, 0x209C},   {0x2160, 0x217F},   {0x24B6, 0x24E9},  {0x2C7C, 0x2C7D},
        {0xA69C, 0xA69D},   {0xA770, 0xA770},   {0xA7F8, 0xA7F9},  {0xAB5C, 0xAB5F},
        {0x1F130, 0x1F149}, {0x1F150, 0x1F169}, {0x1F170, 0x1F189}};
    utf8proc_category_t category = utf8proc_category(c);
    return category == UTF8PROC_CATEGORY_LU || category == UTF8PROC_CATEGORY_LL ||
           category == UTF8PROC_CATEGORY_LT || IN_TABLE(c, other);
}

/* Unicode's Case_Ignorable: marks, formats, modifiers, and the marks that stand inside words. */
static bool is_case_ignorable(int32_t c)
{
    static const int32_t inside_words[][2] = {
        {0x27, 0x27},     {0x2E, 0x2E},     {0x3A, 0x3A},     {0xB7, 0xB7},
        {0x387, 0x387},   {0x55F, 0x55F},   {0x5F4, 0x5F4},   {0x2018, 0x2019},
        {0x2024, 0x2024}, {0x2027, 0x2027}, {0xFE13, 0xFE13}, {0xFE52, 0xFE52},
        {0xFE55, 0xFE55}, {0xFF07, 0xFF07}, {0xFF0E, 0xFF0E}, {0xFF1A, 0xFF1A}};
    switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_SK:
        return true;
    default:
        return IN_TABLE(c, inside_words);
    }
}

/* A sigma is final when a cased letter stands before it and none behind it. */
static bool is_final_sigma(const int32_t *points, int64_t count, int64_t at)
{
    int64_t before = at - 1, behind = at + 1;
    while (before >= 0 && is_case_ignorable(points[before]))
        before--;
    if (before < 0 || !is_cased(points[before]))
        return false;
    while (behind < count && is_case_ignorable(points[behind]))
        behind++;
    return behind == count || !is_cased(points[behind]);
}

static bool is_punctuation(int32_t c) /* Python's string.punctuation */
{
    return (c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') ||
           (c >= '{' && c <= '~');
}

static bool is_space(int32_t c) /* Python's str.isspace() */
{
    static const int32_t spaces[][2] = {
        {0x09, 0x0D},     {0x1C, 0x20},     {0x85, 0x85},     {0xA0, 0xA0},     {0x1680, 0x1680},
        {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}};
    return IN_TABLE(c, spaces);
}

static bool is_word(int32_t c) /* \w of Python's re; '_' is gone by then */
{
    utf8proc_category_t category = utf8proc_category(c);
    return (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO) ||
           (category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO);
}

static int64_t decode(int32_t *points, const char *text, size_t bytes)
{
    int64_t count = 0;
    for (size_t i = 0; i < bytes;) {
        utf8proc_int32_t c;
        utf8proc_ssize_t used =
            utf8proc_iterate((const utf8proc_uint8_t *)text + i, (utf8proc_ssize_t)(bytes - i), &c);
        points[count++] = used > 0 ? c : REPLACEMENT;
        i += used > 0 ? (size_t)used : 1;
    }
    return count;
}

/* Lower case and no punctuation. The output may grow by one code point for each input one. */
static int64_t lower_without_punctuation(int32_t *to, const int32_t *from, int64_t count)
{
    int64_t n = 0;
    for (int64_t i = 0; i < count; i++) {
        if (is_punctuation(from[i]))
            continue;
        if (from[i] == CAPITAL_I_DOT) {
            to[n++] = 'i';
            to[n++] = COMBINING_DOT;
        } else if (from[i] == CAPITAL_SIGMA) {
            to[n++] = is_final_sigma(from, count, i) ? FINAL_SIGMA : SMALL_SIGMA;
        } else {
            to[n++] = utf8proc_tolower(from[i]);
        }
    }
    return n;
}

/* A whole word that is an article becomes a blank. */
static void blank_articles(int32_t *points, int64_t count)
{
    for (int64_t i = 0, end; i < count; i = end) {
        end = i + 1;
        if (!is_word(points[i]))
            continue;
        while (end < count && is_word(points[end]))
            end++;
        const int32_t *w = points + i;
        int64_t length = end - i;
        if ((length == 1 && w[0] == 'a') || (length == 2 && w[0] == 'a' && w[1] == 'n') ||
            (length == 3 && w[0] == 't' && w[1] == 'h' && w[2] == 'e'))
            for (int64_t k = i; k < end; k++)
                points[k] = ' ';
    }
}

static int compare_words(const void *left, const void *right)
{
    const struct score_word *a = left, *b = right;
    if (a->bytes != b->bytes)
        return a->bytes < b->bytes ? -1 : 1;
    return memcmp(a->text, b->text, a->bytes);
}

/* Write the words, joined by one blank, into normal (large enough) and list them. */
static enum status join_words(struct score_text *st, const int32_t *points, int64_t count)
{
    size_t used = 0;
    st->word_count = 0;
    for (int64_t i = 0; i < count;) {
        if (is_space(points[i])) {
            i++;
            continue;
        }
        TRY(mem_grow(&st->words, &st->word_capacity, (size_t)st->word_count + 1,
                     sizeof *st->words));
        if (st->word_count > 0)
            st->normal[used++] = ' ';
        struct score_word *word = &st->words[st->word_count++];
        word->text = st->normal + used;
        for (; i < count && !is_space(points[i]); i++)
            used +=
                (size_t)utf8proc_encode_char(points[i], (utf8proc_uint8_t *)(st->normal + used));
        word->bytes = (size_t)(st->normal + used - word->text);
    }
    st->normal[used] = '\0';
    if (st->word_count > 1)
        qsort(st->words, (size_t)st->word_count, sizeof *st->words, compare_words);
    return ST_OK;
}

enum status score_text_build(struct score_text *st, const char *text)
{
    size_t bytes = strlen(text);
    /* At most one code point a byte, twice that in lower case, and four bytes for each of them. */
    TRY(mem_grow(&st->points, &st->point_capacity, 3 * bytes + 1, sizeof *st->points));
    TRY(mem_grow(&st->normal, &st->normal_capacity, 8 * bytes + 1, 1));
    int64_t count = decode(st->points, text, bytes);
    int32_t *lower = st->points + count;
    count = lower_without_punctuation(lower, st->points, count);
    blank_articles(lower, count);
    return join_words(st, lower, count);
}

bool score_text_exact(const struct score_text *gold, const struct score_text *prediction)
{
    return strcmp(gold->normal, prediction->normal) == 0;
}

double score_text_f1(const struct score_text *gold, const struct score_text *prediction,
                     double both_empty)
{
    if (gold->word_count == 0 || prediction->word_count == 0)
        return gold->word_count == prediction->word_count ? both_empty : 0.0;
    int64_t same = 0;
    for (int64_t g = 0, p = 0; g < gold->word_count && p < prediction->word_count;) {
        int order = compare_words(&gold->words[g], &prediction->words[p]);
        same += order == 0;
        g += order <= 0;
        p += order >= 0;
    }
    if (same == 0)
        return 0.0;
    double precision = (double)same / (double)prediction->word_count;
    double recall = (double)same / (double)gold->word_count;
    return 2 * precision * recall / (precision + recall);
}

void score_text_release(struct score_text *st)
{
    mem_free(&st->normal);
    mem_free(&st->words);
    mem_free(&st->points);
    *st = (struct score_text){0};
}
