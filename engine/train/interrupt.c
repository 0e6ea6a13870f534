#include "engine/train/interrupt.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

static volatile int caught;

static void on_signal(int signal_number)
{
    /* A scheduler's warning (SIGUSR1) is followed by its SIGTERM; saving goes on in between. */
    if (caught != 0 && caught != SIGUSR1)
        _exit(128 + signal_number);
    caught = signal_number;
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

const volatile int *interrupt_flag(void)
{
    return &caught;
}

void interrupt_adopt(int signal_number)
{
    if (caught == 0)
        caught = signal_number;
}
