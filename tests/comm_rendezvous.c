/* The meeting of ranks and the exchange over it: ranks are threads here, or processes that die. */
#include "comm/rendezvous.h"
#include "comm/rendezvous_frame.h"

#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/socket.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "tests/support/ranks.h"
#include "tests/support/support.h"

enum { MAX_RANKS = 12, TIMEOUT_MS = 20000 };

struct world {
    int ranks;
    int64_t timeout_ms;
    int absent;          /* this rank never starts; -1: all do */
    const char *bind;    /* of rank 0 */
    const char *connect; /* where the others look for it */
    enum status (*body)(struct rendezvous *rv, int rank, struct world *w);
    int port;
    enum status st[MAX_RANKS];
    char message[MAX_RANKS][1024];
    int64_t ms[MAX_RANKS];
};

struct rank_thread {
    struct world *world;
    int rank, listen_fd;
};

static struct rendezvous_options options_of(const struct world *w, int rank, int listen_fd)
{
    return (struct rendezvous_options){.rank = rank,
                                       .world_size = w->ranks,
                                       .address = w->connect ? w->connect : "127.0.0.1",
                                       .port = w->port,
                                       .token = "a token",
                                       .listen_fd = listen_fd,
                                       .timeout_ms = w->timeout_ms};
}

static void *rank_main(void *argument)
{
    struct rank_thread *t = argument;
    struct world *w = t->world;
    struct rendezvous *rv = NULL;
    struct rendezvous_options options = options_of(w, t->rank, t->listen_fd);
    int64_t begin = clock_ms();
    log_set_rank(t->rank);
    enum status st = rendezvous_open(&rv, &options);
    if (st == ST_OK && w->body != NULL)
        st = w->body(rv, t->rank, w);
    w->st[t->rank] = st;
    w->ms[t->rank] = clock_ms() - begin;
    snprintf(w->message[t->rank], sizeof w->message[0], "%s", status_message());
    rendezvous_close(&rv);
    return NULL;
}

static void world_run(struct world *w)
{
    pthread_t threads[MAX_RANKS];
    struct rank_thread t[MAX_RANKS];
    int listen_fd = -1;
    w->port = 0;
    assert_ok(socket_listen(&listen_fd, w->bind != NULL ? w->bind : "127.0.0.1", &w->port));
    for (int r = 0; r < w->ranks; r++) {
        if (r == w->absent)
            continue;
        t[r] = (struct rank_thread){w, r, r == 0 ? listen_fd : -1};
        assert_int_equal(pthread_create(&threads[r], NULL, rank_main, &t[r]), 0);
    }
    for (int r = 0; r < w->ranks; r++)
        if (r != w->absent)
            pthread_join(threads[r], NULL);
    if (w->absent == 0)
        close(listen_fd);
}

static void assert_rank(const struct world *w, int rank, enum status st, const char *text)
{
    if (w->st[rank] != st || strstr(w->message[rank], text) == NULL)
        fail_msg("rank %d: %s, \"%s\"; expected %s, \"%s\"", rank, status_name(w->st[rank]),
                 w->message[rank], status_name(st), text);
}

static void assert_all_ok(const struct world *w)
{
    for (int r = 0; r < w->ranks; r++)
        assert_rank(w, r, ST_OK, "");
}

/* ---- exchanges ------------------------------------------------------------------------------ */

static enum status exchange_many(struct rendezvous *rv, int rank, struct world *w)
{
    static const size_t sizes[] = {0, 1, 8, 1000, 65536, 3};
    static char send[MAX_RANKS][65536], recv[MAX_RANKS][MAX_RANKS * 65536];
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        size_t n = sizes[k];
        for (size_t i = 0; i < n; i++)
            send[rank][i] = (char)((size_t)rank * 31 + i * 7 + k);
        memset(recv[rank], 0x55, sizeof recv[rank]);
        TRY(rendezvous_exchange(rv, n == 0 ? NULL : recv[rank], send[rank], n));
        for (size_t r = 0; r < (size_t)w->ranks; r++)
            for (size_t i = 0; i < n; i++)
                if (recv[rank][r * n + i] != (char)(r * 31 + i * 7 + k))
                    return FAIL(CORRUPT, "byte %zu of rank %zu in exchange %zu", i, r, k);
        if (recv[rank][(size_t)w->ranks * n % sizeof recv[rank]] != 0x55 && n < 65536)
            return FAIL(CORRUPT, "written past the end");
        TRY(rendezvous_check(rv));
    }
    return ST_OK;
}

static void all_ranks_get_the_bytes_of_all(void **state)
{
    (void)state;
    static const int sizes[] = {1, 2, 3, 12};
    for (int i = 0; i < 4; i++) {
        struct world w = {
            .ranks = sizes[i], .timeout_ms = TIMEOUT_MS, .absent = -1, .body = exchange_many};
        world_run(&w);
        assert_all_ok(&w);
    }
}

static void names_and_ipv6_and_all_interfaces_work(void **state)
{
    (void)state;
    static const char *const pairs[][2] = {
        {"127.0.0.1", "localhost"}, {"", "127.0.0.1"}, {"", "[::1]"}, {"::1", "::1"}};
    int fd = -1, port = 0;
    bool has_ipv6 = socket_listen(&fd, "::1", &port) == ST_OK;
    socket_close(&fd);
    for (int i = 0; i < (has_ipv6 ? 4 : 2); i++) {
        struct world w = {.ranks = 3,
                          .timeout_ms = TIMEOUT_MS,
                          .absent = -1,
                          .bind = pairs[i][0],
                          .connect = pairs[i][1],
                          .body = exchange_many};
        world_run(&w);
        assert_all_ok(&w);
    }
}

static enum status wrong_size(struct rendezvous *rv, int rank, struct world *w)
{
    char recv[64], send[16] = {0};
    (void)w;
    return rendezvous_exchange(rv, recv, send, rank == 1 ? 8 : 16);
}

static void b84_ranks_that_make_different_calls_are_told_so(void **state)
{
    (void)state;
    struct world w = {.ranks = 3, .timeout_ms = TIMEOUT_MS, .absent = -1, .body = wrong_size};
    world_run(&w);
    for (int r = 0; r < 3; r++)
        assert_rank(&w, r, ST_INVALID, "rank 1 sends 8 bytes in exchange 0, rank 0 expects 16");
}

/* ---- ranks that are missing, late, or strangers --------------------------------------------- */

static void a_missing_rank_is_named_on_all_ranks(void **state)
{
    (void)state;
    struct world w = {.ranks = 4, .timeout_ms = 300, .absent = 2};
    world_run(&w);
    for (int r = 0; r < 4; r++)
        if (r != 2)
            assert_rank(&w, r, ST_TIMEOUT, "did not all meet in 0.3 s: no word from rank 2");
}

static void without_rank_0_the_others_give_up(void **state)
{
    (void)state;
    struct world w = {.ranks = 2, .timeout_ms = 200, .absent = 0};
    world_run(&w); /* a listener that nobody serves: the connection is made, no answer comes */
    assert_rank(&w, 1, ST_TIMEOUT, "no word from rank 0");
    struct rendezvous *rv = NULL;
    struct rendezvous_options options = options_of(&w, 1, -1);
    assert_fails(rendezvous_open(&rv, &options), ST_TIMEOUT, "rank 1 cannot reach rank 0");
    assert_message_has("Connection refused", __FILE__, __LINE__);
}

static enum status rank_2_stays_away(struct rendezvous *rv, int rank, struct world *w)
{
    char recv[64], send[8] = {0};
    TRY(rendezvous_exchange(rv, recv, send, 8));
    if (rank == 2) {
        sleep_ms(w->timeout_ms + 300);
        return rendezvous_check(rv);
    }
    return rendezvous_exchange(rv, recv, send, 8);
}

static void a_rank_that_does_not_come_to_an_exchange_is_named(void **state)
{
    (void)state;
    struct world w = {.ranks = 4, .timeout_ms = 300, .absent = -1, .body = rank_2_stays_away};
    world_run(&w);
    for (int r = 0; r < 4; r++)
        assert_rank(&w, r, ST_TIMEOUT, "exchange not complete in 0.3 s: no word from rank 2");
}

static void *late_rank(void *argument)
{
    sleep_ms(300);
    return rank_main(argument);
}

static void a_rank_may_come_before_rank_0_listens(void **state)
{
    (void)state;
    struct world w = {.ranks = 2, .timeout_ms = TIMEOUT_MS, .absent = -1, .body = exchange_many};
    struct rank_thread t[2] = {{&w, 0, -1}, {&w, 1, -1}}; /* rank 0 opens the port itself */
    pthread_t threads[2];
    int fd = -1;
    assert_ok(socket_listen(&fd, "127.0.0.1", &w.port)); /* a port that is free just now */
    close(fd);
    assert_int_equal(pthread_create(&threads[0], NULL, late_rank, &t[0]), 0);
    assert_int_equal(pthread_create(&threads[1], NULL, rank_main, &t[1]), 0);
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);
    assert_all_ok(&w);
}

struct stranger {
    struct rendezvous_options options;
    enum status st;
    char message[512];
};

static void *stranger_main(void *argument)
{
    struct stranger *s = argument;
    struct rendezvous *rv = NULL;
    s->st = rendezvous_open(&rv, &s->options);
    snprintf(s->message, sizeof s->message, "%s", status_message());
    rendezvous_close(&rv);
    return NULL;
}

/* Strangers knock, one after the other, at a rank 0 that waits for rank 1; then rank 1 comes. */
static void strangers_are_refused_and_the_run_goes_on(void **state)
{
    (void)state;
    struct world w = {.ranks = 3, .timeout_ms = TIMEOUT_MS, .absent = -1, .body = exchange_many};
    int listen_fd = -1, fd = -1;
    assert_ok(socket_listen(&listen_fd, "127.0.0.1", &w.port));
    struct rank_thread t[3] = {{&w, 0, listen_fd}, {&w, 1, -1}, {&w, 2, -1}};
    pthread_t threads[3];
    assert_int_equal(pthread_create(&threads[0], NULL, rank_main, &t[0]), 0);
    assert_int_equal(pthread_create(&threads[2], NULL, rank_main, &t[2]), 0);
    sleep_ms(100);

    const char *const expected[] = {"its token is not that of this run", "there are 4 ranks",
                                    "rank 2 is here already"};
    for (int i = 0; i < 3; i++) {
        struct stranger s = {.options = options_of(&w, i == 2 ? 2 : 1, -1)};
        if (i == 0)
            s.options.token = "another token";
        if (i == 1)
            s.options.world_size = 4;
        stranger_main(&s);
        assert_int_equal(s.st, ST_COMM);
        assert_non_null(strstr(s.message, expected[i]));
    }
    /* Others do not speak the protocol, hang up, or say nothing at all. */
    for (int i = 0; i < 3; i++) {
        assert_ok(socket_connect(&fd, "127.0.0.1", w.port, clock_ms() + 5000));
        const char text[] = "GET / HTTP/1.0\r\n\r\n";
        if (i == 0)
            assert_int_equal(send(fd, text, sizeof text, MSG_NOSIGNAL), sizeof text);
        if (i < 2)
            socket_close(&fd);
    }
    assert_int_equal(pthread_create(&threads[1], NULL, rank_main, &t[1]), 0);
    for (int r = 0; r < 3; r++)
        pthread_join(threads[r], NULL);
    socket_close(&fd);
    assert_all_ok(&w);
}

/* ---- ranks that end ------------------------------------------------------------------------- */

/* Rank 2 of 3 is a process that meets, exchanges once, and is killed. */
static pid_t start_mortal(struct world *w, int how)
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct rendezvous *rv = NULL;
        struct rendezvous_options options = options_of(w, 2, -1);
        char recv[24], send[8] = {0};
        if (rendezvous_open(&rv, &options) != ST_OK ||
            rendezvous_exchange(rv, recv, send, 8) != ST_OK)
            _exit(1);
        sleep_ms(200);
        if (how == SIGKILL)
            raise(SIGKILL);
        if (how == 0)
            rendezvous_close(&rv); /* in good order */
        else
            rendezvous_abort(rv, "the disk is full");
        _exit(0);
    }
    return pid;
}

static enum status exchange_twice(struct rendezvous *rv, int rank, struct world *w)
{
    char recv[24], send[8] = {0};
    (void)rank;
    (void)w;
    TRY(rendezvous_exchange(rv, recv, send, 8));
    return rendezvous_exchange(rv, recv, send, 8);
}

/* As a rank that waits for its GPU does. */
static enum status watch_for(struct rendezvous *rv, int64_t ms)
{
    char recv[24], send[8] = {0};
    TRY(rendezvous_exchange(rv, recv, send, 8));
    for (int64_t end = clock_ms() + ms; clock_ms() < end; sleep_ms(5))
        TRY(rendezvous_check(rv));
    return ST_OK;
}

static enum status exchange_and_watch(struct rendezvous *rv, int rank, struct world *w)
{
    (void)rank;
    return watch_for(rv, w->timeout_ms);
}

static void run_with_mortal(struct world *w, int how)
{
    int listen_fd = -1;
    pthread_t threads[2];
    w->ranks = 3;
    w->port = 0;
    assert_ok(socket_listen(&listen_fd, "127.0.0.1", &w->port));
    struct rank_thread t[2] = {{w, 0, listen_fd}, {w, 1, -1}};
    pid_t pid = start_mortal(w, how); /* before there are threads */
    for (int r = 0; r < 2; r++)
        assert_int_equal(pthread_create(&threads[r], NULL, rank_main, &t[r]), 0);
    for (int r = 0; r < 2; r++)
        pthread_join(threads[r], NULL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

static void b86_a_dead_rank_is_noticed_at_once_and_named(void **state)
{
    (void)state;
    enum status (*const bodies[])(struct rendezvous *, int, struct world *) = {exchange_twice,
                                                                               exchange_and_watch};
    for (int i = 0; i < 2; i++) {
        struct world w = {.timeout_ms = TIMEOUT_MS, .absent = -1, .body = bodies[i]};
        run_with_mortal(&w, SIGKILL);
        for (int r = 0; r < 2; r++) {
            assert_rank(&w, r, ST_COMM, "rank 2 closed its connection: its process ended");
            assert_true(w.ms[r] < 5000);
        }
    }
}

static void b86_the_cause_of_a_failing_rank_reaches_all(void **state)
{
    (void)state;
    enum status (*const bodies[])(struct rendezvous *, int, struct world *) = {exchange_twice,
                                                                               exchange_and_watch};
    for (int i = 0; i < 2; i++) {
        struct world w = {.timeout_ms = TIMEOUT_MS, .absent = -1, .body = bodies[i]};
        run_with_mortal(&w, SIGTERM);
        for (int r = 0; r < 2; r++) {
            assert_rank(&w, r, ST_COMM, "rank 2: the disk is full");
            assert_true(w.ms[r] < 5000);
        }
    }
}

static enum status watch_for_a_while(struct rendezvous *rv, int rank, struct world *w)
{
    (void)rank;
    (void)w;
    return watch_for(rv, 700);
}

static void a_rank_may_leave_when_it_is_done(void **state)
{
    (void)state;
    struct world w = {.timeout_ms = TIMEOUT_MS, .absent = -1, .body = watch_for_a_while};
    run_with_mortal(&w, 0);
    assert_int_equal(w.st[0], ST_OK);
    assert_int_equal(w.st[1], ST_OK);
    struct world needs = {.timeout_ms = TIMEOUT_MS, .absent = -1, .body = exchange_twice};
    run_with_mortal(&needs, 0);
    assert_rank(&needs, 0, ST_COMM, "rank 2 has left the run");
    assert_rank(&needs, 1, ST_COMM, "rank 2 has left the run");
}

static void *abort_soon(void *argument)
{
    sleep_ms(200);
    rendezvous_abort(argument, "asked to");
    return NULL;
}

/* Rank 1 waits in an exchange while another thread of it aborts; rank 2 is not there yet. */
static enum status aborted_from_outside(struct rendezvous *rv, int rank, struct world *w)
{
    char recv[24], send[8] = {0};
    pthread_t thread;
    (void)w;
    if (rank == 2)
        sleep_ms(500);
    if (rank != 1)
        return rendezvous_exchange(rv, recv, send, 8);
    pthread_create(&thread, NULL, abort_soon, rv);
    enum status st = rendezvous_exchange(rv, recv, send, 8);
    pthread_join(thread, NULL);
    return st;
}

static void abort_ends_a_wait_of_the_same_rank(void **state)
{
    (void)state;
    struct world w = {
        .ranks = 3, .timeout_ms = TIMEOUT_MS, .absent = -1, .body = aborted_from_outside};
    world_run(&w);
    for (int r = 0; r < 3; r++) {
        assert_rank(&w, r, ST_COMM, "rank 1: asked to");
        assert_true(w.ms[r] < 5000);
    }
}

/* Rank 1 aborts while a thread of it has the connections for a look at them, as a watchdog does,
 * and makes no call afterwards. */
static enum status aborted_during_a_look(struct rendezvous *rv, int rank, struct world *w)
{
    char recv[24], send[8] = {0};
    (void)w;
    if (rank != 1)
        return rendezvous_exchange(rv, recv, send, 8);
    pthread_t thread;
    pthread_mutex_lock(&rv->io);
    pthread_create(&thread, NULL, abort_soon, rv);
    pthread_join(thread, NULL);
    rendezvous_let_go(rv);
    sleep_ms(300);
    return FAIL(COMM, "rank 1: asked to");
}

static void an_abort_during_a_look_reaches_the_others(void **state)
{
    (void)state;
    struct world w = {
        .ranks = 3, .timeout_ms = TIMEOUT_MS, .absent = -1, .body = aborted_during_a_look};
    world_run(&w);
    for (int r = 0; r < 3; r++)
        assert_rank(&w, r, ST_COMM, "rank 1: asked to");
}

static void bad_options_are_refused(void **state)
{
    (void)state;
    struct rendezvous *rv = NULL;
    struct rendezvous_options o = {.rank = 2,
                                   .world_size = 2,
                                   .address = "127.0.0.1",
                                   .port = 1,
                                   .token = "",
                                   .listen_fd = -1};
    assert_fails(rendezvous_open(&rv, &o), ST_INVALID, "rank 2 of 2 ranks");
    char token[200];
    memset(token, 'x', sizeof token - 1);
    token[sizeof token - 1] = '\0';
    o.rank = 0;
    o.token = token;
    assert_fails(rendezvous_open(&rv, &o), ST_INVALID, "the token has more than");
    int fd = -1, taken = 0;
    assert_ok(socket_listen(&fd, "127.0.0.1", &taken));
    o.token = "t";
    o.port = taken;
    o.timeout_ms = 1000;
    assert_fails(rendezvous_open(&rv, &o), ST_COMM, "choose another port");
    socket_close(&fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_ranks_get_the_bytes_of_all),
        cmocka_unit_test(names_and_ipv6_and_all_interfaces_work),
        cmocka_unit_test(b84_ranks_that_make_different_calls_are_told_so),
        cmocka_unit_test(a_missing_rank_is_named_on_all_ranks),
        cmocka_unit_test(without_rank_0_the_others_give_up),
        cmocka_unit_test(a_rank_that_does_not_come_to_an_exchange_is_named),
        cmocka_unit_test(a_rank_may_come_before_rank_0_listens),
        cmocka_unit_test(strangers_are_refused_and_the_run_goes_on),
        cmocka_unit_test(b86_a_dead_rank_is_noticed_at_once_and_named),
        cmocka_unit_test(b86_the_cause_of_a_failing_rank_reaches_all),
        cmocka_unit_test(a_rank_may_leave_when_it_is_done),
        cmocka_unit_test(abort_ends_a_wait_of_the_same_rank),
        cmocka_unit_test(an_abort_during_a_look_reaches_the_others),
        cmocka_unit_test(bad_options_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
