#!/usr/bin/env python3
"""The rules of the tree that a compiler does not know.

  check_rooms.py [ROOT]        checks src/, include/ and kernels/; prints "file:line: what", exit status 1 if anything
  check_rooms.py --self-test   plants one violation of each rule in a small tree and expects every one to be found

1. Includes go one way: main (the files in src/ itself), http, openai, router, engine, cache, loader, model,
   {backend, delta, tokenizer}, hf, config, base.
   tools may include model and everything after it; only main includes tools; pool stands beside cache.
2. A room's private headers (src/<room>/*.h) stay in the room.
3. A library's header is included only in the rooms that own the library.
4. getenv only in config; exit and abort only in main.c and where a failed assertion ends; stdout only in tools and main.c.
"""
import pathlib
import re
import sys
import tempfile

ORDER = [["http"], ["openai"], ["router"], ["engine"], ["cache", "pool"], ["loader"], ["tools"], ["model"],
         ["backend", "delta", "tokenizer"], ["hf"], ["config"], ["base"]]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}

# Header pattern: rooms that may include it. "backend/cuda" is a part of backend, "kernels" the folder of that name.
FOREIGN = {
    r"(cjson/)?cJSON\.h": {"openai", "http", "hf", "delta", "config", "tokenizer"},
    r"microhttpd\.h": {"http"},
    r"liburing(/.*)?\.h": {"loader"},
    r"(cuda.*|cublas.*|nccl|nvtx.*|mma|cooperative_groups)\.h": {"backend/cuda", "kernels"},
    r"pcre2(posix)?\.h": {"tokenizer"},
    r"utf8proc\.h": {"tokenizer"},
    r"xxh(ash|3)\.h": {"base", "delta", "loader"},
    r"nettle/.*\.h": {"hf", "delta", "model", "openai", "router", "http", "tools"},
    r"(cblas|lapacke|openblas_config|f77blas)\.h": {"backend/cpu"},
}

ENDS = re.compile(r"(?<![\w.>])(exit|_exit|_Exit|quick_exit|abort)\s*\(")
ENVIRONMENT = re.compile(r"\b(getenv|secure_getenv|environ)\b")
STDOUT = re.compile(r"\bstdout\b|\bSTDOUT_FILENO\b|\b(?:v?printf|puts|putchar)(?:_unlocked)?\s*\(|\bd?write\s*\(\s*1\s*,")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
TOKENS = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)


def blank(match):
    """Comments and literals become spaces; line numbers stay right."""
    return re.sub(r"[^\n]", " ", match.group(0))


def blank_comment(match):
    return blank(match) if match.group(0).startswith("/") else match.group(0)


def place_of(path):
    """Room and part of a file, e.g. ("backend", "backend/cuda"); the files in src/ itself are the room "main"."""
    parts = path.parts
    if parts[0] == "kernels":
        return "backend", "kernels"
    if parts[0] == "include":
        return (parts[2], parts[2]) if len(parts) > 3 else (None, None)
    if len(parts) == 2:
        return "main", "main"
    inner = "/".join(parts[1:-1])
    return parts[1], inner


def include_fault(root, path, room, part, mark, header):
    """What is wrong with this include, or None."""
    if header.startswith("bitdelta/"):
        other = header.split("/")[1]
        if other == room or room == "main":
            return None
        if other not in LEVEL:
            return f"includes {header}, which belongs to no room"
        if other == "tools":
            return f"{room} includes {header}: only main includes tools"
        if room == "tools":
            return None if LEVEL[other] > LEVEL["tools"] else f"tools includes {header}: only model and what is below it"
        return None if LEVEL[other] > LEVEL[room] else f"{room} includes {header}: against the order of the rooms"
    for pattern, rooms in FOREIGN.items():
        if re.fullmatch(pattern, header):
            return None if part in rooms or room in rooms else f"{part} includes <{header}>: belongs to {', '.join(sorted(rooms))}"
    if mark == "<":
        return None
    home = root / ("kernels" if part == "kernels" else "src" if room == "main" else f"src/{room}")
    for base in (root / path.parent, home, root / "src", root / "kernels"):
        target = (base / header).resolve()
        if target.is_file():
            inside = target.parent == home.resolve() if room == "main" else target.is_relative_to(home.resolve())
            # The launchers' declarations are what backend/cuda and the kernels share.
            shared = room == "backend" and target.is_relative_to((root / "kernels").resolve())
            return None if inside or shared else f"{part} includes {header}, a private header of another room"
    return f"includes {header}, which is not in the room"


def call_faults(path, room, line):
    name = path.as_posix()
    if room != "config" and ENVIRONMENT.search(line):
        yield "reads the environment outside config"
    if name not in ("src/main.c", "src/base/status.c") and ENDS.search(line):
        yield "ends the process outside main.c"
    if name != "src/main.c" and room != "tools" and STDOUT.search(line):
        yield "writes to stdout outside tools and main.c"


def check_file(root, path):
    room, part = place_of(path)
    if room not in LEVEL and room != "main":
        yield 1, f"{path} lies in no room"
        return
    text = (root / path).read_text(encoding="utf-8")
    with_headers = TOKENS.sub(blank_comment, text).split("\n")
    bare = TOKENS.sub(blank, text).split("\n")
    for number, (line, code) in enumerate(zip(with_headers, bare), 1):
        include = INCLUDE.match(line)
        if include:
            fault = include_fault(root, path, room, part, *include.groups())
            if fault:
                yield number, fault
            continue
        for fault in call_faults(path, room, code):
            yield number, fault


def check_tree(root):
    faults = []
    for folder in ("src", "include", "kernels"):
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in (".c", ".h", ".cu", ".cuh", ".inc"):
                path = file.relative_to(root)
                faults += [f"{path}:{number}: {what}" for number, what in check_file(root, path)]
    return faults


# Planted files: path, text, words the report must hold (None: nothing may be reported for the file).
PLANTED = [
    ("src/base/fine.c", '#include "bitdelta/base/log.h"\n#include <xxhash.h>\n/* getenv( exit( printf( */\n'
     'const char *s = "abort() stdout";\nvoid f(void) { fprintf(stderr, "x"); snprintf(s, 1, "x"); on_exit_hook(1); }\n', None),
    ("src/main.c", '#include "bitdelta/http/server.h"\n#include "bitdelta/tools/x.h"\nint main(void) { puts("x"); exit(0); }\n', None),
    ("src/serve.c", '#include "serve.h"\n#include "bitdelta/http/server.h"\n', None),
    ("src/serve.h", "", None),
    ("src/other.c", "void f(void) { exit(1); }\n", "ends the process"),
    ("src/other2.c", 'void f(void) { puts("x"); }\n', "writes to stdout"),
    ("src/other3.c", '#include "tools/local.h"\n', "private header of another room"),
    ("src/tools/fine.c", '#include "bitdelta/model/m.h"\n#include "local.h"\nvoid f(void) { printf("x"); }\n', None),
    ("src/tools/local.h", "", None),
    ("src/backend/cuda/fine.c", '#include <cuda_runtime_api.h>\n#include "launch.h"\n', None),
    ("kernels/fine.cu", '#include <cuda_bf16.h>\n#include "launch.h"\n', None),
    ("kernels/launch.h", '#include "bitdelta/base/status.h"\n', None),
    ("src/base/status.c", "void bd_assert_failed(void) { abort(); }\n", None),
    ("src/config/fine.c", '#include <cjson/cJSON.h>\nvoid f(void) { getenv("X"); }\n', None),
    ("src/engine/upward.c", '#include "bitdelta/router/router.h"\n', "against the order"),
    ("src/delta/sideways.c", '#include "bitdelta/tokenizer/tokenizer.h"\n', "against the order"),
    ("src/pool/beside.c", '#include "bitdelta/cache/cache.h"\n', "against the order"),
    ("include/bitdelta/base/upward.h", '#  include "bitdelta/hf/tensor.h"\n', "against the order"),
    ("src/base/config.c", '#include "bitdelta/config/options.h"\n', "against the order"),
    ("src/tools/upward.c", '#include "bitdelta/engine/engine.h"\n', "only model"),
    ("src/http/tools.c", '#include "bitdelta/tools/x.h"\n', "only main includes tools"),
    ("src/hf/unknown.c", '#include "bitdelta/attic/x.h"\n', "belongs to no room"),
    ("src/attic/file.c", "\n", "lies in no room"),
    ("src/hf/private.c", '#include "../tools/local.h"\n', "private header of another room"),
    ("src/hf/private2.c", '#include "tools/local.h"\n', "private header of another room"),
    ("src/hf/missing.c", '#include "nowhere.h"\n', "not in the room"),
    ("src/engine/json.c", "#include <cJSON.h>\n", "<cJSON.h>"),
    ("src/tools/json.c", "#include <cjson/cJSON.h>\n", "<cjson/cJSON.h>"),
    ("src/openai/mhd.c", "#include <microhttpd.h>\n", "<microhttpd.h>"),
    ("src/cache/uring.c", "#include <liburing.h>\n", "<liburing.h>"),
    ("src/backend/cuda.c", "#include <cuda_runtime.h>\n", "<cuda_runtime.h>"),
    ("src/backend/cpu/cuda.c", "#include <cuda_runtime.h>\n", "<cuda_runtime.h>"),
    ("include/bitdelta/backend/cuda.h", "#include <cublas_v2.h>\n", "<cublas_v2.h>"),
    ("src/hf/pcre.c", "#include <pcre2.h>\n", "<pcre2.h>"),
    ("src/openai/utf8.c", "#include <utf8proc.h>\n", "<utf8proc.h>"),
    ("src/engine/hash.c", "#include <xxhash.h>\n", "<xxhash.h>"),
    ("src/loader/sha.c", "#include <nettle/sha2.h>\n", "<nettle/sha2.h>"),
    ("src/model/blas.c", "#include <cblas.h>\n", "<cblas.h>"),
    ("src/http/env.c", 'void f(void) { getenv ("X"); }\n', "environment"),
    ("src/base/end.c", "void f(void) { exit(1); }\n", "ends the process"),
    ("src/base/calls.c", "void f(void) { ops->abort(x); ops.exit(y); }\n", None),
    ("src/tools/end.c", "void f(void) {\n    abort();\n}\n", "src/tools/end.c:2: ends the process"),
    ("src/router/print.c", 'void f(void) { printf("x"); }\n', "writes to stdout"),
    ("src/router/put.c", "void f(void) { fputs(s, stdout); }\n", "writes to stdout"),
    ("src/router/raw.c", "void f(void) { write(STDOUT_FILENO, s, 1); }\n", "writes to stdout"),
    ("kernels/print.cu", '__global__ void k() { printf("x"); }\n', "writes to stdout"),
]


def self_test():
    """Every planted violation is found at its file, nothing else is, and an empty tree is clean."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text, _ in PLANTED:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
        faults = check_tree(root)
        for name, _, words in PLANTED:
            mine = [fault for fault in faults if fault.startswith(f"{name}:")]
            if words is None and mine:
                wrong.append(f"{name}: clean, but reported: {mine}")
            if words is not None and (len(mine) != 1 or words not in mine[0]):
                wrong.append(f"{name}: planted '{words}', reported: {mine}")
    print("\n".join(wrong) if wrong else f"self-test: {sum(1 for p in PLANTED if p[2])} planted violations found")
    return 1 if wrong else 0


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent)
    faults = check_tree(root)
    print("\n".join(faults) if faults else "rooms: no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
