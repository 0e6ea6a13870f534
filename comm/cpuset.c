#include "comm/cpuset.h"

#include <stdio.h>
#include <string.h>

void cpuset_add(struct cpuset *set, int cpu)
{
    if (cpu >= 0 && cpu < CPUSET_MAX)
        set->word[cpu / 64] |= UINT64_C(1) << (cpu % 64);
}

bool cpuset_has(const struct cpuset *set, int cpu)
{
    return cpu >= 0 && cpu < CPUSET_MAX && (set->word[cpu / 64] >> (cpu % 64) & 1) != 0;
}

int cpuset_count(const struct cpuset *set)
{
    int count = 0;
    for (int i = 0; i < CPUSET_WORDS; i++)
        count += __builtin_popcountll(set->word[i]);
    return count;
}

bool cpuset_equal(const struct cpuset *a, const struct cpuset *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

bool cpuset_meets(const struct cpuset *a, const struct cpuset *b)
{
    for (int i = 0; i < CPUSET_WORDS; i++)
        if ((a->word[i] & b->word[i]) != 0)
            return true;
    return false;
}

bool cpuset_contains(const struct cpuset *a, const struct cpuset *b)
{
    for (int i = 0; i < CPUSET_WORDS; i++)
        if ((b->word[i] & ~a->word[i]) != 0)
            return false;
    return true;
}

void cpuset_format(const struct cpuset *set, char *out, size_t bytes)
{
    size_t used = 0;
    snprintf(out, bytes, "none");
    for (int cpu = 0; cpu < CPUSET_MAX; cpu++) {
        if (!cpuset_has(set, cpu))
            continue;
        char part[32];
        int last = cpu;
        while (cpuset_has(set, last + 1))
            last++;
        int n = last == cpu
                    ? snprintf(part, sizeof part, "%s%d", used > 0 ? "," : "", cpu)
                    : snprintf(part, sizeof part, "%s%d-%d", used > 0 ? "," : "", cpu, last);
        if (used + (size_t)n + sizeof ",..." > bytes) {
            snprintf(out + used, bytes - used, ",...");
            return;
        }
        snprintf(out + used, bytes - used, "%s", part);
        used += (size_t)n;
        cpu = last;
    }
}

/* A number at @text, -1 if there is none or it is too large; *end is behind it. */
static int number(const char **end, const char *text)
{
    int value = 0;
    const char *at = text;
    for (; *at >= '0' && *at <= '9'; at++) {
        value = value * 10 + (*at - '0');
        if (value >= CPUSET_MAX)
            return -1;
    }
    *end = at;
    return at > text ? value : -1;
}

bool cpuset_parse(struct cpuset *set, const char *text)
{
    memset(set, 0, sizeof *set);
    for (;; text++) {
        int first = number(&text, text), last = first;
        if (first < 0)
            return false;
        if (*text == '-')
            last = number(&text, text + 1);
        if (last < first)
            return false;
        for (int cpu = first; cpu <= last; cpu++)
            cpuset_add(set, cpu);
        if (*text != ',')
            return *text == '\0';
    }
}
