/*
 * engine/ops/plan_device.h - a kind of device that need not be there, for plans.
 *
 * It knows what a plan asks of a device: the dtype of weights and activations, and the scratch
 * memory of the ops. Nothing can be run on it.
 */
#ifndef ENGINE_OPS_PLAN_DEVICE_H
#define ENGINE_OPS_PLAN_DEVICE_H

#include "engine/device/device.h"

C_BEGIN

/**
 * plan_device_init() - nothing is opened: there is nothing to close.
 * @kind: DEVICE_CPU or DEVICE_CUDA, also in builds without CUDA.
 * @threads: of a rank on the CPU, >= 1; scratch memory grows with them.
 *
 * Return: ST_OK; ST_UNSUPPORTED (bf16 on the CPU).
 */
MUST_CHECK enum status plan_device_init(struct device *device, enum device_kind kind,
                                        enum precision_kind precision, int threads);

C_END

#endif
