#include "comm/bind.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <stdbool.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { NODE_WORDS = 16, WORD_BITS = 8 * sizeof(unsigned long), MAX_NODES = NODE_WORDS * WORD_BITS };

enum status bind_get_cpus(struct cpuset *cpus)
{
    memset(cpus, 0, sizeof *cpus);
    if (sched_getaffinity(0, sizeof *cpus, (cpu_set_t *)cpus) != 0)
        return FAIL(SYSTEM, "sched_getaffinity: %s", strerror(errno));
    return ST_OK;
}

enum status bind_set_cpus(const struct cpuset *cpus)
{
    char text[CPUSET_TEXT_BYTES];
    if (sched_setaffinity(0, sizeof *cpus, (const cpu_set_t *)cpus) == 0)
        return ST_OK;
    cpuset_format(cpus, text, sizeof text);
    return FAIL(SYSTEM, "sched_setaffinity to CPUs %s: %s", text, strerror(errno));
}

enum status bind_set_memory(int node)
{
    unsigned long mask[NODE_WORDS] = {0};
    if (node >= MAX_NODES)
        return FAIL(SYSTEM, "node %d is above %d", node, MAX_NODES - 1);
    if (node >= 0)
        mask[node / (int)WORD_BITS] |= 1ul << node % (int)WORD_BITS;
    /* The kernel reads one bit less than it is told. */
    long rc = node >= 0 ? syscall(SYS_set_mempolicy, MPOL_PREFERRED, mask, MAX_NODES + 1ul)
                        : syscall(SYS_set_mempolicy, MPOL_DEFAULT, NULL, 0ul);
    return rc == 0 ? ST_OK : FAIL(SYSTEM, "set_mempolicy to node %d: %s", node, strerror(errno));
}

enum status bind_get_memory(int *node)
{
    unsigned long mask[NODE_WORDS] = {0};
    int mode = MPOL_DEFAULT;
    *node = BIND_ANY_NODE;
    if (syscall(SYS_get_mempolicy, &mode, mask, MAX_NODES + 1ul, NULL, 0ul) != 0)
        return FAIL(SYSTEM, "get_mempolicy: %s", strerror(errno));
    for (int n = MAX_NODES - 1; n >= 0 && mode == MPOL_PREFERRED; n--)
        if ((mask[n / (int)WORD_BITS] >> n % (int)WORD_BITS & 1) != 0)
            *node = n;
    return ST_OK;
}
