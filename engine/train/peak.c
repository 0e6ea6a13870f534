#include "engine/train/peak.h"

#include <string.h>

/* TFLOP/s; 0: the card cannot, or the sheet does not say. Sources: NVIDIA's data sheets of each
 * card; where a sheet gives only the figure with sparsity, half of it. */
static const struct {
    const char *device;
    double bf16, fp32;
} peaks[] = {
    {"NVIDIA H100 80GB HBM3", 989.4, 66.9}, /* SXM5 */
    {"NVIDIA H100 PCIe", 756, 51.2},
    {"NVIDIA H100 NVL", 835, 60},
    {"NVIDIA H200", 989.4, 66.9},
    {"NVIDIA H200 NVL", 835, 60},
    {"NVIDIA GH200 480GB", 989.4, 66.9},
    {"NVIDIA GH200 120GB", 989.4, 66.9},
    {"NVIDIA B200", 2250, 75},
    {"NVIDIA A100-SXM4-40GB", 312, 19.5},
    {"NVIDIA A100-SXM4-80GB", 312, 19.5},
    {"NVIDIA A100-PCIE-40GB", 312, 19.5},
    {"NVIDIA A100 80GB PCIe", 312, 19.5},
    {"NVIDIA A40", 149.7, 37.4},
    {"NVIDIA A30", 165, 10.3},
    {"NVIDIA A10", 125, 31.2},
    {"NVIDIA L40S", 362, 91.6},
    {"NVIDIA L40", 181, 90.5},
    {"NVIDIA L4", 121, 30.3},
    {"NVIDIA GeForce RTX 4090", 165.2, 82.6},
    {"NVIDIA GeForce RTX 3090", 71, 35.6},
    {"Tesla V100-SXM2-16GB", 0, 15.7},
    {"Tesla V100-SXM2-32GB", 0, 15.7},
    {"Tesla V100-PCIE-32GB", 0, 14},
};

double peak_flops(const char *device, enum dtype dtype)
{
    for (size_t i = 0; i < sizeof peaks / sizeof peaks[0]; i++)
        if (strcmp(device, peaks[i].device) == 0)
            return 1e12 * (dtype == DTYPE_BF16 ? peaks[i].bf16 : peaks[i].fp32);
    return 0;
}
