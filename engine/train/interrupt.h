/*
 * engine/train/interrupt.h - SIGINT and SIGTERM: finish the step; a second one ends at once.
 */
#ifndef ENGINE_TRAIN_INTERRUPT_H
#define ENGINE_TRAIN_INTERRUPT_H

#include "engine/base/status.h"

C_BEGIN

/** interrupt_install() - catch SIGINT and SIGTERM from now on. ST_SYSTEM. */
MUST_CHECK enum status interrupt_install(void);

/** interrupt_flag() - the number of the first caught signal, 0 while there is none. */
const volatile int *interrupt_flag(void);

C_END

#endif
