#include "engine/train/start_times.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/train/metrics.h"

/* Seconds since this process was made, or 0: field 22 of its stat, in ticks since boot. What stands
 * before it is numbers, but for the second field, a name in parentheses. */
static double process_age_s(void)
{
    char line[1024];
    unsigned long long ticks = 0;
    struct timespec now;
    FILE *f = fopen("/proc/self/stat", "r");
    if (f == NULL)
        return 0;
    size_t n = fread(line, 1, sizeof line - 1, f);
    fclose(f);
    line[n] = '\0';
    const char *rest = strrchr(line, ')');
    if (rest == NULL || sscanf(rest + 1,
                               " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d "
                               "%*d %*d %*d %llu",
                               &ticks) != 1)
        return 0;
    clock_gettime(CLOCK_BOOTTIME, &now);
    double age = (double)now.tv_sec + (double)now.tv_nsec * 1e-9 -
                 (double)ticks / (double)sysconf(_SC_CLK_TCK);
    return age > 0 ? age : 0;
}

void start_times_begin(struct start_times *t)
{
    memset(t, 0, sizeof *t);
    t->begin_s = t->last_s = clock_s() - process_age_s();
    start_times_part(t, "load");
}

void start_times_part(struct start_times *t, const char *name)
{
    if (t == NULL)
        return;
    ASSERT(t->count < START_PARTS);
    double now = clock_s();
    t->parts[t->count].name = name;
    t->parts[t->count++].s = now - t->last_s;
    t->last_s = now;
}

double start_times_all(const struct start_times *t)
{
    return t->last_s - t->begin_s;
}

void start_times_log(const struct start_times *t)
{
    char line[512];
    int used = 0;
    if (t == NULL)
        return;
    for (int i = 0; i < t->count; i++) {
        int n = snprintf(line + used, sizeof line - (size_t)used, "%s%s %.2f", i > 0 ? ", " : "",
                         t->parts[i].name, t->parts[i].s);
        ASSERT(n > 0 && n < (int)sizeof line - used);
        used += n;
    }
    log_info("run", "start: %.2f s to the first step: %s", start_times_all(t), line);
}
