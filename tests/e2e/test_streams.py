"""Many streams at once over every variant: complete, in order, equal to the answers that were not streamed; threads and memory
do not grow with connections or with time. Nothing is timed."""

import contextlib
import selectors
import socket
import subprocess
import time
from pathlib import Path

import pytest
import requests
from conftest import BINARY, MODELS, ROOT, VARIANTS, events_of, eventually
from raw_http import Reader, request

STREAMS = 200
TOKENS = 16


def prompt_of(number):
    words = "The old sea def main SELECT name FROM Die Stadt La ville Это был city of light if x return".split()
    return " ".join(words[(number * 5 + k * 3) % len(words)] for k in range(1 + number % 4))


def run_streams(server, bodies):
    """All bodies at once on plain sockets; returns each answer's bytes."""
    selector = selectors.DefaultSelector()
    answers = [b""] * len(bodies)
    for i, body in enumerate(bodies):
        raw = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        raw.sendall(request(body=body, headers=["Connection: close"]))
        raw.setblocking(False)
        selector.register(raw, selectors.EVENT_READ, i)
    end, peak = time.monotonic() + 300, 0
    while selector.get_map():
        assert time.monotonic() < end, f"{len(selector.get_map())} streams did not end"
        peak = max(peak, server.threads())
        for key, _ in selector.select(1):
            piece = key.fileobj.recv(65536)
            answers[key.data] += piece
            if not piece:
                selector.unregister(key.fileobj)
                key.fileobj.close()
    return answers, peak


def body_of(answer):
    """The payload of a chunked answer, each chunk checked to be one whole event."""
    head, rest = answer.split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 200"), answer[:500]
    payload = b""
    while True:
        size, rest = rest.split(b"\r\n", 1)
        count = int(size, 16)
        chunk, rest = rest[:count], rest[count + 2:]
        if count == 0:
            assert rest == b""
            return payload
        assert chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") and chunk.count(b"\n") == 2
        payload += chunk


@pytest.fixture(scope="module")
def bodies():
    return [{"model": MODELS[i % len(MODELS)], "prompt": prompt_of(i), "max_tokens": TOKENS, "temperature": 0, "stream": True,
             "ignore_eos": True, "return_token_ids": True, "stream_options": {"include_usage": True}} for i in range(STREAMS)]


def test_two_hundred_streams(launch, bodies):
    server = launch()
    idle_threads = server.threads()
    whole = {}
    for body in bodies:
        key = (body["model"], body["prompt"])
        if key not in whole:
            fields = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
            whole[key] = server.post("/v1/completions", fields).json()
    answers, peak = run_streams(server, bodies)
    assert peak <= idle_threads, "threads grew with connections"
    ids = set()
    for body, answer in zip(bodies, answers):
        events = events_of(body_of(answer))
        expected = whole[body["model"], body["prompt"]]
        assert events.pop()["usage"] == expected["usage"]
        assert len(events) == TOKENS and len({e["id"] for e in events}) == 1
        ids.add(events[0]["id"])
        assert [e["choices"][0]["finish_reason"] for e in events] == [None] * (TOKENS - 1) + ["length"]
        assert "".join(e["choices"][0]["text"] for e in events) == expected["choices"][0]["text"]
        assert sum((e["choices"][0]["token_ids"] for e in events), []) == expected["choices"][0]["token_ids"]
    assert len(ids) == STREAMS

    # The same again and again: memory settles.
    sizes = []
    for _ in range(5):
        run_streams(server, bodies)
        sizes.append(server.resident_bytes())
    assert max(sizes[2:]) - sizes[1] < 16 << 20, [s >> 20 for s in sizes]
    eventually(lambda: server.metric("bd_http_requests_active") == 0, what="no active request")
    assert server.metric("bd_http_upload_bytes") < 1 << 20


def test_many_idle_and_queued_connections(launch):
    """A thousand connections, most of them silent: the others are served, and no thread or descriptor is left behind."""
    server = launch("--max-connections", "3000", "--http-threads", "3")
    threads = server.threads()
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(1000)]
    eventually(lambda: server.metric("bd_http_connections") >= 1000, what="open connections")
    bodies = [{"prompt": prompt_of(i), "max_tokens": 4, "stream": i % 2 == 0} for i in range(100)]
    answers, peak = run_streams(server, bodies)
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers) and peak <= threads
    for raw in silent:
        raw.close()
    eventually(lambda: server.metric("bd_http_connections") <= 2, what="closed connections")


def test_connection_limit(launch):
    server = launch("--max-connections", "20")
    held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
    eventually(lambda: server.metric("bd_http_connections") >= 20 if server.get("/metrics").status_code == 200 else True, what="connections")
    answer = server.get("/v1/models")
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "rate_limit_exceeded" and answer.headers["retry-after"]
    assert server.get("/health").status_code == 200
    for raw in held:
        raw.close()
    eventually(lambda: server.get("/v1/models").status_code == 200, what="room again")


def test_who_came_first_is_served(launch):
    """Connections beyond the limit are refused, not those that were there before them; /health is answered and closes; a refused client
    that asks again when there is room is served."""
    server = launch("--max-connections", "4")

    def ask(raw, target="/v1/models"):
        raw.sendall(request("GET", target))
        return raw.recv(65536)

    def dial():
        return socket.create_connection(("127.0.0.1", server.port), timeout=20)

    server.session.close()
    eventually(lambda: admin_metric(server, "bd_http_connections") == 0, what="no connection")
    first = [dial() for _ in range(4)]
    assert all(ask(raw).startswith(b"HTTP/1.1 200") for raw in first)
    late = [dial() for _ in range(3)]  # silent: closed in two seconds
    assert all(ask(raw).startswith(b"HTTP/1.1 200") for raw in first)
    health = ask(dial(), "/health")
    assert health.startswith(b"HTTP/1.1 200") and b"connection: close" in health.lower()
    assert ask(dial()).startswith(b"HTTP/1.1 429")
    assert all(ask(raw).startswith(b"HTTP/1.1 200") for raw in first)
    for attempt in range(10):  # one that came too late has a place when others have gone, if that is within the two seconds
        waiting, held = dial(), len(first)
        eventually(lambda: admin_metric(server, "bd_http_connections") > held, what="one more connection")
        first.pop().close()
        eventually(lambda: admin_metric(server, "bd_http_connections") <= held, what="one connection less")
        with contextlib.suppress(ConnectionError):
            if answer := ask(waiting):
                break
        first.append(dial())
        assert ask(first[-1]).startswith(b"HTTP/1.1 200")
    assert answer.startswith(b"HTTP/1.1 200")
    for raw in first + late:
        raw.close()


def admin_metric(server, name, **labels):
    """As server.metric, without a connection to the listener that is full."""
    wanted = name + ("{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}" if labels else "")
    lines = requests.get(server.admin_url + "/metrics", timeout=60).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.rsplit(" ", 1)[0] == wanted)


def descriptors(server):
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def test_silent_connections_beyond_the_limit(launch):
    """Those just beyond it are closed soon, those far beyond unread; a request that comes in time gets 429. Nothing is left of any."""
    server = launch("--max-connections", "3", "--request-header-seconds", "3600")

    def dial(count):
        return [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(count)]

    eventually(lambda: admin_metric(server, "bd_http_connections") == 0, what="no connection")
    before = descriptors(server)
    held = dial(3)
    eventually(lambda: admin_metric(server, "bd_http_connections") == 3, what="a full server")
    (late,) = dial(1)
    late.sendall(request("GET", "/v1/models"))
    assert late.recv(100).startswith(b"HTTP/1.1 429")
    late.close()
    eventually(lambda: admin_metric(server, "bd_http_connections") == 3, what="a full server")
    silent = dial(197)
    assert requests.get(server.admin_url + "/health", timeout=60).status_code == 200
    for raw in silent:
        assert raw.recv(100) == b""
        raw.close()
    eventually(lambda: admin_metric(server, "bd_http_connections") == 3, what="a full server")
    assert sum(admin_metric(server, "bd_http_limited_total", limit=limit) for limit in ("connections", "header_seconds")) == 198
    for raw in held:
        raw.close()
    # The admin listener has a limit of its own, where silence may last an hour.
    held = [socket.create_connection(("127.0.0.1", server.admin_port), timeout=60) for _ in range(200)]
    for raw in held[64:]:
        assert raw.recv(100) == b""
    for raw in held:
        raw.close()
    eventually(lambda: server.get("/v1/models").status_code == 200, what="room again")
    server.session.close()
    eventually(lambda: descriptors(server) <= before, what="no descriptor left")


@pytest.mark.parametrize("limit", [64, 160, 500])
def test_few_open_files(launch, limit):
    """However few the process may open: with as many silent clients of both listeners as they will hold, /health answers at once, files of
    variants can be read, and whoever comes on top of that is told or closed, not left waiting."""
    server = launch("--request-header-seconds", "3600", "--http-threads", "2", under=("sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh"))
    line = rf"open file limit {limit}: connections_max lowered to (\d+), (\d+) more for refusals, (\d+) for the admin listener, (\d+) kept"
    most, excess, admin, kept = map(int, server.find(line).groups())
    assert most + excess + admin + kept == limit and most > limit // 8

    def dial(count, port):
        return [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(count)]

    def ask(raw, sent):
        raw.sendall(sent)
        answer = Reader(raw).answer()
        assert answer.status == 200
        return answer.body.decode()

    def full():
        return f"\nbd_http_connections {most}\n" in ask(orders, request("GET", "/metrics", host="127.0.0.1"))

    early = server.connect()
    (orders,) = dial(1, server.admin_port)
    held = dial(most - 1, server.port) + dial(admin - 1, server.admin_port)
    for wave in range(3):
        eventually(full, what="a full server")
        late = dial(2 * excess + 8, server.port) + dial(8, server.admin_port)
        ask(early, request("GET", "/health"))
        ask(orders, request("POST", f"/admin/variants/{VARIANTS[wave]}/load", host="127.0.0.1"))
        for raw in late:
            assert raw.recv(100) == b""  # at once, or after the two seconds of those that get an answer when they ask
            raw.close()
        eventually(full, what="a full server")
        (raw,) = dial(1, server.port)
        ask(raw, request("GET", "/health"))
        raw.close()
    for raw in (early, orders, *held):
        raw.close()
    eventually(lambda: server.get("/v1/models").status_code == 200, what="room again")


def test_too_few_open_files():
    done = subprocess.run(["sh", "-c", 'ulimit -n 30; exec "$@"', "sh", BINARY, "serve", "--base", "demo/zen-mini", "--listen", "127.0.0.1:0", "--admin", "none",
                           "--backend", "cpu"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "the limit of 30 open files" in done.stderr, done.stderr


def test_streams_that_are_broken_off(launch, bodies):
    """Half of the clients leave after the first bytes; the others get everything."""
    server = launch("--http-threads", "3")
    leaving = []
    for i, body in enumerate(bodies[:60]):
        raw = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        raw.sendall(request(body=body | {"max_tokens": 1000, "model": MODELS[i % 6]}))
        leaving.append(raw)
    for raw in leaving[:30]:
        raw.recv(10)
    for raw in leaving:
        raw.close()
    answers, _ = run_streams(server, bodies[60:120])
    for answer in answers:
        assert len(events_of(body_of(answer))) == TOKENS + 1
    eventually(lambda: server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") == 0, what="idle server")
