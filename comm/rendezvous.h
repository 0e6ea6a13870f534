/*
 * comm/rendezvous.h - how the processes of a run find each other: a star of TCP connections.
 *
 *     rank 0 listens; every other rank connects, shows the token, and stays connected
 *
 * Over it go the NCCL id, small host structs (comm_exchange) and the cause when a rank fails, so
 * that all ranks can print it. Nothing of a step goes over it.
 *
 * The token keeps strangers and the ranks of other runs out. It travels as it is: whoever can read
 * the network can read it.
 *
 * Wire format, in the byte order of the machines (which must be the same): frames of 16 bytes
 * {magic, kind, sequence, bytes} and @bytes of payload. A connecting rank first sends
 * struct hello; rank 0 answers FRAME_WELCOME when all ranks are here, or FRAME_ABORT with the
 * reason. Then each exchange is one FRAME_DATA from every rank and one back to it. FRAME_ABORT
 * ends the run for whoever receives it; FRAME_LEAVE says that a rank ends in good order, so that a
 * connection that closes without it means a process that died.
 *
 * Threads: one thread uses it, but for rendezvous_abort().
 */
#ifndef COMM_RENDEZVOUS_H
#define COMM_RENDEZVOUS_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

struct rendezvous;

enum { RENDEZVOUS_TOKEN_BYTES = 96 }; /* with the zero byte */

struct rendezvous_options {
    int rank, world_size;
    const char *address; /* of rank 0: name or number, IPv4 or IPv6 */
    int port;
    const char *bind;   /* rank 0 listens here; NULL: @address if it is a loopback address, else all
                          interfaces (a host's own name may be a loopback address to itself) */
    const char *token;  /* the same on all ranks */
    int listen_fd;      /* rank 0: a socket that listens already (becomes owned); -1: open one */
    int64_t timeout_ms; /* of the meeting, and then of each exchange */
};

/**
 * rendezvous_open() - meet all other ranks.
 * @out: for every rank; with one rank there is no connection.
 *
 * A connection with another token, another world size or a rank that is here already is refused
 * and logged, and rank 0 goes on listening.
 *
 * Return: ST_OK; ST_TIMEOUT (rank 0: names the missing ranks; others: no connection, or the
 * message of rank 0); ST_COMM (refused, port in use, a peer died); ST_INVALID; ST_MEMORY.
 */
MUST_CHECK enum status rendezvous_open(struct rendezvous **out,
                                       const struct rendezvous_options *options);

/**
 * rendezvous_exchange() - recv[r * bytes ..] = send of rank r. Blocking, all ranks.
 *
 * Return: ST_OK; ST_TIMEOUT naming the ranks that did not come; ST_COMM: a rank's process ended, or
 * gave up, with its cause; ST_INVALID: ranks exchange different sizes. After a failure every call
 * fails, and the other ranks' calls too.
 */
MUST_CHECK enum status rendezvous_exchange(struct rendezvous *rv, void *recv, const void *send,
                                           size_t bytes);

/** rendezvous_check() - has a peer failed? ST_OK, or ST_COMM with the cause. Does not wait. */
MUST_CHECK enum status rendezvous_check(struct rendezvous *rv);

/** rendezvous_abort() - tell all ranks that this one gives up, and why; safe from any thread. */
void rendezvous_abort(struct rendezvous *rv, const char *cause);

/** rendezvous_close() - leave in good order; of NULL is fine. */
void rendezvous_close(struct rendezvous **rv);

C_END

#endif
