#include "engine/base/text.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool text_to_int(int64_t *out, const char *text)
{
    const char *digits = text + (*text == '-' || *text == '+');
    if (!isdigit((unsigned char)*digits))
        return false;
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (*end != '\0' || errno != 0)
        return false;
    *out = value;
    return true;
}

bool text_to_real(double *out, const char *text)
{
    /* strtod() also takes spaces, hexadecimal, "inf" and "nan", which nobody means here. */
    if (*text == '\0' || text[strspn(text, "+-.0123456789eE")] != '\0')
        return false;
    char *end;
    double value = strtod(text, &end);
    if (*end != '\0' || !isfinite(value))
        return false;
    *out = value;
    return true;
}

bool text_to_bytes(size_t *out, const char *text)
{
    static const struct {
        const char *name;
        double bytes;
    } units[] = {
        {"", 1},     {"B", 1},    {"KiB", 1024}, {"MiB", 1048576}, {"GiB", 0x1p30}, {"TiB", 0x1p40},
        {"kB", 1e3}, {"KB", 1e3}, {"MB", 1e6},   {"GB", 1e9},      {"TB", 1e12},
    };
    char number[32];
    double value;
    int64_t whole;
    size_t len = strspn(text, ".0123456789");
    const char *unit = text + len + strspn(text + len, " ");
    if (len == 0 || len >= sizeof number)
        return false;
    snprintf(number, sizeof number, "%.*s", (int)len, text);
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        if (strcmp(unit, units[i].name) != 0 || !text_to_real(&value, number))
            continue;
        if (value * units[i].bytes < 1 || value * units[i].bytes >= 0x1p60)
            return false;
        /* Whole numbers exactly, also where a double has not all their digits. */
        *out = text_to_int(&whole, number) ? (size_t)whole * (size_t)units[i].bytes
                                           : (size_t)(value * units[i].bytes);
        return true;
    }
    return false;
}

void text_of_bytes(char out[32], size_t bytes)
{
    static const char *const names[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = (double)bytes / 1024;
    int i = 0;
    if (bytes < 1024) {
        snprintf(out, 32, "%zu B", bytes);
        return;
    }
    for (; value >= 1023.5 && i < 5; i++)
        value /= 1024;
    snprintf(out, 32, "%.*f %s",
             value < 9.9995   ? 3
             : value < 99.995 ? 2
             : value < 999.95 ? 1
                              : 0,
             value, names[i]);
}

/* "3e-05" as people write it: "3e-5". */
static void shorten_exponent(char *text)
{
    char *e = strchr(text, 'e');
    if (e == NULL)
        return;
    char *digits = e + 1 + (e[1] == '-' || e[1] == '+');
    size_t zeros = strspn(digits, "0");
    char *to = e[1] == '-' ? e + 2 : e + 1;
    memmove(to, digits + zeros, strlen(digits + zeros) + 1);
}

void text_of_real(char out[32], double value)
{
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(out, 32, "%.*g", digits, value);
        if (strtod(out, NULL) == value) /* never equal for a NaN: it ends with 17 digits */
            break;
    }
    shorten_exponent(out);
}

int text_utf8_next(uint32_t *code, const char *text)
{
    static const uint32_t smallest_code[] = {0, 0, 0x80, 0x800, 0x10000};
    const unsigned char *s = (const unsigned char *)text;
    if (s[0] < 0x80) {
        *code = s[0];
        return 1;
    }
    int len = s[0] >= 0xF0 ? 4 : s[0] >= 0xE0 ? 3 : 2;
    if (s[0] < 0xC0 || s[0] > 0xF7)
        return 0;
    uint32_t value = s[0] & (0x7Fu >> len);
    for (int i = 1; i < len; i++) {
        if ((s[i] & 0xC0) != 0x80) /* also the final zero byte */
            return 0;
        value = value << 6 | (s[i] & 0x3Fu);
    }
    /* Overlong forms, surrogates and numbers beyond Unicode are not UTF-8. */
    if (value < smallest_code[len] || value > 0x10FFFF || (value >= 0xD800 && value <= 0xDFFF))
        return 0;
    *code = value;
    return len;
}

bool text_is_utf8(const char *text)
{
    uint32_t code;
    while (*text != '\0') {
        int len = text_utf8_next(&code, text);
        if (len == 0)
            return false;
        text += len;
    }
    return true;
}

enum { NAME_BYTES = 64 };

static int least(int a, int b, int c)
{
    int ab = a < b ? a : b;
    return ab < c ? ab : c;
}

/* Edits between two texts, where swapping two neighbours is one edit; rows of the usual table. */
static int edit_distance(const char *a, const char *b)
{
    int rows[3][NAME_BYTES + 1];
    int *before = rows[0], *last = rows[1], *row = rows[2];
    int a_len = (int)strlen(a), b_len = (int)strlen(b);
    for (int j = 0; j <= b_len; j++)
        last[j] = before[j] = j;
    for (int i = 1; i <= a_len; i++) {
        row[0] = i;
        for (int j = 1; j <= b_len; j++) {
            row[j] = least(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1]));
            bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            if (swapped && before[j - 2] + 1 < row[j])
                row[j] = before[j - 2] + 1;
        }
        int *spare = before;
        before = last;
        last = row;
        row = spare;
    }
    return last[b_len];
}

bool text_nearest_offer(struct text_nearest *nearest, const char *name)
{
    size_t given_len = strlen(nearest->given);
    if (given_len >= NAME_BYTES || strlen(name) >= NAME_BYTES)
        return false;
    int distance = edit_distance(nearest->given, name);
    /* More than a third of the letters wrong is another word. */
    int limit = given_len < 6 ? 2 : (int)given_len / 3;
    if (distance > limit || distance >= (int)strlen(name))
        return false;
    if (nearest->name != NULL && distance >= nearest->distance)
        return false;
    nearest->name = name;
    nearest->distance = distance;
    return true;
}

void text_list_add(struct text_list *list, const char *name)
{
    static const char rest[] = ", ...";
    size_t used = strlen(list->text);
    list->count++;
    if (list->left_out > 0 || used + strlen(name) + 2 + sizeof rest > sizeof list->text) {
        if (list->left_out++ == 0)
            snprintf(list->text + used, sizeof list->text - used, "%s", rest);
        return;
    }
    snprintf(list->text + used, sizeof list->text - used, "%s%s", used > 0 ? ", " : "", name);
}
