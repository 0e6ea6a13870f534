/* What somebody says who knocks while rank 0 waits for the others. */
#include <sys/socket.h>

#include "comm/rendezvous_frame.h"
#include "comm/socket.h"
#include "engine/base/clock.h"
#include "fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct rendezvous *rv = NULL;
    int port = 0, knocking = -1;
    struct rendezvous_options options = {.world_size = 2,
                                         .address = "127.0.0.1",
                                         .token = "a token",
                                         .listen_fd = -1,
                                         .timeout_ms = 4};
    fuzz_begin();
    ASSERT(socket_listen(&options.listen_fd, "127.0.0.1", &port) == ST_OK);
    options.port = port;
    ASSERT(socket_connect(&knocking, "127.0.0.1", port, clock_ms() + 1000) == ST_OK);
    (void)!send(knocking, data, bytes < 4096 ? bytes : 4096, MSG_NOSIGNAL | MSG_DONTWAIT);
    shutdown(knocking, SHUT_WR);
    if (fuzz_result(rendezvous_open(&rv, &options)) == ST_OK)
        (void)fuzz_result(rendezvous_check(rv));
    rendezvous_close(&rv);
    socket_close(&knocking);
    return fuzz_end();
}
