/*
 * engine/train/interrupt.h - SIGINT, SIGTERM, SIGUSR1: finish the step. A second one ends at once,
 * unless the first was SIGUSR1, which schedulers send some time before SIGTERM.
 */
#ifndef ENGINE_TRAIN_INTERRUPT_H
#define ENGINE_TRAIN_INTERRUPT_H

#include "engine/base/status.h"

C_BEGIN

/** interrupt_install() - catch the three from now on. ST_SYSTEM. */
MUST_CHECK enum status interrupt_install(void);

/** interrupt_flag() - the number of the first caught signal, 0 while there is none; read it with
 * interrupt_read(), for a handler writes it at any time and in any thread. */
const int *interrupt_flag(void);

/** interrupt_read() - what @flag says now; 0 for NULL. */
static inline int interrupt_read(const int *flag)
{
    return flag != NULL ? __atomic_load_n(flag, __ATOMIC_RELAXED) : 0;
}

/** interrupt_adopt() - another process of this run caught one: end as if this one had. */
void interrupt_adopt(int signal_number);

C_END

#endif
