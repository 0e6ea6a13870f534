#include "tests/support/process.h"
#include "engine/base/clock.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/ranks.h"

enum { MAX_ARGS = 32 };

static const char *binary(void)
{
    const char *path = getenv("TESSERA");
    return path != NULL ? path : "./tessera";
}

static void redirect(int fd, const char *path)
{
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (file < 0 || dup2(file, fd) < 0)
        _exit(99);
    close(file);
}

void process_start(struct process *p, const struct scratch *scratch, const char *const *args,
                   long file_limit, const char *out)
{
    char out_path[512], err_path[512];
    const char *argv[MAX_ARGS + 2] = {binary()};
    for (int i = 0; args[i] != NULL && i < MAX_ARGS; i++)
        argv[i + 1] = args[i];
    scratch_path(scratch, out_path, "stdout");
    scratch_path(scratch, err_path, "stderr");
    fflush(NULL);
    p->pid = fork();
    assert_true(p->pid >= 0);
    if (p->pid > 0)
        return;
    redirect(STDOUT_FILENO, out != NULL ? out : out_path);
    redirect(STDERR_FILENO, err_path);
    if (file_limit > 0 &&
        setrlimit(RLIMIT_FSIZE, &(struct rlimit){(rlim_t)file_limit, (rlim_t)file_limit}) != 0)
        _exit(98);
    execv(argv[0], (char *const *)argv);
    _exit(97);
}

static void read_back(const struct scratch *scratch, char *text, const char *name)
{
    char path[512];
    FILE *f = fopen(scratch_path(scratch, path, name), "rb");
    size_t n = f != NULL ? fread(text, 1, PROCESS_OUTPUT_BYTES - 1, f) : 0;
    text[n] = '\0';
    if (f != NULL)
        fclose(f);
}

void process_wait(struct process *p, const struct scratch *scratch)
{
    int state = 0;
    int64_t begun = clock_ms();
    while (waitpid(p->pid, &state, WNOHANG) == 0) {
        if (clock_ms() - begun > PROCESS_DEADLINE_MS) {
            kill(p->pid, SIGKILL);
            waitpid(p->pid, &state, 0);
            fail_msg("%s did not end", binary());
        }
        sleep_ms(3);
    }
    p->code = WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state);
    read_back(scratch, p->out, "stdout");
    read_back(scratch, p->err, "stderr");
    if (p->code == 97)
        fail_msg("cannot start %s: build it, or set TESSERA", binary());
}

void process_run(struct process *p, const struct scratch *scratch, const char *const *args)
{
    process_start(p, scratch, args, 0, NULL);
    process_wait(p, scratch);
}

void process_expect(const struct process *p, int code, const char *out, const char *err)
{
    bool fits = p->code == code && (out == NULL || strstr(p->out, out) != NULL) &&
                (err == NULL || strstr(p->err, err) != NULL);
    if (!fits)
        fail_msg("expected exit code %d, \"%s\" and \"%s\"; got %d\n%.2000s\n%.2000s", code,
                 out != NULL ? out : "", err != NULL ? err : "", p->code, p->out, p->err);
}
