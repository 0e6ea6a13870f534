/*
 * engine/train/gpu_log.h - how a rank's card is doing, beside the training log.
 *
 *     gpu/rank-R.csv    a line every output.gpu_log_s seconds: seconds since the start, utilisation
 *                       and memory traffic in percent of the time, memory used by all processes,
 *                       power, clocks, temperature; what the card does not tell is empty
 *
 * A thread of its own writes it. Without NVML, or on the CPU, there is no file. That it cannot be
 * written ends it with a warning and costs nothing else.
 */
#ifndef ENGINE_TRAIN_GPU_LOG_H
#define ENGINE_TRAIN_GPU_LOG_H

#include "engine/base/config.h"
#include "engine/device/device.h"

C_BEGIN

struct gpu_log; /* opaque */

/** gpu_log_start() - NULL in @out where there is nothing to log, or after a failure (a warning). */
void gpu_log_start(struct gpu_log **out, const struct run_config *config,
                   const struct device *device, int rank);

/** gpu_log_stop() - one more line, then the thread is joined and the file closed. */
void gpu_log_stop(struct gpu_log **log);

C_END

#endif
