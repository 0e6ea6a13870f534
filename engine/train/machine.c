#include "engine/train/machine.h"

#include <stdio.h>
#include <string.h>

/*
 * Cards. The network is no part of them: near is NVLink within a node.
 *
 * The measured figures are tessera calibrate's on one H200, those of bench/RESULTS.md (both of 28
 * November 2026), and of a machine with 4 H200 and NCCL 2.28 (27 November 2026): collectives of 32
 * to 512 MiB.
 */
static const char nvlink4[] =
    "gather, reduce: measured on 4 H200, NCCL 2.28, between 128 and 512 MiB; hop: NCCL's own model "
    "of a ring (src/graph/tuning.cc, Simple over NVLink)";
static const char nvlink_calls[] =
    "kernel: measured on H100, gaps of 1.02 ms among 1167 kernels of a captured step; collective: "
    "measured on 4 H200, 26 us beside the bytes, of which 3 hops of 3.4 us";
static const char nvlink_slow[] =
    "near: measured on 4 H200 beside the products of BERT-large, 2,816 and 11,136 rows: 1.4 and "
    "0.8; far: assumed, 16 to 20 of 132 multiprocessors";

static const struct {
    const char *name;
    struct machine machine;
} cards[] = {
    {"h100",
     {.name = "NVIDIA H100 80GB HBM3",
      .date = "2026-11-28",
      .device = DEVICE_CUDA,
      .source = {"derived: H200's, times 619 / 680, the products of BERT-large at 16 sequences, "
                 "measured on both",
                 "as H200's (same multiprocessors)",
                 "update: measured, BERT-large, 3.43 ms; copy: update is 97% of it, measured; "
                 "elementwise: derived, H200's times 3.35 / 4.8 TB/s of the data sheets",
                 "", "", "", ""},
      .products = {{{768, {{{512, 254e12}, {1408, 438e12}, {2816, 548e12}, {11264, 598e12}}, 4}},
                    {1024, {{{512, 338e12}, {1408, 447e12}, {2816, 604e12}, {11264, 615e12}}, 4}},
                    {4096, {{{512, 584e12}, {1408, 605e12}, {2816, 617e12}, {11264, 606e12}}, 4}}},
                   3},
      .attention = {{{32, {{{128, 73.2e12}, {384, 97e12}}, 2}},
                     {64, {{{128, 95.1e12}, {384, 130e12}, {2048, 287e12}}, 3}}},
                    2},
      .attention_call_seconds = 10.7e-6,
      .memory_per_second = 3.0e12,
      .elementwise =
          {{{768, {{{512, 640e9}, {1408, 1.21e12}, {2816, 1.59e12}, {11264, 1.98e12}}, 4}},
            {1024, {{{512, 777e9}, {1408, 1.35e12}, {2816, 1.7e12}, {11264, 2.09e12}}, 4}},
            {4096, {{{512, 734e9}, {1408, 930e9}, {2816, 1.12e12}, {11264, 1.43e12}}, 4}}},
           3},
      .update_per_second = 2.92e12,
      .launch_seconds = 0.87e-6,
      .call_seconds = 16e-6,
      .near = {3.4e-6, 326e9, 321e9},
      .slow_down_near = 1.1,
      .slow_down_far = 0.15}},
    {"h200",
     {.name = "NVIDIA H200",
      .date = "2026-11-28",
      .device = DEVICE_CUDA,
      .source =
          {"measured by tessera calibrate, one H200, driver 580: four layers of a block",
           "measured by tessera calibrate, one H200, dropout 0.1; 2048: 335 of "
           "arXiv:2307.08691, section 4.1 (H100), counted as 3 in place of 3.5 passes; call: "
           "measured, what four real batches took beyond that, 7 to 13 us a pass",
           "measured by tessera calibrate, one H200: copy, a sum of two arrays; elementwise, "
           "GELU and residual norms; update, AdamW",
           "kernel: measured by tessera calibrate; collective: measured on 4 H200, 26 us beside "
           "the bytes, of which 3 hops of 3.4 us",
           "", "", ""},
      .products = {{{768, {{{512, 279e12}, {1408, 481e12}, {2816, 602e12}, {11264, 657e12}}, 4}},
                    {1024, {{{512, 371e12}, {1408, 491e12}, {2816, 663e12}, {11264, 675e12}}, 4}},
                    {4096, {{{512, 642e12}, {1408, 665e12}, {2816, 678e12}, {11264, 666e12}}, 4}}},
                   3},
      .attention = {{{32, {{{128, 73.2e12}, {384, 97e12}}, 2}},
                     {64, {{{128, 95.1e12}, {384, 130e12}, {2048, 287e12}}, 3}}},
                    2},
      .attention_call_seconds = 10.7e-6,
      .memory_per_second = 4.31e12,
      .elementwise =
          {{{768, {{{512, 917e9}, {1408, 1.74e12}, {2816, 2.28e12}, {11264, 2.83e12}}, 4}},
            {1024, {{{512, 1.11e12}, {1408, 1.94e12}, {2816, 2.44e12}, {11264, 3e12}}, 4}},
            {4096, {{{512, 1.05e12}, {1408, 1.33e12}, {2816, 1.6e12}, {11264, 2.04e12}}, 4}}},
           3},
      .update_per_second = 4.37e12,
      .launch_seconds = 1.04e-6,
      .call_seconds = 16e-6,
      .near = {3.4e-6, 326e9, 321e9},
      .slow_down_near = 1.1,
      .slow_down_far = 0.15}},
    {"a100",
     {.name = "NVIDIA A100-SXM4-80GB",
      .date = "2026-11-28",
      .device = DEVICE_CUDA,
      .source = {"derived: H200's times 312 / 989 TFLOP/s of the data sheets",
                 "derived: as products; 2048: 230 of arXiv:2307.08691, section 4.1, counted as 3 "
                 "in place of 3.5 passes",
                 "derived: H200's times 2.04 / 4.8 TB/s of the data sheets", "derived: as H100's",
                 "derived: H200's times 600 / 900 GB/s of the data sheets; hop: NCCL's own model "
                 "of a ring (src/graph/tuning.cc, Simple over NVLink)",
                 "", "near: derived, as H200's; far: assumed, 16 of 108 multiprocessors"},
      .products = {{{768, {{{512, 87.9e12}, {1408, 152e12}, {2816, 190e12}, {11264, 207e12}}, 4}},
                    {1024, {{{512, 117e12}, {1408, 155e12}, {2816, 209e12}, {11264, 213e12}}, 4}},
                    {4096, {{{512, 202e12}, {1408, 210e12}, {2816, 214e12}, {11264, 210e12}}, 4}}},
                   3},
      .attention = {{{32, {{{128, 23.1e12}, {384, 30.6e12}}, 2}},
                     {64, {{{128, 30e12}, {384, 40.9e12}, {2048, 197e12}}, 3}}},
                    2},
      .attention_call_seconds = 10.7e-6,
      .memory_per_second = 1.78e12,
      .elementwise = {{{768, {{{512, 390e9}, {1408, 738e9}, {2816, 968e9}, {11264, 1.2e12}}, 4}},
                       {1024,
                        {{{512, 473e9}, {1408, 824e9}, {2816, 1.04e12}, {11264, 1.27e12}}, 4}},
                       {4096, {{{512, 447e9}, {1408, 566e9}, {2816, 681e9}, {11264, 868e9}}, 4}}},
                      3},
      .update_per_second = 1.73e12,
      .launch_seconds = 0.87e-6,
      .call_seconds = 16e-6,
      .near = {3.4e-6, 217e9, 214e9},
      .slow_down_near = 1.1,
      .slow_down_far = 0.15}},
    {"epyc-core",
     {.name = "one core of an AMD EPYC, OpenBLAS Zen",
      .date = "2026-11-28",
      .device = DEVICE_CPU,
      .source = {"measured: linear layers 64 to 79 GFLOP/s", "measured: 31 to 38 GFLOP/s",
                 "measured: update; elementwise, GELU 4 and 8, LayerNorm 15 GB/s; copy: as update",
                 "assumed", "assumed: the copies are those of memory", "", "nothing is hidden"},
      .products = {{{768, {{{128, 64e9}, {2048, 75e9}}, 2}}}, 1},
      .attention = {{{64, {{{175, 34e9}}, 1}}}, 1},
      .memory_per_second = 16e9,
      .elementwise = {{{768, {{{128, 7e9}}, 1}}}, 1},
      .update_per_second = 16e9,
      .launch_seconds = 2e-6,
      .call_seconds = 10e-6,
      .near = {5e-6, 5e9, 4e9}}},
};

/* InfiniBand: HDR100 to NDR carry their line rate in bits; 8% are protocol and imbalance. */
#define NETWORK(gigabits)                                                                          \
    {                                                                                              \
        "ib" #gigabits, #gigabits " Gb/s InfiniBand",                                              \
        {                                                                                          \
            14e-6, 0.92 * (gigabits) / 8 * 1e9, 0.92 * (gigabits) / 8 * 1e9                        \
        }                                                                                          \
    }
static const char network_source[] =
    "line rate of a rank's port times 0.92, assumed; hop: NCCL's own model of a ring "
    "(src/graph/tuning.cc, Simple over the network)";

static const struct {
    const char *name, *title;
    struct simulate_link link;
} networks[] = {NETWORK(50), NETWORK(100), NETWORK(200), NETWORK(400)};

enum {
    CARDS = sizeof cards / sizeof *cards,
    NETWORKS = sizeof networks / sizeof *networks,
};

double machine_curve_at(const struct machine_curve *curve, double at)
{
    ASSERT(curve->count > 0);
    at = at < 1 ? 1 : at; /* nothing to do takes no time at any rate but 0 */
    if (at <= (double)curve->points[0].at)
        return curve->points[0].per_second * at / (double)curve->points[0].at;
    for (int i = 1; i < curve->count; i++) {
        double from = (double)curve->points[i - 1].at, to = (double)curve->points[i].at;
        double rate = curve->points[i - 1].per_second;
        if (at <= to)
            return rate + (curve->points[i].per_second - rate) * (at - from) / (to - from);
    }
    return curve->points[curve->count - 1].per_second;
}

double machine_table_at(const struct machine_table *table, double width, double at)
{
    int last = table->count - 1, i = 0;
    ASSERT(last >= 0);
    while (i < last && width >= (double)table->of[i + 1].width)
        i++;
    double rate = machine_curve_at(&table->of[i].curve, at);
    double from = (double)table->of[i].width;
    if (i == last || width <= from)
        return rate;
    double to = (double)table->of[i + 1].width;
    double next = machine_curve_at(&table->of[i + 1].curve, at);
    return rate + (next - rate) * (width - from) / (to - from);
}

const char *machine_builtin_names(void)
{
    return "h100, h200, a100, epyc-core; with a network behind it: h100+ib50, +ib100, +ib200, "
           "+ib400";
}

static void set_source(struct machine *m, enum machine_group group, const char *source)
{
    if (m->source[group][0] == '\0')
        snprintf(m->source[group], sizeof m->source[group], "%s", source);
}

bool machine_add_network(struct machine *m, const char *name)
{
    for (int i = 0; i < NETWORKS; i++) {
        if (strcmp(name, networks[i].name) != 0)
            continue;
        size_t used = strlen(m->name);
        snprintf(m->name + used, sizeof m->name - used, ", %s", networks[i].title);
        m->far = networks[i].link;
        snprintf(m->source[MACHINE_FAR], sizeof m->source[MACHINE_FAR], "%s", network_source);
        return true;
    }
    return false;
}

/* The card's sources, where it has none of its own, are those of NVLink. */
static void take_card(struct machine *m, int card)
{
    *m = cards[card].machine;
    set_source(m, MACHINE_LAUNCH, nvlink_calls);
    set_source(m, MACHINE_NEAR, nvlink4);
    set_source(m, MACHINE_SLOW_DOWN, nvlink_slow);
}

bool machine_builtin_card(struct machine *m, const char *card)
{
    if (strcmp(card, "NVIDIA A100-SXM4-40GB") == 0) /* but for the speed of its memory */
        card = "NVIDIA A100-SXM4-80GB";
    for (int i = 0; i < CARDS; i++) {
        if (cards[i].machine.device != DEVICE_CUDA || strcmp(cards[i].machine.name, card) != 0)
            continue;
        take_card(m, i);
        return true;
    }
    return false;
}

enum status machine_builtin(struct machine *m, const char *name)
{
    size_t card_length = strcspn(name, "+");
    for (int i = 0; i < CARDS; i++) {
        if (strlen(cards[i].name) != card_length || strncmp(cards[i].name, name, card_length) != 0)
            continue;
        take_card(m, i);
        if (name[card_length] == '\0' || machine_add_network(m, name + card_length + 1))
            return ST_OK;
    }
    return FAIL(INVALID, "no machine profile \"%.100s\"; built in are %s", name,
                machine_builtin_names());
}
