/*
 * shard/simulate.h - the time line of a step program, from given rates, for any world size.
 *
 * Each stream runs its instructions in order; an instruction begins when the one before it on its
 * stream and all that it waits for have ended. While a collective runs beside them, all other
 * instructions progress at 1 / (1 + slow_down): a collective takes cores or SMs and memory
 * bandwidth from compute. Collectives keep their speed.
 *
 *     compute   [ forward 0 ][ forward 1   ][ backward 1 ]......[ backward 0 ]
 *     gather    [ gather 1 ]
 *     reduce                                             [ reduce 1 ]
 *                                                        ^^^^^^ exposed: nothing computes beside it
 *
 * Collectives are rings: N - 1 hops, each of the latency and one shard over the link. Pure
 * arithmetic on one rank's program, which is every rank's: ranks are taken to be equally fast.
 */
#ifndef SHARD_SIMULATE_H
#define SHARD_SIMULATE_H

#include "shard/program.h"

C_BEGIN

struct unit_work {
    double forward_flops, backward_flops; /* of one micro-batch on one rank */
};

struct simulate_rates {
    const struct unit_work *units; /* by unit */
    double flops_per_second;       /* that FORWARD, RECOMPUTE and BACKWARD reach */
    double memory_per_second;      /* bytes: the others read and write their operands once */
    double launch_seconds;         /* that each instruction takes beside its work */
    double link_per_second;        /* bytes that a rank sends */
    double hop_seconds;            /* latency of a hop */
    double slow_down;              /* >= 0 */
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

/** simulate_is_collective() - GATHER, REDUCE, AGREE and COLLECT. */
bool simulate_is_collective(enum program_op op);

/** simulate_seconds() - what one instruction takes with nothing beside it. */
double simulate_seconds(const struct program *p, const struct instr *in,
                        const struct simulate_rates *rates, int world_size);

/**
 * simulate_run() - the time line of one turn.
 * @spans: output, one an instruction.
 * @seconds: what each instruction takes with nothing beside it, >= 0.
 *
 * Cost: O(instructions). Nothing is allocated.
 */
void simulate_run(struct simulate_result *result, struct simulate_span *spans,
                  const struct program *p, const double *seconds, double slow_down);

/** simulate_program() - simulate_seconds() and simulate_run(). Return: ST_OK; ST_MEMORY. */
MUST_CHECK enum status simulate_program(struct simulate_result *result, const struct program *p,
                                        const struct simulate_rates *rates, int world_size);

C_END

#endif
