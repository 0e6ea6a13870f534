/*
 * engine/train/peak.h - what a card can do at most, for model FLOPs utilisation (MFU).
 *
 * Dense matrix products, without structured sparsity (whose figures are twice as large), from the
 * makers' data sheets; bf16 with fp32 accumulation on tensor cores, fp32 without TF32. A card that
 * the table does not name has no MFU: a wrong peak is worse than none.
 */
#ifndef ENGINE_TRAIN_PEAK_H
#define ENGINE_TRAIN_PEAK_H

#include "engine/base/tensor.h"

C_BEGIN

/**
 * peak_flops() - operations a second of @device with operands of @dtype, 0 if not known.
 * @device: the driver's name of the card, in full.
 */
double peak_flops(const char *device, enum dtype dtype);

C_END

#endif
