#!/usr/bin/env python3
"""Hold the rules about structure: one line a finding, a summary, exit code 1 if there is any.

usage: scripts/check.py [--cases]

  includes   a module includes only the modules of its row in MAY_INCLUDE; headers of libraries stay
             in the .c or .cu file that wraps them
  bans       calls that overrun buffers or go around the arena, the device layer and the log
  headers    every header compiles alone, and twice, as C11 and as C++17, without warnings
  stages     zero_stage is tested in shard/ only; modules that must not know it do not name it
  math       no flag that lets a compiler reorder or fuse floating point
  lines      at most 100 columns in C and CUDA files
  paths      no path of one person's machine
  sizes      no file over 1500 KiB
  format     clang-format, where the version is the one the tree is formatted with
  lists      the tests named in tests/*.txt exist; the table of cases in tests/README.md is current

--cases writes that table again, from the names of the tests. Standard library only.
"""
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import time

ALL = {"engine/base", "engine/device", "engine/ops", "engine/model", "engine/train",
       "shard", "comm", "io"}
MAY_INCLUDE = {
    "engine/base": set(),
    "engine/device": {"engine/base"},
    "engine/ops": {"engine/base", "engine/device"},
    "engine/model": {"engine/base", "engine/device", "engine/ops"},
    "shard": {"engine/base"},
    "comm": {"engine/base", "engine/device"},
    "io": {"engine/base"},
    "engine/train": ALL,
    "fuzz": ALL,
    "tests": ALL | {"fuzz"},
    "bench": ALL,
}
LIBRARIES = re.compile(r"<(cuda|cublas|nccl|mpi|zstd|hwloc|yaml|jansson|zlib|cblas|utf8proc|xxhash|protobuf|isa-l)")
STAGE_BLIND = ("engine/model", "engine/ops", "engine/device", "comm", "io")
CLANG_FORMAT = 14
MAX_COLUMNS = 100
MAX_KIB = 1500
JOBS = 2

# pattern, files that may (a regular expression on the path), what to do instead
BANS = [
    (r"\b(strcpy|strcat|sprintf|vsprintf|strtok|gets)\s*\(", None, "snprintf or memcpy"),
    (r"\b(atoi|atol|atoll|atof)\s*\(", None, "text_to_int or text_to_real"),
    (r"\balloca\s*\(", None, "an arena"),
    (r"\b(malloc|calloc|realloc|aligned_alloc|posix_memalign|strdup|strndup|asprintf)\s*\(",
     r"engine/base/arena\.c$", "mem_alloc, a pool or an arena"),
    (r"\b(cudaMalloc\w*|cudaHostAlloc)\s*\(", r"engine/device/", "the device layer"),
    (r"\b(printf|vprintf|puts|putchar)\s*\(|\bf(printf|puts|putc)\s*\([^;]*\bstdout\b",
     r"(engine/base/(log|out)\.c$|tests/|bench/)", "out() or a log line"),
    (r"\bf(printf|puts|putc)\s*\([^;]*\bstderr\b",
     r"(engine/base/(log|out|status)\.c$|tests/|bench/)", "a log line"),
]
# Written so that the patterns do not find themselves.
PATHS = re.compile(r"(?<![\w.-])/(wor[k]|roo[t]|hom[e])/|\.\./share[d]")
FAST_MATH = re.compile(r"-Ofas[t]|-ffast-mat[h]|--use_fast_mat[h]")

CASES_BEGIN = "<!-- cases: written by scripts/check.py --cases -->"
CASES_END = "<!-- end of cases -->"

findings = []


def finding(path, line, text):
    findings.append((path, line or 0, f"{path}:{line}: {text}" if line else f"{path}: {text}"))


def list_files():
    """Tracked files and new ones that are not ignored."""
    out = subprocess.run(["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others",
                          "--exclude-standard"], check=True, stdout=subprocess.PIPE).stdout
    names = sorted(set(os.fsdecode(n) for n in out.split(b"\0") if n))
    return [n for n in names if os.path.isfile(n) and not os.path.islink(n)]


def read_text(path):
    """The file as text; None if it is binary."""
    with open(path, "rb") as f:
        data = f.read()
    if b"\0" in data[:65536]:
        return None
    return data.decode("utf-8", "replace")


TOKENS = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)


def code_only(text):
    """Comments and the insides of literals as spaces; lines keep their numbers."""
    def blank(match):
        token = match.group(0)
        if token.startswith("/"):
            return re.sub(r"[^\n]", " ", token)
        return token[0] + " " * (len(token) - 2) + token[-1]
    return TOKENS.sub(blank, text)


def without_comments(text):
    def blank(match):
        token = match.group(0)
        return re.sub(r"[^\n]", " ", token) if token.startswith("/") else token
    return TOKENS.sub(blank, text)


def line_of(text, offset):
    return text.count("\n", 0, offset) + 1


def module_of(path):
    matches = [m for m in MAY_INCLUDE if path.startswith(m + "/")]
    return max(matches, key=len) if matches else None


def knows_cuda(path):
    """Private headers of CUDA files: cuda_check.h, cuda_common.cuh."""
    return path.endswith((".cu", ".cuh")) or "cuda" in os.path.basename(path) \
        or "nccl" in os.path.basename(path)


def check_includes(path, text):
    module = module_of(path)
    if module is None:
        finding(path, None, "lies in no module; the modules are " + ", ".join(sorted(MAY_INCLUDE)))
        return
    for match in re.finditer(r'^[ \t]*#[ \t]*include[ \t]*([<"][^>"\n]+[>"])',
                             without_comments(text), re.MULTILINE):
        line, name = line_of(text, match.start()), match.group(1)
        if name.startswith("<"):
            if path.endswith(".h") and LIBRARIES.match(name) and not knows_cuda(path):
                finding(path, line, f"{name} in a header: keep it in the .c file that wraps it")
            continue
        name = name[1:-1]
        target = module_of(name)
        generated = name.removesuffix(".pb-c.h") + ".proto"
        if target is None or not os.path.isfile(generated if name.endswith(".pb-c.h") else name):
            finding(path, line, f'"{name}" is no file of the tree (paths start at its root)')
        elif target != module and target not in MAY_INCLUDE[module]:
            finding(path, line, f"{module} must not include {target} ({name})")
        elif knows_cuda(name) and not knows_cuda(path) and LIBRARIES.search(read_text(name) or ""):
            finding(path, line, f"{name} needs CUDA's headers; this file is built without them")


def check_code(path, text):
    code = code_only(text)
    for pattern, allowed, instead in BANS:
        if allowed and re.match(allowed, path):
            continue
        for match in re.finditer(pattern, code):
            name = match.group(0).split("(")[0].strip()
            finding(path, line_of(code, match.start()), f"{name} is banned here: use {instead}")
    base_not_config = path.startswith("engine/base/") and "/config" not in path
    if path.startswith(tuple(m + "/" for m in STAGE_BLIND)) or base_not_config:
        for match in re.finditer(r"\bzero_stage\b", code):
            finding(path, line_of(code, match.start()), "zero_stage belongs to shard/")
    for number, line in enumerate(text.split("\n"), 1):
        if len(line.expandtabs(8)) > MAX_COLUMNS:
            finding(path, number, f"{len(line.expandtabs(8))} columns, at most {MAX_COLUMNS}")


def check_any(path):
    kib = os.path.getsize(path) / 1024
    if kib > MAX_KIB:
        finding(path, None, f"{kib:.0f} KiB, at most {MAX_KIB}")
    text = read_text(path)
    if text is None:
        return
    for pattern, what in ((PATHS, "a path of one machine"), (FAST_MATH, "a fast-math flag")):
        for match in pattern.finditer(text):
            finding(path, line_of(text, match.start()), f"{what}: {match.group(0)}")


def compile_header(job):
    header, command = job
    source = f'#include "{header}"\n#include "{header}"\n'
    result = subprocess.run(command, input=source, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)
    if result.returncode == 0:
        return None
    lines = [l for l in result.stdout.split("\n") if ": error:" in l or ": warning:" in l]
    return header, (lines or result.stdout.split("\n") or ["failed"])[0]


def check_headers(headers, notes):
    common = ["-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I.", "-D_GNU_SOURCE"]
    commands = {"C11": ([os.environ.get("CC", "cc")], ["-std=c11", "-x", "c", "-"]),
                "C++17": ([os.environ.get("CXX", "c++")], ["-std=c++17", "-x", "c++", "-"])}
    jobs = []
    for language, (compiler, tail) in commands.items():
        if shutil.which(compiler[0]) is None:
            notes.append(f"no compiler for {language}: lone headers were not tried as {language}")
            continue
        jobs += [(h, compiler + common + tail) for h in headers if not knows_cuda(h)]
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        for (header, command), result in zip(jobs, pool.map(compile_header, jobs)):
            if result:
                language = next(c for c in command if c.startswith("-std="))[5:]
                finding(header, None, f"does not compile alone as {language}: {result[1]}")


def check_format(paths, notes):
    tool = shutil.which("clang-format")
    version = re.search(r"version (\d+)", subprocess.run(
        [tool, "--version"], stdout=subprocess.PIPE, text=True).stdout) if tool else None
    if version is None or int(version.group(1)) != CLANG_FORMAT:
        notes.append(f"no clang-format {CLANG_FORMAT}: format was not checked")
        return

    def run(path):
        result = subprocess.run([tool, "--dry-run", "-Werror", path], stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL)
        return path if result.returncode else None
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        for path in pool.map(run, paths):
            if path:
                finding(path, None, "is not as clang-format would have it: run `make format`")


def find_cases(files):
    """(number, test, program) of every test that carries the id of a case: b98_..., b10_b11_..."""
    rows = set()
    for path in files:
        if not re.fullmatch(r"tests/\w+\.c", path):
            continue
        for name in re.findall(r"^static void ((?:b\d+_)+\w+)\s*\(void \*\*", read_text(path), re.M):
            ids = re.match(r"(?:b\d+_)+", name).group(0)
            rows |= {(int(n), name, path) for n in re.findall(r"\d+", ids)}
    return sorted(rows)


def case_table(files):
    rows = [f"| B-{number:02d} | `{name}` | {path} |" for number, name, path in find_cases(files)]
    return "\n".join(["| case | test | file |", "| --- | --- | --- |"] + rows)


def cases_in_readme(files, write):
    path = "tests/README.md"
    text = read_text(path) if os.path.isfile(path) else ""
    parts = re.split(f"{re.escape(CASES_BEGIN)}|{re.escape(CASES_END)}", text)
    if len(parts) != 3:
        finding(path, None, f"has no pair of markers {CASES_BEGIN} and {CASES_END}")
        return
    fresh = f"{parts[0]}{CASES_BEGIN}\n\n{case_table(files)}\n\n{CASES_END}{parts[2]}"
    if write:
        with open(path, "w", encoding="utf-8") as f:
            f.write(fresh)
    elif fresh != text:
        finding(path, None, "the table of cases is stale: run scripts/check.py --cases")


def check_test_lists(files):
    for path in ("tests/alone.txt", "tests/sanitize.txt", "tests/tsan.txt"):
        if path not in files:
            finding(path, None, "is missing")
            continue
        for number, line in enumerate(read_text(path).split("\n"), 1):
            name = line.split("#")[0].strip()
            if name and f"tests/{name}.c" not in files:
                finding(path, number, f"there is no test {name}")


def main():
    start = time.monotonic()
    os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if sys.argv[1:] not in ([], ["--cases"]):
        print(__doc__)
        return 2
    files, notes = list_files(), []
    if sys.argv[1:] == ["--cases"]:
        cases_in_readme(files, write=True)
    else:
        sources = [f for f in files if f.endswith((".c", ".h", ".cu", ".cuh"))]
        for path in sources:
            text = read_text(path)
            check_includes(path, text)
            check_code(path, text)
        for path in files:
            check_any(path)
        check_headers([f for f in sources if f.endswith(".h")], notes)
        check_format(sources, notes)
        check_test_lists(files)
        cases_in_readme(files, write=False)
    for _, _, line in sorted(findings):
        print(line)
    for note in notes:
        print(f"note: {note}")
    print(f"check: {len(files)} files, {len(findings)} findings, {time.monotonic() - start:.1f} s")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
