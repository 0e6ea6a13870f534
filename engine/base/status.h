/*
 * engine/base/status.h - one status type, one message per thread.
 *
 * Every function that can fail returns `enum status`. FAIL() writes the message of the calling
 * thread; TRY() passes a failure on and appends the place, so the report reads from the cause to
 * the caller:
 *
 *     data/train.json:12:7: expected "paragraphs", found "paragraph"
 *       from io/squad.c:88
 *       at engine/train/main.c:210
 *
 * A function that acquires nothing uses TRY. Once it has acquired something it uses only TRY_GOTO,
 * to the one label `out:`, where zero-initialised objects are released in reverse order.
 *
 * Threads: the message buffer is thread-local. A rank that runs in its own thread copies its
 * message out with status_message() before it ends.
 */
#ifndef ENGINE_BASE_STATUS_H
#define ENGINE_BASE_STATUS_H

#include <stdarg.h>
#include <stddef.h>

#ifdef __cplusplus
#define C_BEGIN extern "C" {
#define C_END   }
#else
#define C_BEGIN
#define C_END
#endif

C_BEGIN

#define MUST_CHECK             __attribute__((warn_unused_result))
#define PRINTF_LIKE(fmt, args) __attribute__((format(printf, fmt, args)))

/* name, what it means for the caller */
#define STATUS_LIST(X)                                                                             \
    X(OK, "success")                                                                               \
    X(INVALID, "bad argument or configuration")                                                    \
    X(CORRUPT, "input data is damaged or of another kind")                                         \
    X(IO, "the operating system refused a file operation")                                         \
    X(MEMORY, "out of memory")                                                                     \
    X(SYSTEM, "another operating system call failed")                                              \
    X(DEVICE, "a CUDA or cuBLAS call failed")                                                      \
    X(COMM, "a collective or a peer failed")                                                       \
    X(TIMEOUT, "a deadline passed")                                                                \
    X(INTERRUPTED, "stopped by a signal")                                                          \
    X(UNSUPPORTED, "not built in, or not possible on this device")

enum status {
#define STATUS_ENUM(name, text) ST_##name,
    STATUS_LIST(STATUS_ENUM)
#undef STATUS_ENUM
        ST_COUNT
};

/** status_name() - "OK", "INVALID", ... */
const char *status_name(enum status st);

/** status_message() - the calling thread's message; "" after status_clear(). Never NULL. */
const char *status_message(void);

/** status_clear() - empty the calling thread's message. */
void status_clear(void);

/** status_set_message() - put a message of another thread in this thread's buffer. */
void status_set_message(const char *message);

/* For the macros only. Both return st. */
enum status status_fail(enum status st, const char *file, int line, const char *fmt, ...)
    PRINTF_LIKE(4, 5);
enum status status_trace(enum status st, const char *file, int line);

#define FAIL(code, ...) status_fail(ST_##code, __FILE__, __LINE__, __VA_ARGS__)

#define TRY(expr)                                                                                  \
    do {                                                                                           \
        enum status try_st_ = (expr);                                                              \
        if (try_st_ != ST_OK)                                                                      \
            return status_trace(try_st_, __FILE__, __LINE__);                                      \
    } while (0)

#define TRY_GOTO(st, label, expr)                                                                  \
    do {                                                                                           \
        (st) = (expr);                                                                             \
        if ((st) != ST_OK) {                                                                       \
            status_trace((st), __FILE__, __LINE__);                                                \
            goto label;                                                                            \
        }                                                                                          \
    } while (0)

/* A broken promise of our own code: always on, prints the condition and aborts. */
void assert_fail(const char *file, int line, const char *condition) __attribute__((noreturn));

#define ASSERT(cond) ((cond) ? (void)0 : assert_fail(__FILE__, __LINE__, #cond))
#ifdef TESSERA_DEBUG
#define DASSERT(cond) ASSERT(cond)
#else
#define DASSERT(cond) ((void)sizeof(!(cond)))
#endif

C_END

#endif
