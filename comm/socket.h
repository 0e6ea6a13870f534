/*
 * comm/socket.h - TCP connections with deadlines. For rendezvous.c and launch.
 *
 * Sockets are non-blocking and closed on exec. Deadlines are times of clock_ms().
 */
#ifndef COMM_SOCKET_H
#define COMM_SOCKET_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

/**
 * socket_listen() - listen for connections.
 * @fd: set to the listening socket; -1 on failure.
 * @address: name or number, IPv4 or IPv6, to bind to; "" for all interfaces.
 * @port: in and out; 0 lets the system choose one.
 *
 * Return: ST_OK; ST_INVALID (no such name); ST_COMM (the system's words; a port in use says so).
 */
MUST_CHECK enum status socket_listen(int *fd, const char *address, int *port);

/**
 * socket_accept() - take one waiting connection.
 * @fd: -1 if none is waiting.
 * @peer: its address, for messages; @peer_bytes of room.
 *
 * Return: ST_OK; ST_COMM, with the system's words.
 */
MUST_CHECK enum status socket_accept(int *fd, int listen_fd, char *peer, size_t peer_bytes);

/**
 * socket_connect() - connect, and try again until the deadline: the other side may start later.
 *
 * Return: ST_OK; ST_TIMEOUT with the last attempt's failure in the message.
 */
MUST_CHECK enum status socket_connect(int *fd, const char *address, int port, int64_t deadline);

/** socket_wait() - wait until @fd is ready for @events of poll(), at most until the deadline.
 * Return: what is ready; 0 when the deadline has passed. */
int socket_wait(int fd, int events, int64_t deadline);

/** socket_close() - of -1 is fine; sets it to -1. */
void socket_close(int *fd);

C_END

#endif
