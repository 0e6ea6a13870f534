#include "engine/train/interrupt.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

static int caught;
_Static_assert(__atomic_always_lock_free(sizeof caught, 0), "a handler can wait for nobody");

/* Two handlers may run at once, in two threads: one of them is the second. */
static void on_signal(int signal_number)
{
    int before = 0;
    /* A scheduler's warning (SIGUSR1) is followed by its SIGTERM; saving goes on in between. */
    while (before == 0 || before == SIGUSR1)
        if (__atomic_compare_exchange_n(&caught, &before, signal_number, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED))
            return;
    _exit(128 + signal_number);
}

enum status interrupt_install(void)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGINT, &action, NULL) != 0 || sigaction(SIGTERM, &action, NULL) != 0 ||
        sigaction(SIGUSR1, &action, NULL) != 0)
        return FAIL(SYSTEM, "sigaction: %s", strerror(errno));
    return ST_OK;
}

const int *interrupt_flag(void)
{
    return &caught;
}

void interrupt_adopt(int signal_number)
{
    int none = 0;
    __atomic_compare_exchange_n(&caught, &none, signal_number, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
}
