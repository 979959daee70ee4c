"""What a request and a streamed token cost in front of the engine: CPU time of the server with an engine that costs nothing
(unit/fake_engine.c), against a minimal libmicrohttpd program that sends the same bytes (minimal_mhd.c).

    cmake -S . -B build-bench -DBD_BENCH=ON -DBD_CUDA=off && cmake --build build-bench --target bench_http_front bench_minimal_mhd
    python3 bench/http_front.py build-bench [request] [token] [1] [100] [2000]

CPU time is that of all threads of the server's process, as the kernel counts it; the client's is not in it, accepting the
connections is. Both servers get the same requests over the same kept connections, send the same headers and (but for ids, times and
the first and last event of a stream) the same bytes, run LOOPS threads that poll with epoll and log no requests. The server also has
bd-sched, through which every request and every token goes; the minimal program answers requests in the handler itself and has
a thread that keeps time for its streams. The same program with `hop` hands each request to one other thread and suspends the connection
until that thread resumes it, doing nothing else: what any server of this library costs at least whose answers are made elsewhere. (A
stream's events come from another thread in both.) Each figure is the median of ROUNDS runs; the servers take turns, and who begins
changes with each round."""

import os
import platform
import re
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = Path(sys.argv[1]).resolve()
KINDS = [word for word in sys.argv[2:] if not word.isdigit()] or ["request", "token"]
ROUNDS = int(os.environ.get("ROUNDS", "5"))
LOOPS = os.environ.get("LOOPS", "1")
# connections: requests of each in the run of whole answers; tokens of each stream and microseconds between them
LOADS = {1: (3000, 1000, 2000), 100: (60, 100, 20_000), 2000: (5, 20, 400_000)}
LOADS = {count: load for count, load in LOADS.items() if str(count) in sys.argv[2:]} or LOADS


def request(stream, tokens):
    body = b'{"model":"zen-mini","prompt":"Once upon a time","max_tokens":%d,"ignore_eos":true,"temperature":0%s}' % (
        tokens, b',"stream":true' if stream else b"")
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def cpu_us(pid):
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1000


def start_ours(step_us):
    environment = os.environ | {"BD_FAKE_STEP_US": str(step_us)}
    process = subprocess.Popen([BUILD / "bench_http_front", "serve", "--base", "demo/zen-mini", "--listen", "127.0.0.1:0", "--admin", "none",
                                "--backend", "cpu", "--max-seqs", "4096", "--max-batch-tokens", "4096", "--max-queue", "8192", "--kv-tokens", "4096",
                                "--max-connections", "8192", "--http-threads", LOOPS],
                               cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    port = None
    for line in process.stderr:
        if found := re.search(r"mod=http listening address=\S*:(\d+)", line):
            port = int(found.group(1))
        if "mod=serve ready" in line:
            return process, port
    sys.exit("the server did not start")


def start_minimal(files, tokens, step_us, *hop):
    process = subprocess.Popen([BUILD / "bench_minimal_mhd", *files, str(tokens), str(step_us), LOOPS, *hop], stdout=subprocess.PIPE, text=True)
    return process, int(process.stdout.readline())


def drive(port, connections, each, data, end):
    """Every connection sends its next request when an answer's end has come; returns the bytes of all answers."""
    selector, got = selectors.DefaultSelector(), 0
    raws = []
    for _ in range(connections):
        raw = socket.create_connection(("127.0.0.1", port))
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(raw, selectors.EVENT_READ, [each, b""])
        raws.append(raw)
    for raw in raws:
        raw.sendall(data)
    open_count = connections
    while open_count:
        for key, _ in selector.select(30):
            raw, state = key.fileobj, key.data
            piece = raw.recv(65536)
            if not piece:
                sys.exit(f"an answer broke off: {state[1]!r}")
            got += len(piece)
            state[1] = (state[1] + piece)[-len(end):]
            if state[1] != end:
                continue
            state[:] = [state[0] - 1, b""]
            if state[0]:
                raw.sendall(data)
            else:
                selector.unregister(raw)
                open_count -= 1
    for raw in raws:
        raw.close()
    return got


def measure(process, port, connections, each, data, end, units):
    drive(port, 1, 3, data, end)
    before = cpu_us(process.pid)
    got = drive(port, connections, each, data, end)
    return (cpu_us(process.pid) - before) / units, got


def capture(port, stream, tokens):
    """The bytes of one answer's payload: the reply, or an event from the middle of a stream."""
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(request(stream, tokens))
        data = b""
        while not data.endswith(b"0\r\n\r\n" if stream else b"}"):
            data += raw.recv(65536)
    head, body = data.split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 200"), data
    return body.split(b"\r\n")[3] if stream else body


def main():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 10_000), hard))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    print(f"command: ROUNDS={ROUNDS} LOOPS={LOOPS} python3 bench/http_front.py BUILD {' '.join(sys.argv[2:])}")
    print(f"machine: {model.group(1) if model else platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, client on the same cores")
    print(f"commit: {commit}, {time.strftime('%Y-%m-%d')}")
    print(f"CPU microseconds, median of {ROUNDS} (least .. most)\n")
    print(f"{'connections':>11} {'per':>8} {'ours':>24} {'minimal':>24} {'ratio':>6} {'minimal with hop':>24} {'ratio':>6} {'bytes':>6}")
    worst = 0
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch) / name for name in ("reply", "event", "done")]
        ours, port = start_ours(0)
        files[0].write_bytes(capture(port, False, 1))
        files[1].write_bytes(capture(port, True, 4))
        files[2].write_bytes(b"data: [DONE]\n\n")
        ours.terminate()
        ours.wait()
        for connections, (each, tokens, step_us) in LOADS.items():
            for per in KINDS:
                stream = per == "token"
                data, end = request(stream, tokens if stream else 1), b"0\r\n\r\n" if stream else files[0].read_bytes()[-20:]
                count, units = (1, connections * tokens) if stream else (each, connections * each)
                begin = {"ours": lambda: start_ours(step_us if stream else 0),
                         "minimal": lambda: start_minimal(files, tokens, step_us if stream else 0),
                         "hop": lambda: start_minimal(files, tokens, step_us if stream else 0, "hop")}
                results, got = {name: [] for name in begin}, {}
                for n in range(ROUNDS):
                    for name in list(begin)[::-1 if n % 2 else 1]:
                        process, port = begin[name]()
                        value, got[name] = measure(process, port, connections, count, data, end, units)
                        results[name].append(value)
                        process.terminate()
                        process.wait()
                middle = {name: statistics.median(values) for name, values in results.items()}
                cells = [f"{middle[name]:.1f} ({min(v):.1f} .. {max(v):.1f})" for name, v in results.items()]
                ratio, over_hop = middle["ours"] / middle["minimal"], middle["ours"] / middle["hop"]
                worst = max(worst, ratio)
                print(f"{connections:>11} {per:>8} {cells[0]:>24} {cells[1]:>24} {ratio:>6.2f} {cells[2]:>24} {over_hop:>6.2f} "
                      f"{got['ours'] / got['minimal']:>6.3f}", flush=True)
    print("\nbytes: those that the client got of the server, over those of the minimal program")
    print(f"the largest ratio is {worst:.2f}; the aim is 2")


main()
