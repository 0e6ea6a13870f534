/*
 * engine/base/out.h - what users pipe: tables, JSON, help. Standard output only.
 *
 * out_flush() tells whether all that was printed arrived (a full disk, a closed pipe).
 */
#ifndef ENGINE_BASE_OUT_H
#define ENGINE_BASE_OUT_H

#include "engine/base/status.h"

C_BEGIN

/** out() - printf to standard output. */
void out(const char *fmt, ...) PRINTF_LIKE(1, 2);

/** out_flush() - Return: ST_OK; ST_IO if anything printed so far did not arrive. */
MUST_CHECK enum status out_flush(void);

C_END

#endif
