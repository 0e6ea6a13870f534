#include "engine/train/report_page.h"

#include <jansson.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "io/json_file.h"

/* The page with d3 in it as the Makefile makes it, and a zero byte. */
__asm__(".pushsection .rodata\n"
        ".global report_page_html\n"
        "report_page_html:\n"
        ".incbin \"" REPORT_HTML "\"\n"
        ".byte 0\n"
        ".popsection\n");
extern const char report_page_html[];

static const char PLACE[] = "@DATA@";

/* JSON as it may stand in a script element: '<' only as an escape, so that nothing in a string can
 * end the element or begin a comment. @text has room for six bytes a byte. */
static size_t escape(char *out, const char *json)
{
    size_t used = 0;
    for (; *json != '\0'; json++) {
        if (*json == '<') {
            memcpy(out + used, "\\u003c", 6);
            used += 6;
        } else {
            out[used++] = *json;
        }
    }
    return used;
}

enum status report_page_write(const char *path, const json_t *data)
{
    const char *place = strstr(report_page_html, PLACE), *rest = place + sizeof PLACE - 1;
    size_t before = (size_t)(place - report_page_html), after = strlen(rest), bytes = 0, angles = 0;
    char *json = NULL, *page = NULL;
    enum status st = ST_OK;
    TRY_GOTO(st, out, json_text(&json, &bytes, data));
    for (const char *p = json; *p != '\0'; p++)
        angles += *p == '<';
    TRY_GOTO(st, out, mem_alloc(&page, before + bytes + 5 * angles + after));
    memcpy(page, report_page_html, before);
    size_t used = before + escape(page + before, json);
    memcpy(page + used, rest, after);
    TRY_GOTO(st, out, file_write(path, page, used + after));
out:
    mem_free(&page);
    mem_free(&json);
    return st;
}
