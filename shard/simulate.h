/*
 * shard/simulate.h - the time line of a step program, from given rates, for any world size.
 *
 * Each stream runs its instructions in order; an instruction begins when the one before it on its
 * stream and all that it waits for have ended. First comes its pause, which needs nothing of the
 * device: the way from another stream's instruction to this one, launches, and where the work is
 * too small to fill the device, what its kernels take at least. Behind their pauses instructions
 * that are no collectives share the device: k of them beside each other progress at 1 / k. (An
 * UPDATE under a FORWARD is so not free; on GPUs it gained nothing, bench/RESULTS.md.) While a
 * collective runs beside them, they progress at 1 / (1 + slow_down) of that: a collective takes
 * cores or SMs and memory bandwidth from compute. Compute does not slow collectives down, but k of
 * these share the links: each progresses at 1 / k.
 *
 *     compute   [ forward 0 ][ forward 1   ][ backward 1 ]......[ backward 0 ]
 *     gather    [ gather 1 ]
 *     reduce                                             [ reduce 1 ]
 *                                                        ^^^^^^ exposed: nothing computes beside it
 *
 * The ranks of a CPU are one thread each, which runs all streams' instructions in program order:
 * simulate_in_order(). Nothing is hidden there.
 *
 * A collective is a ring over the N ranks that share a flat parameter of S bytes, on M nodes: N - 1
 * hops, of which M - 1 cross from node to node, and (N - 1) / N S bytes over the slowest link. A
 * node's ranks send through their links together, so rings cross at N / M times a rank's rate:
 *
 *     seconds = call + (N - M) near hop + (M - 1) far hop + (N - 1) / N S / min(near, N / M far)
 *
 * A rank alone has no collectives: GATHER and REDUCE are copies, S bytes there and S back, that
 * share the device as others do; none where they write what they read.
 *
 * Hybrid sharding: R such groups, one a node (M = 1), each with the whole model. REDUCE then sums a
 * rank's shard over its R peers in the other nodes (so no table is moved by rows); sums may go up
 * and down two trees:
 *
 *     seconds += 2 min(R - 1, log2 R) far hop + 2 (R - 1) / R S / N / far
 *
 * How much a collective slows compute down is known at the speed of near links. Its bytes at a
 * fraction of this speed do a fraction of that, but at least what the multiprocessors take that it
 * holds; so do its hops.
 *
 * Pure arithmetic on one rank's program, which is every rank's: ranks are taken to be equally fast.
 * Ring terms: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009); trees: Sanders, Speck and
 * Traeff, Parallel Computing 35 (2009).
 */
#ifndef SHARD_SIMULATE_H
#define SHARD_SIMULATE_H

#include "engine/base/work.h"
#include "shard/program.h"

C_BEGIN

struct simulate_link {
    double hop_seconds;                          /* latency of a hop */
    double gather_per_second, reduce_per_second; /* bytes that a rank sends; 0: there is no link */
};

struct simulate_rates {
    const struct unit_work *units; /* by unit */
    double product_flops_per_second, attention_flops_per_second;
    double attention_call_seconds;  /* that each call takes beside its operations */
    double elementwise_per_second;  /* bytes of FORWARD and BACKWARD that are no products */
    double update_per_second;       /* bytes that UPDATE reads and writes */
    double memory_per_second;       /* bytes of the others: they read and write operands once */
    double launch_seconds;          /* of a kernel, where that is in no rate */
    double floor_seconds;           /* that a kernel takes at least, its launch too */
    double edge_seconds;            /* from another stream's instruction to one that waits for it */
    double call_seconds;            /* that each collective takes beside its hops */
    struct simulate_link near, far; /* within a node; between nodes, of a rank alone */
    double slow_down;               /* >= 0, of collectives at the speed of near links */
    double slow_down_least;         /* >= 0, of the slowest ones */
    bool in_order;                  /* a CPU rank: simulate_in_order() */
};

/* Who takes part. */
struct simulate_world {
    int ranks;    /* that share a flat parameter: the program's world size */
    int nodes;    /* that they are spread over, equally */
    int replicas; /* hybrid sharding: groups of so many ranks; else 1 */
};

struct simulate_span {
    double begin, end; /* seconds from the start of the turn */
};

struct simulate_result {
    double seconds;               /* of the turn: until the last instruction has ended */
    double busy[PROGRAM_STREAMS]; /* seconds in which the stream runs an instruction */
    double compute_seconds;       /* in which FORWARD, UPDATE and the like run */
    double collective_seconds;    /* in which at least one collective runs */
    double exposed_seconds;       /* of which nothing else runs */
};

/* What an instruction takes with nothing beside it. */
struct simulate_work {
    double pause;    /* seconds before the next, which need nothing of the device; >= 0 */
    double seconds;  /* >= 0 */
    bool collective; /* shares the links and slows others down; else it shares the device */
};

/** simulate_is_collective() - GATHER, REDUCE, AGREE and COLLECT. */
bool simulate_is_collective(enum program_op op);

/** simulate_instr() - of one instruction. */
struct simulate_work simulate_instr(const struct program *p, const struct instr *in,
                                    const struct simulate_rates *rates,
                                    struct simulate_world world);

/**
 * simulate_run() - the time line of one turn.
 * @spans: output, one an instruction, its pause in it.
 * @work: of each instruction.
 *
 * Cost: O(instructions). Nothing is allocated.
 */
void simulate_run(struct simulate_result *result, struct simulate_span *spans,
                  const struct program *p, const struct simulate_work *work, double slow_down);

/* Of an instruction's time; as many as PASS_PARTS of engine/ops/ops.h. */
enum { SIMULATE_PARTS = 16 };

/**
 * simulate_beside() - where collectives run beside the other instructions of a time line.
 * @parts: output, one an instruction: bit k is set if a collective runs in the middle of the k-th
 *         of SIMULATE_PARTS equal parts of it. None of collectives.
 *
 * Both without their pauses. Cost: O(instructions * collectives).
 */
void simulate_beside(uint16_t *parts, const struct program *p, const struct simulate_span *spans,
                     const struct simulate_work *work);

/** simulate_slow_down() - of the program's collectives, the mean over their time. */
double simulate_slow_down(const struct program *p, const struct simulate_rates *rates,
                          struct simulate_world world);

/** simulate_in_order() - the same on a rank that does one instruction after the other. */
void simulate_in_order(struct simulate_result *result, struct simulate_span *spans,
                       const struct program *p, const struct simulate_work *work);

/** simulate_program() - simulate_instr() and one of the two; simulate_beside(), unless @parts is
 * NULL. Return: ST_OK; ST_MEMORY. */
MUST_CHECK enum status simulate_program(struct simulate_result *result, uint16_t *parts,
                                        const struct program *p, const struct simulate_rates *rates,
                                        struct simulate_world world);

C_END

#endif
