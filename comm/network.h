/*
 * comm/network.h - the NICs that NCCL should use: those nearest to a rank.
 *
 * NCCL finds near NICs by itself where it sees the machine as it is; in containers and virtual
 * machines it often does not. Between machines we therefore say it (NCCL_IB_HCA,
 * NCCL_SOCKET_IFNAME), but only what cannot be wrong:
 *
 *   verbs      when the NIC is behind the PCIe switch or host bridge of the rank's GPU
 *   sockets    when no machine has a NIC for verbs, and all ranks' nearest interfaces are up, have
 *              an IPv4 address and lie in one network: others might not reach each other
 *
 * and nothing that the user or the machine's administrator has said already, in the environment or
 * in a file (NCCL_CONF_FILE, ~/.nccl.conf, /etc/nccl.conf).
 *
 * Source: NVIDIA's NCCL user guide, "Environment Variables".
 */
#ifndef COMM_NETWORK_H
#define COMM_NETWORK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/affinity.h"

C_BEGIN

/* What a rank would take; plain memory, for other ranks to see. */
struct network_choice {
    char fabrics[128];     /* "mlx5_0,mlx5_2"; "": none that is surely near */
    char interface[32];    /* "": none with an address */
    uint32_t address_net;  /* its IPv4 network, in network byte order */
    uint32_t address_mask; /* 0: it has no address */
    bool any_fabric;       /* this machine has a NIC for verbs that is up */
};

/** network_choose() - for a rank of a plan, on this machine. */
void network_choose(struct network_choice *c, const struct topology *t,
                    const struct affinity_rank *r);

/**
 * network_announce() - tell NCCL, in this process' environment.
 * @all: the choices of all @count ranks; @mine is one of them.
 * @text: what was set, "NCCL_IB_HCA==mlx5_0", for the log; "" if nothing was.
 */
void network_announce(const struct network_choice *all, int count, int mine, char *text,
                      size_t bytes);

C_END

#endif
