/* What two peers send to rank 0 in an exchange, and what is on the line after it. */
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "comm/rendezvous_frame.h"
#include "comm/socket.h"
#include "engine/base/clock.h"
#include "fuzz/fuzz.h"

enum { PEERS = 2, PAYLOAD = 8, SEQUENCE = 7, MAX_SENT = 16384 /* what a socket holds at once */ };

/* The first byte says where the input is cut in two; each peer sends its part and hangs up. */
static void connect_peers(struct rendezvous *rv, const uint8_t *data, size_t bytes)
{
    size_t first = (size_t)fuzz_take(&data, &bytes, 1) * bytes / 256, at = 0;
    for (int r = 1; r <= PEERS; r++) {
        int fds[2];
        size_t n = r == 1 ? first : bytes - first;
        ASSERT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds) == 0);
        ASSERT(send(fds[1], data + at, n, MSG_NOSIGNAL) == (ssize_t)n || n == 0);
        close(fds[1]);
        rv->peers[r].fd = fds[0];
        at += n;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct peer peers[PEERS + 1] = {{.fd = -1}};
    struct pollfd polls[PEERS + 1];
    int poll_ranks[PEERS + 1];
    char to[PEERS * PAYLOAD];
    struct rendezvous rv = {.world_size = PEERS + 1,
                            .timeout_ms = 50,
                            .sequence = SEQUENCE,
                            .peers = peers,
                            .polls = polls,
                            .poll_ranks = poll_ranks};
    fuzz_begin();
    pthread_mutex_init(&rv.io, NULL);
    pthread_mutex_init(&rv.lock, NULL);
    connect_peers(&rv, data, bytes < MAX_SENT ? bytes : MAX_SENT);
    enum status st = fuzz_result(
        frames_receive(&rv, 1, PEERS, FRAME_DATA, to, PAYLOAD, clock_ms() + 50, "the exchange"));
    for (int r = 1; r <= PEERS && st == ST_OK; r++)
        if (peers[r].fd >= 0)
            st = fuzz_result(peer_check(&rv, r, POLLIN));
    for (int r = 1; r <= PEERS; r++)
        socket_close(&peers[r].fd);
    pthread_mutex_destroy(&rv.io);
    pthread_mutex_destroy(&rv.lock);
    return fuzz_end();
}
