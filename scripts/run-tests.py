#!/usr/bin/env python3
"""Run test programs, a summary line each, and end with one line: N passed, N failed, N skipped.

usage: scripts/run-tests.py BUILD_FOLDER PROGRAM...

Two programs run beside each other (TEST_JOBS), those named in tests/alone.txt behind them, one by
one; their lines stand in this order. Each has a folder of its own for temporary files (TMPDIR) and
TEST_TIMEOUT seconds (300). What it prints is kept in BUILD_FOLDER/test-logs and shown when it fails.
Standard library only.
"""
import concurrent.futures
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

JOBS = int(os.environ.get("TEST_JOBS", min(2, len(os.sched_getaffinity(0)))))
TIMEOUT_S = float(os.environ.get("TEST_TIMEOUT", 300))
GRACE_S = 5  # from SIGTERM to SIGKILL
SHOWN = 60   # lines of a program that failed
COUNTED = {"[       OK ]": 0, "[  FAILED  ]": 1, "[  SKIPPED ]": 2}


class Running:
    """The programs that run now. Once stopped there are no more."""

    def __init__(self):
        self.lock, self.children, self.stopped = threading.Lock(), set(), False

    def start(self, command, **how):
        with self.lock:
            if self.stopped:
                return None
            child = subprocess.Popen(command, start_new_session=True, **how)
            self.children.add(child)
        return child

    def wait(self, child):
        """Exit code: 128 + N after signal N, 124 if the time was over."""
        try:
            code = child.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            end(child)
            code = 124
        with self.lock:
            self.children.discard(child)
        return code if code >= 0 else 128 - code

    def stop(self):
        with self.lock:
            self.stopped, children = True, list(self.children)
        for child in children:
            end(child)


def end(child):
    """It, and what it has started in its group."""
    for number in signal.SIGTERM, signal.SIGKILL:
        try:
            os.killpg(child.pid, number)
            child.wait(GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def count(text, code):
    """Tests that passed, failed, were skipped."""
    # Between "Running" and "run" only: the summary below names failed and skipped tests again.
    counts, counting = [0, 0, 0], False
    for line in text.splitlines():
        if line.startswith("[==========]"):
            counting = not line.endswith(" run.") and (counting or "Running" in line)
        elif counting and line[:12] in COUNTED:
            counts[COUNTED[line[:12]]] += 1
    # A program that died, hung or ran nothing has failed, whatever it counted.
    if (code != 0 and counts[1] == 0) or sum(counts) == 0:
        counts[1] += 1
    return counts


def run(program, logs, running):
    """What to print of a program, and its counts."""
    name = os.path.basename(program)
    path = os.path.join(logs, name + ".log")
    begin = time.monotonic()
    # A short name: sockets lie there, whose paths are short.
    with tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True) as folder, \
            open(path, "wb") as log:
        child = running.start([program], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                              env={**os.environ, "CMOCKA_MESSAGE_OUTPUT": "stdout", "TMPDIR": folder})
        if child is None:
            return "", [0, 0, 0]
        code = running.wait(child)
    with open(path, encoding="utf-8", errors="replace") as log:
        text = log.read()
    counts = count(text, code)
    said = "%-28s %4d passed %3d failed %3d skipped %7d ms" % (
        name, *counts, (time.monotonic() - begin) * 1000)
    if counts[1] > 0:
        lines = [line for line in text.splitlines()
                 if not re.match(r"\[ RUN      \]|\[       OK \]", line)]
        said += "\n".join(["\n--- %s: exit code %d" % (name, code), *lines[-SHOWN:], "---"])
    return said, counts


def alone():
    with open("tests/alone.txt", encoding="utf-8") as lines:
        return {line.split("#")[0].strip() for line in lines}


def main():
    logs = os.path.join(sys.argv[1], "test-logs")
    os.makedirs(logs, exist_ok=True)
    names = alone()
    apart = [p for p in sys.argv[2:] if os.path.basename(p) in names]
    beside = [p for p in sys.argv[2:] if p not in apart]
    total = [0, 0, 0]
    running = Running()

    signals = signal.SIGHUP, signal.SIGINT, signal.SIGTERM

    def interrupted(number, _):
        for other in signals:
            signal.signal(other, signal.SIG_IGN)
        running.stop()
        sys.exit(128 + number)

    for number in signals:
        signal.signal(number, interrupted)
    for programs, jobs in (beside, JOBS), (apart, 1):
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for said, counts in pool.map(lambda p: run(p, logs, running), programs):
                print(said, flush=True)
                total = [a + b for a, b in zip(total, counts)]
    print("%d passed, %d failed, %d skipped" % tuple(total))
    return 1 if total[1] > 0 else 0


sys.exit(main())
