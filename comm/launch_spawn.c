/* The parent of ranks on one machine; see launch.h. It runs no thread and makes no CUDA call. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "comm/launch.h"
#include "comm/socket.h"
#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"

extern char **environ;

enum {
    MAX_LOCAL_RANKS = 1024,
    STOP_FACTOR = 6, /* after a stop signal ranks may still be saving when the first one ends */
    VARIABLES = 8,   /* that a rank gets */
    MPI_GRACE_S = 3, /* mpiexec waits so long before SIGTERM, and before SIGKILL */
    NO_PROGRAM = 127 /* exit code of a child that is none */
};

/* The processes are the ranks of a run, or one mpiexec that has started them. */
struct spawn {
    int count, live;
    char **argv;
    int ranks;
    bool mpi;
    pid_t *pids; /* [count] owned; 0 once it has ended */
    int exit_code;
    int interrupts;   /* SIGINTs so far */
    int told;         /* the first signal that was passed on; 0: none */
    bool stopping;    /* a signal that stops the run has been passed on */
    int64_t grace_ms; /* between the first failure, SIGTERM and SIGKILL */
    int64_t deadline; /* of the next of these; 0 while no rank has failed */
    bool terminated;  /* SIGTERM has been sent after a failure */
};

/* ---- what a rank gets ----------------------------------------------------------------------- */

static enum status make_token(char out[65])
{
    unsigned char random[32];
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return FAIL(SYSTEM, "cannot make a token: getrandom: %s", strerror(errno));
    for (int i = 0; i < 32; i++)
        snprintf(out + 2 * (size_t)i, 3, "%02x", random[i]);
    return ST_OK;
}

static bool is_ours(const char *variable)
{
    static const char *const names[] = {
        "TESSERA_RANK=",    "TESSERA_WORLD_SIZE=", "TESSERA_LOCAL_RANK=", "TESSERA_LOCAL_SIZE=",
        "TESSERA_ADDRESS=", "TESSERA_PORT=",       "TESSERA_TOKEN=",      "TESSERA_LISTEN_FD="};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strncmp(variable, names[i], strlen(names[i])) == 0)
            return true;
    return false;
}

static enum status add(struct pool *pool, char **env, size_t *count, const char *name,
                       int64_t value)
{
    char text[96];
    int n = snprintf(text, sizeof text, "%s=%lld", name, (long long)value);
    return pool_copy(pool, &env[(*count)++], text, (size_t)n);
}

/* The environment of one rank. Made before fork(): after it the child may only make system calls.*/
static enum status make_environment(struct pool *pool, char ***out, int rank, int ranks, int port,
                                    const char *token, int listen_fd)
{
    size_t have = 0, n = 0;
    char **env = NULL, text[96];
    while (environ[have] != NULL)
        have++;
    TRY(pool_take(pool, &env, (have + VARIABLES + 1) * sizeof *env));
    for (size_t i = 0; i < have; i++)
        if (!is_ours(environ[i]))
            env[n++] = environ[i];
    TRY(add(pool, env, &n, "TESSERA_RANK", rank));
    TRY(add(pool, env, &n, "TESSERA_WORLD_SIZE", ranks));
    TRY(add(pool, env, &n, "TESSERA_LOCAL_RANK", rank));
    TRY(add(pool, env, &n, "TESSERA_LOCAL_SIZE", ranks));
    TRY(add(pool, env, &n, "TESSERA_PORT", port));
    int bytes = snprintf(text, sizeof text, "TESSERA_TOKEN=%s", token);
    TRY(pool_copy(pool, &env[n++], text, (size_t)bytes));
    bytes = snprintf(text, sizeof text, "TESSERA_ADDRESS=127.0.0.1");
    TRY(pool_copy(pool, &env[n++], text, (size_t)bytes));
    if (rank == 0)
        TRY(add(pool, env, &n, "TESSERA_LISTEN_FD", listen_fd));
    *out = env;
    return ST_OK;
}

static enum status find_self(char exe[static 1024])
{
    ssize_t n = readlink("/proc/self/exe", exe, 1023);
    exe[n > 0 ? n : 0] = '\0';
    if (n < 0)
        return FAIL(SYSTEM, "cannot find this program: /proc/self/exe: %s", strerror(errno));
    return ST_OK;
}

/* In the child. Its own process group: a Ctrl-C at the terminal reaches the parent alone, which
 * passes it on once. */
static void begin_child(pid_t parent, int signal_at_its_death, const sigset_t *mask)
{
    prctl(PR_SET_PDEATHSIG, signal_at_its_death);
    if (getppid() != parent) /* it died before that */
        _exit(1);
    setpgid(0, 0);
    sigprocmask(SIG_SETMASK, mask, NULL);
}

static void end_child(const char *text)
{
    ssize_t ignored = write(2, text, strlen(text));
    (void)ignored;
    _exit(NO_PROGRAM);
}

static void become_rank(const char *exe, char **argv, char **env, pid_t parent, int keep_fd,
                        const sigset_t *mask)
{
    begin_child(parent, SIGKILL, mask);
    if (keep_fd >= 0)
        fcntl(keep_fd, F_SETFD, 0);
    execve(exe, argv, env);
    execve("/proc/self/exe", argv, env); /* the file was moved or replaced */
    end_child("tessera: cannot execute itself\n");
}

static enum status start_ranks(struct spawn *s, struct pool *pool, const sigset_t *mask)
{
    enum status st = ST_OK;
    int listen_fd = -1, port = 0;
    char token[65], exe[1024];
    char ***envs = NULL;
    pid_t parent = getpid();
    TRY(find_self(exe));
    TRY(make_token(token));
    /* The listener is opened here and handed to rank 0: no one else can take the port meanwhile. */
    TRY(socket_listen(&listen_fd, "127.0.0.1", &port));
    TRY_GOTO(st, out, pool_take(pool, &envs, (size_t)s->ranks * sizeof *envs));
    for (int r = 0; r < s->ranks; r++)
        TRY_GOTO(st, out, make_environment(pool, &envs[r], r, s->ranks, port, token, listen_fd));
    for (int r = 0; r < s->ranks; r++) {
        pid_t pid = fork();
        if (pid == 0)
            become_rank(exe, s->argv, envs[r], parent, r == 0 ? listen_fd : -1, mask);
        if (pid < 0) {
            st = FAIL(SYSTEM, "cannot start rank %d: fork: %s", r, strerror(errno));
            goto out;
        }
        s->pids[r] = pid;
        s->live++;
    }
out:
    socket_close(&listen_fd);
    return st;
}

/* ---- mpiexec -------------------------------------------------------------------------------- */

/* Ranks of this machine, as many as were asked for, sharing its cores; nobody needs ssh. */
static enum status make_command(struct pool *pool, char ***out, const struct spawn *s)
{
    static const char *const words[] = {"mpiexec",  "--oversubscribe", "--bind-to",
                                        "none",     "--mca",           "plm",
                                        "isolated", "--mca",           "odls_base_sigkill_timeout"};
    enum { WORDS = sizeof words / sizeof *words, MORE = 6 };
    char exe[1024], number[16];
    size_t n = 0, given = 0;
    char **argv = NULL;
    TRY(find_self(exe));
    while (s->argv[given] != NULL)
        given++;
    TRY(pool_take(pool, &argv, (WORDS + MORE + given) * sizeof *argv));
    for (int i = 0; i < WORDS; i++)
        TRY(pool_copy(pool, &argv[n++], words[i], strlen(words[i])));
    int bytes = snprintf(number, sizeof number, "%d", MPI_GRACE_S);
    TRY(pool_copy(pool, &argv[n++], number, (size_t)bytes));
    if (geteuid() == 0)
        TRY(pool_copy(pool, &argv[n++], "--allow-run-as-root", strlen("--allow-run-as-root")));
    TRY(pool_copy(pool, &argv[n++], "-n", 2));
    bytes = snprintf(number, sizeof number, "%d", s->ranks);
    TRY(pool_copy(pool, &argv[n++], number, (size_t)bytes));
    TRY(pool_copy(pool, &argv[n++], exe, strlen(exe)));
    for (size_t i = 1; i < given; i++)
        argv[n++] = s->argv[i];
    *out = argv;
    return ST_OK;
}

/* In the child. It would pass the terminal's input on to rank 0, which reads none. */
static void become_mpiexec(char **command, pid_t parent, const sigset_t *mask)
{
    begin_child(parent, SIGTERM, mask);
    int null = open("/dev/null", O_RDONLY);
    if (null >= 0)
        dup2(null, STDIN_FILENO);
    execvp(command[0], command);
    end_child(
        "tessera: mpiexec of Open MPI is not in PATH: it starts the ranks of train.comm mpi\n");
}

static enum status start_mpiexec(struct spawn *s, struct pool *pool, const sigset_t *mask)
{
    char **command = NULL;
    pid_t parent = getpid();
    TRY(make_command(pool, &command, s));
    s->pids[0] = fork();
    if (s->pids[0] == 0)
        become_mpiexec(command, parent, mask);
    if (s->pids[0] < 0)
        return FAIL(SYSTEM, "cannot start mpiexec: fork: %s", strerror(errno));
    s->live = 1;
    return ST_OK;
}

/* ---- watching over them --------------------------------------------------------------------- */

static void signal_all(const struct spawn *s, int signal_number)
{
    for (int r = 0; r < s->count; r++)
        if (s->pids[r] > 0)
            kill(s->pids[r], signal_number);
}

static void rank_ended(struct spawn *s, int rank, int how)
{
    s->pids[rank] = 0;
    s->live--;
    int code = WIFSIGNALED(how) ? 128 + WTERMSIG(how) : WEXITSTATUS(how);
    if (code == 0 || s->exit_code != 0)
        return;
    s->exit_code = code;
    if (s->mpi) /* it has said what there is to say; of signals the ranks know one alone */
        s->exit_code = s->told > 0 && code == 128 + SIGUSR1 ? 128 + s->told : code;
    if (s->mpi)
        return;
    s->deadline = clock_ms() + s->grace_ms * (s->stopping ? STOP_FACTOR : 1);
    const char *others = s->live > 0 ? "; the other ranks are ended" : "";
    if (s->stopping)
        log_info("launch", "rank %d stopped with exit code %d", rank, code);
    else if (WIFSIGNALED(how))
        log_error("launch", "rank %d was killed by signal %d (%s)%s", rank, WTERMSIG(how),
                  strsignal(WTERMSIG(how)), others);
    else
        log_error("launch", "rank %d failed with exit code %d%s", rank, code, others);
}

static void reap(struct spawn *s)
{
    for (int r = 0; r < s->count; r++) {
        int how = 0;
        if (s->pids[r] > 0 && waitpid(s->pids[r], &how, WNOHANG) == s->pids[r])
            rank_ended(s, r, how);
    }
}

static void pass_on(struct spawn *s, int signal_number)
{
    if (signal_number == SIGINT && ++s->interrupts > 1) {
        log_warn("launch", "interrupted again: killing the ranks");
        signal_all(s, s->mpi ? SIGTERM : SIGKILL);
        return;
    }
    if (signal_number != SIGUSR1)
        s->stopping = true;
    /* For a rank a vanished terminal is a request to stop. */
    if (signal_number == SIGHUP)
        signal_number = SIGTERM;
    if (s->told == 0)
        s->told = signal_number;
    /* mpiexec passes on SIGUSR1 at once and waits for the ranks; after the others it kills them. */
    signal_all(s, s->mpi ? SIGUSR1 : signal_number);
}

/* The grace after the first failure has passed. */
static void escalate(struct spawn *s)
{
    for (int r = 0; r < s->count; r++)
        if (s->pids[r] > 0)
            log_warn("launch", "rank %d is still running: %s", r,
                     s->terminated ? "killed" : "terminated");
    signal_all(s, s->terminated ? SIGKILL : SIGTERM);
    s->terminated = true;
    s->deadline = clock_ms() + (s->grace_ms + 1) / 2;
}

static void watch_over(struct spawn *s, const sigset_t *signals)
{
    for (;;) {
        reap(s);
        if (s->live == 0)
            return;
        int64_t wait_ms = 1000, now = clock_ms();
        if (s->deadline > 0) {
            if (now >= s->deadline)
                escalate(s);
            if (s->deadline - now < wait_ms)
                wait_ms = s->deadline - now;
        }
        struct timespec limit = {.tv_sec = wait_ms / 1000, .tv_nsec = wait_ms % 1000 * 1000000};
        int signal_number = sigtimedwait(signals, NULL, &limit);
        if (signal_number > 0 && signal_number != SIGCHLD)
            pass_on(s, signal_number);
    }
}

/* Those that this process does not ignore: under nohup a hang-up is to be ignored. */
static void choose_signals(sigset_t *signals)
{
    static const int wanted[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};
    sigemptyset(signals);
    sigaddset(signals, SIGCHLD);
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        struct sigaction now;
        if (sigaction(wanted[i], NULL, &now) == 0 && now.sa_handler != SIG_IGN)
            sigaddset(signals, wanted[i]);
    }
}

static enum status run(struct spawn *s, int *exit_code)
{
    enum status st = ST_OK;
    struct pool pool = {0};
    sigset_t signals, before;
    struct sigaction child_before, child_default = {.sa_handler = SIG_DFL};
    *exit_code = 1;
    /* Signals are taken one by one in watch_over(), so there is no handler and no race. An ignored
     * SIGCHLD would throw the exit codes away. */
    choose_signals(&signals);
    sigaction(SIGCHLD, &child_default, &child_before);
    sigprocmask(SIG_BLOCK, &signals, &before);
    TRY_GOTO(st, out, pool_take(&pool, &s->pids, (size_t)s->count * sizeof *s->pids));
    TRY_GOTO(st, out, s->mpi ? start_mpiexec(s, &pool, &before) : start_ranks(s, &pool, &before));
    watch_over(s, &signals);
    *exit_code = s->exit_code;
out:
    if (s->live > 0) { /* not all could be started */
        signal_all(s, SIGKILL);
        watch_over(s, &signals);
    }
    sigprocmask(SIG_SETMASK, &before, NULL);
    sigaction(SIGCHLD, &child_before, NULL);
    pool_release(&pool);
    return st;
}

enum status launch_spawn(int *exit_code, int ranks, char **argv, int64_t grace_ms)
{
    struct spawn s = {.count = ranks, .ranks = ranks, .argv = argv};
    s.grace_ms = grace_ms > 0 ? grace_ms : LAUNCH_GRACE_MS;
    *exit_code = 1;
    if (ranks < 1 || ranks > MAX_LOCAL_RANKS)
        return FAIL(INVALID, "%d ranks on one machine: expected 1 to %d", ranks, MAX_LOCAL_RANKS);
    return run(&s, exit_code);
}

enum status launch_mpiexec(int *exit_code, int ranks, char **argv)
{
    struct spawn s = {.count = 1, .ranks = ranks, .argv = argv, .mpi = true};
    return run(&s, exit_code);
}
