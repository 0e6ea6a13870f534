/*
 * comm/nccl.h - one process a GPU, collectives by NCCL. See comm.h. CUDA builds only.
 *
 * A rank has two NCCL communicators over the same ranks: collectives on STREAM_REDUCE use one, on
 * any other stream the other. NCCL orders the collectives of one communicator, so with a single one
 * a gather for the next unit would queue behind the reduction of the last. Both are fed by the
 * device's one thread in program order, the same on all ranks.
 *
 * A collective is only enqueued and may be captured; nothing here waits for the device. Host
 * structs (exchange, barrier, agree) go over the rendezvous' TCP connections: these need no staging
 * in device memory, never queue behind the collectives of a step, may be used while a stream is
 * captured, and still work when a GPU does not, which is when a rank has a cause to tell.
 *
 * Failure: the device's host waits (event_wait, stream_sync) come by here every few milliseconds
 * and end with ST_COMM when NCCL reports an error or a peer's process failed or ended, and with
 * ST_TIMEOUT when one wait lasts longer than the deadline; the message has the marks that this
 * rank's streams have passed and the last collective issued. Both NCCL communicators are then
 * aborted, so that kernels that wait for a peer end, and the cause is sent to all ranks.
 *
 * Sums: in rank order, as comm.h says, by the kernels of ours. NCCL's reduce_scatter adds in the
 * order of its algorithm, which is the same in every run on the same machine with the same count,
 * and may round bf16 after each addition.
 *
 * Opening: NCCL takes most of a second to connect the ranks. nccl_comm_open() only begins that, in
 * a thread; comm_ready() waits for its end. Meanwhile (comm->opening) structs can be exchanged,
 * memory be opened, and the device be used for whatever needs no peer; host waits for it are then
 * not watched, as nothing on it depends on a peer.
 *
 * Symmetric windows: comm_memory_open() takes its block from ncclMemAlloc(); it is registered with
 * both communicators there or, if they do not stand yet, in comm_ready(). Collectives in it read
 * and write the peers' memory directly, without NCCL's staging buffers and connections. All ranks
 * decide together: where one cannot (an older NCCL, no memory that peers can map), none does. A
 * unit's sum is then another kernel's, in another order: the same at every stage, but not the bits
 * of a run without windows. Their kernels do not look whether their communicator is aborted: one
 * that waits for a dead rank ends with the process (device_settle()).
 *
 * Kernels of our own (WINDOWS_OWN; nccl_peers.cu) are all_gather and reduce_scatter in such
 * windows, where all ranks are on H100s or newer of one machine and have whole packs of 16 bytes.
 * They are to fill the links from fewer multiprocessors than NCCL's, for those are what the
 * products beside them want. What they do not serve goes to NCCL.
 *
 * Order of the end: close captured graphs first (NCCL waits for them), then this, then the
 * rendezvous, then the device. NCCL's own environment variables (NCCL_*) are the user's.
 */
#ifndef COMM_NCCL_H
#define COMM_NCCL_H

#include <stdbool.h>
#include <stdint.h>

#include "comm/comm.h"
#include "comm/rendezvous.h"
#include "engine/base/config.h"

C_BEGIN

/*
 * A collective of a step runs beside products, which need the multiprocessors that it takes: steps
 * on two H200 were shortest with 12 blocks (bench/RESULTS.md). So many and, with windows on an H100
 * or newer, no fewer: where it may, NCCL takes the least number of blocks that its model finds as
 * fast, 9 of 12, and launches them in clusters of four only if that divides them; single ones break
 * the pairs of multiprocessors that the products' blocks come in. NCCL_MAX_CTAS and NCCL_MIN_CTAS
 * set other numbers for NCCL's.
 */
enum { COLLECTIVE_BLOCKS = 12 };

struct nccl_id { /* the library's, by which its communicators find each other */
    char bytes[128];
};

/**
 * nccl_id_share() - make one for all ranks, before they open their devices: each can then begin to
 * connect as soon as its own is there. All ranks call it.
 * @rv: NULL when @world_size is 1, where the id is all zero and not used.
 *
 * Return: ST_OK; ST_COMM, ST_TIMEOUT; ST_MEMORY.
 */
MUST_CHECK enum status nccl_id_share(struct nccl_id *id, int rank, int world_size,
                                     struct rendezvous *rv);

/**
 * nccl_comm_open() - begin to join the NCCL communicators of all ranks. All ranks call it.
 * @device: of this rank; borrowed, and waits of it are watched once the communicator is ready.
 * @id: of nccl_id_share().
 * @rv: borrowed; NULL when @world_size is 1: one rank has no communicators, only copies.
 * @timeout_ms: deadline of the opening, and of each host wait later.
 * @windows: does comm_memory_open() make symmetric windows, where all ranks can, and with whose
 * kernels? The same on all.
 *
 * Return: ST_OK; ST_COMM (NCCL's words, or a peer's cause); ST_TIMEOUT; ST_MEMORY. What else fails
 * in joining them is comm_ready()'s failure.
 */
MUST_CHECK enum status nccl_comm_open(struct comm **out, struct device *device, int rank,
                                      int world_size, const struct nccl_id *id,
                                      struct rendezvous *rv, int64_t timeout_ms,
                                      enum window_kind windows);

C_END

#endif
