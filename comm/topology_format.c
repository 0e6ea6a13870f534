#include "comm/topology_format.h"

#include <stdlib.h>
#include <string.h>

/* Format 3 as format 2, which differs in what we read by the numbers of device types: sets of bits
 * then, one of a list before. The text keeps its length. */
static void translate_format_3(char *text, char *version)
{
    static const char *const key = "osdev_type=\"";
    memcpy(version, "2.0", 3);
    version[3] = '"';
    for (char *c = version + 4; *c == '"' || (*c >= '0' && *c <= '9'); c++)
        *c = ' ';
    for (char *at = text; (at = strstr(at, key)) != NULL;) {
        at += strlen(key);
        char *end;
        unsigned long bits = strtoul(at, &end, 10);
        if (end == at || *end != '"')
            continue;
        char type = bits & 32   ? '3'
                    : bits & 16 ? '2'
                    : bits & 8  ? '5'
                    : bits & 4  ? '1'
                    : bits & 64 ? '4'
                                : '0';
        memset(at, ' ', (size_t)(end - at) + 1);
        at[0] = type;
        at[1] = '"';
    }
}

enum status topology_format_check(char *text, const char *path, bool knows_3)
{
    static const char *const root = "<topology";
    char *at = strstr(text, root), *end = at != NULL ? strchr(at, '>') : NULL;
    if (end == NULL)
        return FAIL(CORRUPT, "%s: no <topology>: expected what lstopo writes (lstopo FILE.xml)",
                    path);
    if (strstr(end, "</topology>") == NULL)
        return FAIL(CORRUPT, "%s: </topology> is missing: the file is cut short", path);
    char *version = strstr(at, "version=\"");
    if (version == NULL || version > end)
        return ST_OK; /* format 1 */
    version += strlen("version=\"");
    long major = strtol(version, NULL, 10);
    if (major > 3)
        return FAIL(CORRUPT,
                    "%s: format %ld of hwloc's XML, known are 1 to 3 (lstopo writes older "
                    "ones with --export-xml-flags)",
                    path, major);
    if (major == 3 && !knows_3 && version[1] == '.')
        translate_format_3(text, version);
    return ST_OK;
}
