#include "io/wordpiece_char.h"

#include <stddef.h>
#include <utf8proc.h>

struct char_range {
    int32_t first, last;
};

/*
 * The `tokenizers` library takes its general categories from Unicode 8, while utf8proc follows a
 * recent version. Characters that became marks, punctuation or format characters later are ordinary
 * ones there, and so they are here: nothing between the ends of a range had such a category in
 * Unicode 8. Ranges grow over letters and unassigned characters, which need no exception. Complete
 * up to Unicode 18.
 */
static const struct char_range later_categories[] = {
    {0x005C8, 0x005C9}, {0x0061D, 0x0061D}, {0x007FD, 0x007FD}, {0x00890, 0x008E2},
    {0x009FD, 0x009FE}, {0x00A76, 0x00A76}, {0x00AFA, 0x00AFF}, {0x00B53, 0x00B55},
    {0x00C04, 0x00C3C}, {0x00C77, 0x00C77}, {0x00C84, 0x00C84}, {0x00D00, 0x00D00},
    {0x00D3B, 0x00D3C}, {0x00D81, 0x00D81}, {0x00EBA, 0x00EBA}, {0x00ECE, 0x00ECE},
    {0x0180F, 0x01886}, {0x01ABF, 0x01AF0}, {0x01B4E, 0x01B4F}, {0x01B7D, 0x01B7F},
    {0x01DF6, 0x01DFB}, {0x02E43, 0x02E63}, {0x0A82C, 0x0A82C}, {0x0A8C5, 0x0A8C5},
    {0x0A8FF, 0x0A8FF}, {0x0A9BD, 0x0A9BD}, {0x10D24, 0x10F89}, {0x11070, 0x11074},
    {0x110C2, 0x110CD}, {0x111CF, 0x111CF}, {0x1123E, 0x11241}, {0x1133B, 0x1133B},
    {0x113BB, 0x1145E}, {0x11660, 0x1166C}, {0x116B9, 0x116B9}, {0x1182F, 0x11FFF},
    {0x12FF1, 0x1612F}, {0x16D6D, 0x16F4F}, {0x16FE2, 0x16FE4}, {0x1CF00, 0x1D128},
    {0x1D25B, 0x1D25C}, {0x1E000, 0x1E6F5}, {0x1E944, 0x1E95F},
};

/* The same for combining classes, which the library takes from Unicode 9: these were 0. */
static const struct char_range later_combining_classes[] = {
    {0x005C8, 0x005C9}, {0x007FD, 0x007FD}, {0x00897, 0x008D3}, {0x009FE, 0x009FE},
    {0x00C3C, 0x00C3C}, {0x00D3B, 0x00D3C}, {0x00EBA, 0x00EBA}, {0x01715, 0x01715},
    {0x01ABF, 0x01AF0}, {0x01DF6, 0x01DFA}, {0x0A82C, 0x0A82C}, {0x10D24, 0x10F85},
    {0x11070, 0x11070}, {0x1133B, 0x1133B}, {0x113CE, 0x113D0}, {0x1145E, 0x1145E},
    {0x11839, 0x11A99}, {0x11D42, 0x1612F}, {0x16FF0, 0x16FF1}, {0x1D127, 0x1D128},
    {0x1D250, 0x1D281}, {0x1E08F, 0x1E6F5},
};

/* The last block but one begins at 2B920, not 2B820, in the library that we agree with. */
static const struct char_range ideographs[] = {
    {0x03400, 0x04DBF}, {0x04E00, 0x09FFF}, {0x0F900, 0x0FAFF}, {0x20000, 0x2A6DF},
    {0x2A700, 0x2B81F}, {0x2B920, 0x2CEAF}, {0x2F800, 0x2FA1F},
};

static bool in_ranges(const struct char_range *ranges, size_t count, int32_t c)
{
    size_t low = 0, high = count; /* the first range that ends at or behind c */
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].last < c)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && ranges[low].first <= c;
}

#define IN_RANGES(table, c) in_ranges(table, sizeof(table) / sizeof(table)[0], c)

static bool is_ascii_symbol(int32_t c)
{
    return (c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') ||
           (c >= '{' && c <= '~');
}

static enum char_class class_of_category(int32_t c)
{
    switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CO:
        return CHAR_DROP;
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
        return CHAR_SPACE;
    case UTF8PROC_CATEGORY_MN:
        return CHAR_MARK;
    case UTF8PROC_CATEGORY_PC:
    case UTF8PROC_CATEGORY_PD:
    case UTF8PROC_CATEGORY_PS:
    case UTF8PROC_CATEGORY_PE:
    case UTF8PROC_CATEGORY_PI:
    case UTF8PROC_CATEGORY_PF:
    case UTF8PROC_CATEGORY_PO:
        return CHAR_PUNCTUATION;
    default:
        return CHAR_WORD;
    }
}

enum char_class char_class_of(int32_t c)
{
    switch (c) {
    case '\t':
    case '\n':
    case '\r':
        return CHAR_SPACE;
    case 0xFFFD: /* the replacement character: somebody's decoder has failed */
        return CHAR_DROP;
    case 0x166D: /* these four changed their category after Unicode 8 */
    case 0x111C9:
        return CHAR_PUNCTUATION;
    case 0x1734:
    case 0x1171E:
        return CHAR_MARK;
    default:
        break;
    }
    if (c < 128 && is_ascii_symbol(c))
        return CHAR_PUNCTUATION;
    enum char_class class = class_of_category(c);
    if (class != CHAR_WORD && class != CHAR_SPACE && IN_RANGES(later_categories, c))
        return CHAR_WORD;
    return class;
}

int32_t char_combining_class(int32_t c)
{
    int32_t combining_class = utf8proc_get_property(c)->combining_class;
    return combining_class != 0 && IN_RANGES(later_combining_classes, c) ? 0 : combining_class;
}

bool char_is_ideograph(int32_t c)
{
    return IN_RANGES(ideographs, c);
}
