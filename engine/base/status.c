#include "engine/base/status.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MESSAGE_BYTES = 4096 };

static _Thread_local char message[MESSAGE_BYTES];

const char *status_name(enum status st)
{
    static const char *const names[] = {
#define STATUS_NAME(name, text) #name,
        STATUS_LIST(STATUS_NAME)
#undef STATUS_NAME
    };
    return (unsigned)st < ST_COUNT ? names[st] : "UNKNOWN";
}

const char *status_message(void)
{
    return message;
}

void status_clear(void)
{
    message[0] = '\0';
}

void status_set_message(const char *text)
{
    snprintf(message, sizeof message, "%s", text);
}

enum status status_fail(enum status st, const char *file, int line, const char *fmt, ...)
{
    /* The arguments may point into the buffer (a wrapped message), so format elsewhere first. */
    char text[MESSAGE_BYTES - 256];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    snprintf(message, sizeof message, "%s\n  from %s:%d", text, file, line);
    return st;
}

enum status status_trace(enum status st, const char *file, int line)
{
    size_t used = strlen(message);
    snprintf(message + used, sizeof message - used, "\n  at %s:%d", file, line);
    return st;
}

void assert_fail(const char *file, int line, const char *condition)
{
    fprintf(stderr, "%s:%d: assertion failed: %s\n", file, line, condition);
    fflush(stderr);
    abort();
}
