#include "engine/base/log.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

static atomic_int threshold = LOG_INFO;
static _Thread_local int log_rank = -1;
static atomic_bool live; /* a live line stands on the terminal */

void log_set_rank(int rank)
{
    log_rank = rank;
}

void log_set_level(enum log_level level)
{
    atomic_store(&threshold, (int)level);
}

void log_line(enum log_level level, const char *module, const char *fmt, ...)
{
    static const char *const names[] = {"error", "warn ", "info ", "debug"};
    if ((int)level > atomic_load(&threshold) || (level >= LOG_INFO && log_rank > 0))
        return;
    struct timespec now;
    struct tm local;
    clock_gettime(CLOCK_REALTIME, &now);
    localtime_r(&now.tv_sec, &local);
    char rank[16] = "";
    if (log_rank >= 0)
        snprintf(rank, sizeof rank, "r%d ", log_rank);
    char line[4608];
    int used =
        snprintf(line, sizeof line, "%02d:%02d:%02d.%03ld %s%s %s: ", local.tm_hour, local.tm_min,
                 local.tm_sec, now.tv_nsec / 1000000, rank, names[level], module);
    va_list args;
    va_start(args, fmt);
    vsnprintf(line + used, sizeof line - (size_t)used - 1, fmt, args);
    va_end(args);
    fprintf(stderr, "%s%s\n", atomic_exchange(&live, false) ? "\r\033[K" : "", line);
}

void log_cause(const char *module, const char *message)
{
    static _Thread_local char said[4096];
    const char *trace = strstr(message, "\n  from ");
    size_t bytes = trace != NULL ? (size_t)(trace - message) : strlen(message);
    if (bytes >= sizeof said)
        bytes = sizeof said - 1;
    if (strncmp(said, message, bytes) == 0 && said[bytes] == '\0')
        return;
    memcpy(said, message, bytes);
    said[bytes] = '\0';
    log_error(module, "%s", said);
}

void log_live(const char *text, bool last)
{
    fprintf(stderr, "\r\033[K%s%s", text, last ? "\n" : "");
    atomic_store(&live, !last);
}
