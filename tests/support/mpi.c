#include "tests/support/mpi.h"
#include "engine/base/clock.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/ranks.h"

enum { DEADLINE_MS = 60000 };

static bool is_in_path(const char *program)
{
    const char *path = getenv("PATH");
    while (path != NULL && *path != '\0') {
        char file[1024];
        size_t length = strcspn(path, ":");
        snprintf(file, sizeof file, "%.*s/%s", (int)length, path, program);
        if (access(file, X_OK) == 0)
            return true;
        path += length + (path[length] == ':');
    }
    return false;
}

bool mpi_there(void)
{
#ifdef TESSERA_MPI
    return is_in_path("mpiexec");
#else
    (void)is_in_path;
    return false;
#endif
}

void mpi_skip_without(void)
{
    if (!mpi_there())
        skip();
}

/* Cores and slots are fewer than ranks, tests run as root in containers, nobody needs ssh. */
static const char *const launcher[] = {"mpiexec",
                                       "--allow-run-as-root",
                                       "--oversubscribe",
                                       "--bind-to",
                                       "none",
                                       "--mca",
                                       "plm",
                                       "isolated",
                                       "--mca",
                                       "mpi_yield_when_idle",
                                       "1",
                                       "-n"};
enum { LAUNCHER = sizeof launcher / sizeof *launcher };

void job_start(struct job *job, const struct scratch *scratch, int ranks, const char *const *argv)
{
    const char *all[LAUNCHER + JOB_ARGS + 2];
    static int jobs; /* several may run */
    char count[16], name[32];
    int n = 0;
    snprintf(name, sizeof name, "job-%d", jobs++);
    snprintf(count, sizeof count, "%d", ranks);
    for (int i = 0; ranks > 0 && i < LAUNCHER; i++)
        all[n++] = launcher[i];
    if (ranks > 0)
        all[n++] = count;
    for (int i = 0; i < JOB_ARGS && argv[i] != NULL; i++)
        all[n++] = argv[i];
    all[n] = NULL;
    scratch_path(scratch, job->path, name);
    fflush(NULL);
    job->begun_ms = clock_ms();
    job->pid = fork();
    assert_true(job->pid >= 0);
    if (job->pid > 0)
        return;
    int out = open(job->path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    int in = open("/dev/null", O_RDONLY);
    if (out < 0 || in < 0 || dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(out, 2) < 0)
        _exit(99);
    execvp(all[0], (char *const *)all);
    _exit(97);
}

void job_wait(struct job *job)
{
    int state = 0;
    while (waitpid(job->pid, &state, WNOHANG) == 0) {
        if (clock_ms() - job->begun_ms > DEADLINE_MS) {
            kill(job->pid, SIGTERM);
            sleep_ms(1000);
            kill(job->pid, SIGKILL);
            waitpid(job->pid, &state, 0);
            fail_msg("a job did not end: see %s", job->path);
        }
        sleep_ms(5);
    }
    job->ms = clock_ms() - job->begun_ms;
    job->code = WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state);
    FILE *f = fopen(job->path, "rb");
    size_t bytes = f != NULL ? fread(job->output, 1, sizeof job->output - 1, f) : 0;
    job->output[bytes] = '\0';
    if (f != NULL)
        fclose(f);
}

void job_expect(const struct job *job, bool success, const char *text)
{
    if ((job->code == 0) == success && (text == NULL || strstr(job->output, text) != NULL))
        return;
    fail_msg("expected %s and \"%s\"; got exit code %d after %lld ms and\n%.4000s",
             success ? "success" : "a failure", text != NULL ? text : "", job->code,
             (long long)job->ms, job->output);
}
