/*
 * engine/train/machine.h - what a machine can do: the rates that turn a step program into seconds.
 *
 * A profile is a small YAML file that `tessera calibrate` measures, or one of those built in. Every
 * group of numbers says where it comes from. Rates are those that a step reaches, not peaks:
 *
 *     name: "NVIDIA H200 + 400 Gb/s InfiniBand"
 *     date: "2026-11-28"
 *     device: cuda                    # cpu: a rank does one instruction after the other
 *     products:                       # the linear layers of a block, forward and backward: TFLOP/s
 *       source: "measured: ..."       # by its width, then by rows (tokens of a micro-batch)
 *       tflops:
 *         768: {1408: 503}
 *         1024: {2816: 680, 11136: 676}
 *     attention:                      # by channels of a head, then by length of a sequence;
 *       source: "..."                 # backward counts twice forward
 *       tflops:
 *         64: {175: 80, 2048: 287}
 *       call_us: 7                    # of a forward beside that, of a backward alone twice
 *     memory:                         # GB/s, reads and writes together
 *       source: "..."
 *       copy: 4200
 *       elementwise:                  # norms and activation functions, by width and rows
 *         1024: {2816: 2200}
 *       update: 4070                  # AdamW
 *     launch:
 *       source: "..."
 *       kernel_us: 0.9                # beside the work of each operation that is not in a block
 *       least_us: 2.5                 # that any kernel takes, may be missing, as the next two: 0
 *       edge_us: 1.2                  # that it begins later where it waits for another stream
 *       turn_us: 30                   # between a step's last operation and the next one's first
 *       collective_us: 16             # beside the hops of each collective
 *     near:                           # links within a node: latency, GB/s that a rank sends
 *       source: "..."
 *       hop_us: 3.4
 *       gather: 326
 *       reduce: 321
 *     far: {source: "...", hop_us: 14, gather: 46, reduce: 46}     # between nodes, of one rank
 *     slow_down:                 # of compute beside a collective; 1: half as fast
 *       source: "..."
 *       near: 1.1
 *       far: 0.15                     # of the slowest networks
 *
 * "far" may be missing: then there is one node. Between two points rates are interpolated; below
 * the first one the time stays that of the first (rate in proportion), above the last the rate.
 * Between two widths too; outside of them the nearest counts.
 */
#ifndef ENGINE_TRAIN_MACHINE_H
#define ENGINE_TRAIN_MACHINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/config.h"
#include "engine/base/status.h"
#include "shard/simulate.h"

C_BEGIN

enum {
    MACHINE_NAME_BYTES = 128,
    MACHINE_SOURCE_BYTES = 512,
    MACHINE_POINTS = 16,
    MACHINE_WIDTHS = 4
};

enum machine_group {
    MACHINE_PRODUCTS,
    MACHINE_ATTENTION,
    MACHINE_MEMORY,
    MACHINE_LAUNCH,
    MACHINE_NEAR,
    MACHINE_FAR,
    MACHINE_SLOW_DOWN,
    MACHINE_GROUPS
};

struct machine_curve {
    struct {
        int64_t at;        /* rows, length; ascending */
        double per_second; /* operations */
    } points[MACHINE_POINTS];
    int count;
};

/* A curve for each width, of the model or of its heads; bytes in place of operations where it is
 * memory's. */
struct machine_table {
    struct {
        int64_t width; /* ascending */
        struct machine_curve curve;
    } of[MACHINE_WIDTHS];
    int count;
};

struct machine {
    char name[MACHINE_NAME_BYTES], date[MACHINE_NAME_BYTES];
    enum device_kind device; /* cpu or cuda */
    char source[MACHINE_GROUPS][MACHINE_SOURCE_BYTES];
    struct machine_table products, attention, elementwise;
    double attention_call_seconds;
    double memory_per_second, update_per_second; /* bytes */
    double launch_seconds, floor_seconds, edge_seconds, turn_seconds, call_seconds;
    struct simulate_link near, far; /* far.gather_per_second 0: there is no network */
    double slow_down_near, slow_down_far;
};

/** machine_curve_at() - operations a second at @at rows or length. */
double machine_curve_at(const struct machine_curve *curve, double at);

/** machine_table_at() - the same for a width. */
double machine_table_at(const struct machine_table *table, double width, double at);

/**
 * machine_builtin() - a profile by name: CARD or CARD+NETWORK, as in "h100+ib400".
 *
 * Return: ST_OK; ST_INVALID, with the names that there are.
 */
MUST_CHECK enum status machine_builtin(struct machine *m, const char *name);

/** machine_builtin_card() - the built-in profile of a card by the driver's name of it, in full;
 * false: there is none. A card of the same name on another board (PCIe, NVL) is another card. */
bool machine_builtin_card(struct machine *m, const char *card);

/** machine_like_card() - the same, or of an H100 where there is none. */
void machine_like_card(struct machine *m, const char *card);

/** machine_add_network() - "ib50" to "ib400" as the links between nodes; false: no such name. */
bool machine_add_network(struct machine *m, const char *name);

/** machine_builtin_names() - "h100, h200, ...; ib50, ...", for help texts. */
const char *machine_builtin_names(void);

/** machine_parse(), machine_read() - a profile file. @file: for messages.
 *
 * Return: ST_OK; ST_INVALID, "FILE:LINE: key: expected ..., found ..."; ST_IO; ST_MEMORY. */
MUST_CHECK enum status machine_parse(struct machine *m, const char *text, size_t bytes,
                                     const char *file);
MUST_CHECK enum status machine_read(struct machine *m, const char *path);

/** machine_find() - what a user names: a file, or a profile that is built in; either may have a
 * network behind it, as in "mine.yaml+ib200". */
MUST_CHECK enum status machine_find(struct machine *m, const char *name);

/** machine_format() - as a file that machine_read() takes back. @text: mem_free(). ST_MEMORY. */
MUST_CHECK enum status machine_format(const struct machine *m, char **text, size_t *bytes);

/** machine_write() - the same into @path, or nothing. ST_IO; ST_MEMORY. */
MUST_CHECK enum status machine_write(const struct machine *m, const char *path);

/** machine_user_path() - where `tessera calibrate` leaves this user's; "" without a home folder:
 * machine-cpu.yaml or machine-cuda.yaml in $XDG_CACHE_HOME/tessera or ~/.cache/tessera. */
MUST_CHECK enum status machine_user_path(char *out, size_t bytes, enum device_kind device);

/** machine_default() - the user's, if there is one. Return: as machine_read(). */
MUST_CHECK enum status machine_default(struct machine *m, bool *found, enum device_kind device);

/* Whose rates there are for a device. */
enum machine_match {
    MACHINE_NONE,    /* nobody's */
    MACHINE_OWN,     /* its own, measured by this user */
    MACHINE_BUILTIN, /* built in, for this kind of card */
    MACHINE_OTHER,   /* this user has measured another kind */
};

/** machine_for() - the profile that says most of a device.
 * @name: of the device, as struct device has it. Return: as machine_read(). */
MUST_CHECK enum status machine_for(struct machine *m, enum machine_match *match,
                                   enum device_kind device, const char *name);

C_END

#endif
