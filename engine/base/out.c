#include "engine/base/out.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

void out(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vprintf(fmt, args);
    va_end(args);
}

enum status out_flush(void)
{
    if (fflush(stdout) != 0 || ferror(stdout))
        return FAIL(IO, "standard output: %s", strerror(errno));
    return ST_OK;
}
