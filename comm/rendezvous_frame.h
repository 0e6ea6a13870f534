/*
 * comm/rendezvous_frame.h - frames of the rendezvous: sending, reading, failing. Inside comm/ only;
 * rendezvous.h describes the format.
 */
#ifndef COMM_RENDEZVOUS_FRAME_H
#define COMM_RENDEZVOUS_FRAME_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/rendezvous.h"

C_BEGIN

struct pollfd;

enum {
    CAUSE_BYTES = 1024,
    FRAME_MAGIC = 0x54535231,
    POLL_SLICE_MS = 100 /* an abort from another thread is noticed this soon */
};

enum frame_kind { FRAME_WELCOME = 1, FRAME_DATA, FRAME_ABORT, FRAME_LEAVE };

struct frame {
    uint32_t magic;    /* FRAME_MAGIC */
    uint32_t kind;     /* enum frame_kind */
    uint32_t sequence; /* FRAME_DATA: number of the exchange; FRAME_ABORT: enum status */
    uint32_t bytes;    /* of payload */
};

struct hello {
    uint32_t magic; /* FRAME_MAGIC */
    int32_t rank, world_size;
    char token[RENDEZVOUS_TOKEN_BYTES];
};

struct peer {
    int fd;        /* owned; -1 where there is no connection */
    bool left;     /* in good order */
    bool complete; /* its frame of this exchange is here */
    size_t got;    /* bytes of the frame being read, head included */
    struct frame head;
    char text[CAUSE_BYTES]; /* payload of FRAME_ABORT */
};

struct rendezvous {
    int rank, world_size;
    int64_t timeout_ms;
    uint32_t sequence;    /* of the exchange that is on, or comes next */
    struct peer *peers;   /* [world_size] owned; rank 0 has all but itself, the others rank 0 */
    struct pollfd *polls; /* owned, scratch */
    int *poll_ranks;      /* owned, scratch: the rank behind each of polls */
    pthread_mutex_t io;   /* held while frames are read or sent */
    bool told;            /* the peers know that the run has failed; under io */
    pthread_mutex_t lock; /* of the two below */
    enum status failed;   /* the first failure; ST_OK while there is none */
    char cause[CAUSE_BYTES];
};

/** rendezvous_die() - note the first failure; later ones are its consequences. Any thread. */
void rendezvous_die(struct rendezvous *rv, enum status st, const char *cause);

/** rendezvous_failed() - ST_OK, or the noted failure with its message. */
MUST_CHECK enum status rendezvous_failed(struct rendezvous *rv);

/** rendezvous_tell() - send the noted failure to all peers but @except; once. Holds io. */
void rendezvous_tell(struct rendezvous *rv, int except);

/** rendezvous_let_go() - end a hold of io, and tell a failure that another thread noted meanwhile:
 * rendezvous_abort() does not wait for io. */
void rendezvous_let_go(struct rendezvous *rv);

/** frame_send() - Return: 0, ETIMEDOUT, or the errno of the failure. */
int frame_send(int fd, enum frame_kind kind, uint32_t sequence, const void *data, size_t bytes,
               int64_t deadline);

/** peer_check() - something came from a peer that owes no frame: fail if it failed, note that it
 * left; data stays for the next exchange. @revents: of poll(). ST_COMM. */
MUST_CHECK enum status peer_check(struct rendezvous *rv, int rank, int revents);

/** peer_send() - send one frame; when that fails, fail with what the peer said last. */
MUST_CHECK enum status peer_send(struct rendezvous *rv, int rank, enum frame_kind kind,
                                 const void *data, size_t bytes, int64_t deadline);

/** frames_receive() - wait for one frame of each of the ranks first..last.
 * @dest: @bytes for each of them. @what: begins the message of a time-out. ST_TIMEOUT; ST_COMM;
 * ST_INVALID (the ranks do not make the same calls). */
MUST_CHECK enum status frames_receive(struct rendezvous *rv, int first, int last,
                                      enum frame_kind expect, char *dest, size_t bytes,
                                      int64_t deadline, const char *what);

/** rendezvous_missing() - fail with the ranks of first..last whose frame is not complete. */
enum status rendezvous_missing(struct rendezvous *rv, int first, int last, const char *what);

/** rendezvous_patience_ms() - how long this rank waits in an exchange. */
int64_t rendezvous_patience_ms(const struct rendezvous *rv);

/** rendezvous_meet() - connect with all ranks. @listen_fd: of rank 0; opened if it is -1. */
MUST_CHECK enum status rendezvous_meet(struct rendezvous *rv,
                                       const struct rendezvous_options *options, int *listen_fd);

C_END

#endif
