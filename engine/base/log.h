/*
 * engine/base/log.h - log lines for people, on standard error.
 *
 *     12:03:44.120 r0 info  train: step 10 loss=3.21
 *
 * Rank 0 prints info and debug; every rank prints warnings and errors. Nothing is logged inside ops
 * or kernels. Safe from any thread: a line is one write.
 */
#ifndef ENGINE_BASE_LOG_H
#define ENGINE_BASE_LOG_H

#include <stdbool.h>

#include "engine/base/status.h"

C_BEGIN

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };

/** log_set_rank() - this thread speaks for @rank; -1 (the default) means "no rank yet". */
void log_set_rank(int rank);

/** log_set_level() - the least important level that is still printed (LOG_INFO at start). */
void log_set_level(enum log_level level);

void log_line(enum log_level level, const char *module, const char *fmt, ...) PRINTF_LIKE(3, 4);

/**
 * log_cause() - say @message (a status_message(), without its trace) as an error, unless this
 * thread said it last. A rank that may not come to its end says its cause before it waits
 * for anything; if it does come there, `main` says it no second time.
 */
void log_cause(const char *module, const char *message);

/**
 * log_live() - on a terminal: one line on standard error that the next call, or log line, replaces.
 * @last: true leaves it there.
 */
void log_live(const char *text, bool last);

#define log_error(module, ...) log_line(LOG_ERROR, module, __VA_ARGS__)
#define log_warn(module, ...)  log_line(LOG_WARN, module, __VA_ARGS__)
#define log_info(module, ...)  log_line(LOG_INFO, module, __VA_ARGS__)
#define log_debug(module, ...) log_line(LOG_DEBUG, module, __VA_ARGS__)

C_END

#endif
