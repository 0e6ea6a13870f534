#include "engine/train/machine.h"

#include <stdio.h>
#include <string.h>

/*
 * Cards. The network is no part of them: near is NVLink within a node.
 *
 * H200's numbers are in engine/train/h200.yaml, which scripts/take-rates.py renews from a file of
 * tessera calibrate. H100's and A100's are made from them, in proportion to what was measured of
 * that card or stands in its data sheet; A core's are numbers of bench/RESULTS.md.
 */
__asm__(".pushsection .rodata\n"
        ".global machine_h200_yaml\n"
        "machine_h200_yaml:\n"
        ".incbin \"engine/train/h200.yaml\"\n"
        ".byte 0\n"
        ".popsection\n");
extern const char machine_h200_yaml[];

/* A card like H200, times as fast. @source: "" for a group that is H200's. */
struct relative {
    const char *name, *full_name, *source[MACHINE_GROUPS];
    double products, elementwise, near;
    struct machine_table attention; /* its own, as the next three; empty: H200's */
    double attention_call_seconds;
    double memory_per_second, update_per_second;
    double launch_seconds; /* 0: H200's */
};

static const struct relative relatives[] = {
    {.name = "h100",
     .full_name = "NVIDIA H100 80GB HBM3",
     .source = {[MACHINE_PRODUCTS] = "derived: H200's, times 619 / 680, the products of BERT-large "
                                     "at 16 sequences, measured on both",
                [MACHINE_ATTENTION] = "derived: as H200's, which has the same multiprocessors",
                [MACHINE_MEMORY] = "update: measured, BERT-large, 3.43 ms; copy: update is 97% of "
                                   "it, measured; elementwise: derived, H200's times 3.35 / 4.8 "
                                   "TB/s of the data sheets",
                [MACHINE_LAUNCH] =
                    "kernel: measured, gaps of 1.02 ms among 1167 kernels of a captured step; "
                    "least, edge: derived, as H200's; collective: measured on 4 H200"},
     .products = 619.0 / 680,
     .elementwise = 3.35 / 4.8,
     .near = 1,
     .memory_per_second = 3.0e12,
     .update_per_second = 2.92e12,
     .launch_seconds = 0.87e-6},
    {.name = "a100",
     .full_name = "NVIDIA A100-SXM4-80GB",
     .source = {[MACHINE_PRODUCTS] = "derived: H200's times 312 / 989 TFLOP/s of the data sheets",
                [MACHINE_ATTENTION] = "derived: the kernels of its kind, measured on H200, times "
                                      "312 / 989 as products; 2048: 230 of arXiv:2307.08691, "
                                      "section 4.1, counted as 3 in place of 3.5 passes; call: as "
                                      "those on H200",
                [MACHINE_MEMORY] = "derived: H200's times 2.04 / 4.8 TB/s of the data sheets",
                [MACHINE_LAUNCH] = "derived: as H200's",
                [MACHINE_NEAR] = "derived: H200's times 600 / 900 GB/s of the data sheets; hop: "
                                 "NCCL's own model of a ring (src/graph/tuning.cc, Simple over "
                                 "NVLink)",
                [MACHINE_SLOW_DOWN] = "near: derived, as H200's; far: assumed, 16 of 108 "
                                      "multiprocessors"},
     .products = 312.0 / 989,
     .elementwise = 2.04 / 4.8,
     .near = 600.0 / 900,
     .attention = {{{32, {{{128, 23.1e12}, {384, 30.6e12}}, 2}},
                    {64, {{{128, 30e12}, {384, 40.9e12}, {2048, 197e12}}, 3}}},
                   2},
     .attention_call_seconds = 10.7e-6,
     .memory_per_second = 1.78e12,
     .update_per_second = 1.73e12},
};

static const struct machine core = {
    .name = "one core of an AMD EPYC, OpenBLAS Zen",
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
    .near = {5e-6, 5e9, 4e9}};

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
    RELATIVES = sizeof relatives / sizeof *relatives,
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

static void scale(struct machine_table *t, double factor)
{
    for (int i = 0; i < t->count; i++)
        for (int k = 0; k < t->of[i].curve.count; k++)
            t->of[i].curve.points[k].per_second *= factor;
}

/* The file in the program is as right as its code: tests/train_machine.c reads it. */
static void take_h200(struct machine *m)
{
    enum status st =
        machine_parse(m, machine_h200_yaml, strlen(machine_h200_yaml), "engine/train/h200.yaml");
    ASSERT(st == ST_OK);
}

static void take_relative(struct machine *m, const struct relative *r)
{
    take_h200(m);
    snprintf(m->name, sizeof m->name, "%s", r->full_name);
    for (int g = 0; g < MACHINE_GROUPS; g++)
        if (r->source[g] != NULL)
            snprintf(m->source[g], sizeof m->source[g], "%s", r->source[g]);
    scale(&m->products, r->products);
    scale(&m->elementwise, r->elementwise);
    if (r->attention.count > 0) {
        m->attention = r->attention;
        m->attention_call_seconds = r->attention_call_seconds;
    }
    m->memory_per_second = r->memory_per_second;
    m->update_per_second = r->update_per_second;
    if (r->launch_seconds > 0)
        m->launch_seconds = r->launch_seconds;
    m->near.gather_per_second *= r->near;
    m->near.reduce_per_second *= r->near;
}

bool machine_builtin_card(struct machine *m, const char *card)
{
    if (strcmp(card, "NVIDIA A100-SXM4-40GB") == 0) /* but for the speed of its memory */
        card = "NVIDIA A100-SXM4-80GB";
    struct machine h200;
    take_h200(&h200);
    if (strcmp(h200.name, card) == 0) {
        *m = h200;
        return true;
    }
    for (int i = 0; i < RELATIVES; i++)
        if (strcmp(relatives[i].full_name, card) == 0) {
            take_relative(m, &relatives[i]);
            return true;
        }
    return false;
}

void machine_like_card(struct machine *m, const char *card)
{
    if (machine_builtin_card(m, card))
        return;
    enum status st = machine_builtin(m, "h100");
    ASSERT(st == ST_OK);
}

/* @name: so many bytes of it. */
static bool take_named(struct machine *m, const char *name, size_t length)
{
    if (length == 4 && strncmp(name, "h200", length) == 0) {
        take_h200(m);
        return true;
    }
    if (length == 9 && strncmp(name, "epyc-core", length) == 0) {
        *m = core;
        return true;
    }
    for (int i = 0; i < RELATIVES; i++)
        if (strlen(relatives[i].name) == length && strncmp(relatives[i].name, name, length) == 0) {
            take_relative(m, &relatives[i]);
            return true;
        }
    return false;
}

enum status machine_builtin(struct machine *m, const char *name)
{
    size_t card = strcspn(name, "+");
    if (take_named(m, name, card) &&
        (name[card] == '\0' || machine_add_network(m, name + card + 1)))
        return ST_OK;
    return FAIL(INVALID, "no machine profile \"%.100s\"; built in are %s", name,
                machine_builtin_names());
}
