/*
 * io/parts.h - work that is cut into parts, by the threads of whoever calls.
 *
 * A module here starts no threads. Where its work comes in parts that write to places of their own
 * it takes one of these; NULL means the calling thread alone, and the result is the same.
 */
#ifndef IO_PARTS_H
#define IO_PARTS_H

#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

struct parts_runner {
    /* Calls @body for the parts 0 .. @parts - 1, in any order and at the same time; returns when
     * all are done. */
    void (*run)(void *context, void (*body)(void *of_body, int64_t part, int worker), void *of_body,
                int64_t parts);
    void *context;
};

/** parts_run() - all parts, by @runner or here. */
static inline void parts_run(const struct parts_runner *runner,
                             void (*body)(void *of_body, int64_t part, int worker), void *of_body,
                             int64_t parts)
{
    if (runner != NULL)
        runner->run(runner->context, body, of_body, parts);
    for (int64_t part = 0; runner == NULL && part < parts; part++)
        body(of_body, part, 0);
}

C_END

#endif
