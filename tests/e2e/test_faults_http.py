"""Clients that leave in every state, floods, and bodies of every kind of excess: afterwards the server holds what it held before."""

import json
import random
import re
import resource
import socket
import struct
import time

import pytest
import requests
from conftest import MODELS, eventually
from raw_http import Reader, request
from variants_support import SHARD, copy_variant, golden_body, goldens

GAUGES = ["bd_http_connections", "bd_http_requests_active", "bd_http_upload_bytes", "vllm:num_requests_running",
          "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"]
LONG = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


def held(server):
    """What requests hold: by /metrics, and by the cache's own list of variants. The one connection is that of this question."""
    text = server.get("/metrics").text
    values = {}
    for name in GAUGES:
        samples = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.M)
        assert samples, name
        values[name] = sum(map(float, samples))
    listed = requests.get(server.admin_url + "/admin/variants", timeout=60).json()["variants"]
    return values | {"leases": sum(v["references"] for v in listed), "waiters": sum(v["waiters"] for v in listed),
                     "retired": sum(v["retired"] for v in listed)}


NOTHING = dict.fromkeys(GAUGES, 0.0) | {"bd_http_connections": 1.0, "leases": 0, "waiters": 0, "retired": 0}


def nothing_left(server, seconds=20):
    end = time.monotonic() + seconds
    while (now := held(server)) != NOTHING:
        assert time.monotonic() < end, {k: v for k, v in now.items() if v != NOTHING[k]}
        time.sleep(0.02)


@pytest.fixture(scope="module")
def small():
    """Two slots for all variants and four sequences, so that requests wait for everything there is to wait for."""
    from conftest import start_server
    running = start_server("--slots", "2", "--max-seqs", "4", "--request-header-seconds", "2")
    yield running
    assert running.stop() == 0, "\n".join(running.lines[-40:])
    assert not [line for line in running.lines if "Sanitizer" in line or "level=error" in line]


def still_right(server):
    for model in (MODELS[0], MODELS[3]):
        ids, want = goldens(model)[0]
        answer = server.post("/v1/completions", golden_body(model, ids, 6))
        assert answer.json()["choices"][0]["token_ids"] == want[:6], answer.text
    nothing_left(server)


def leave(raw, how):
    if how == "reset":
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "half-close":
        raw.shutdown(socket.SHUT_WR)
    else:
        raw.close()


# What is sent on each connection, and what shows that they are in the state.
STATES = {
    "queued": ([LONG | {"n": 2}] * 8, lambda now: now["vllm:num_requests_waiting"] >= 4),
    "queued with a lease": ([LONG | {"n": 2}] * 4 + [LONG | {"model": m} for m in MODELS[1:3]] * 2,
                            lambda now: now["vllm:num_requests_waiting"] >= 4 and now["leases"] > 0 and now["waiters"] == 0),
    "loading": ([LONG | {"model": m, "max_tokens": 500} for m in MODELS[1:]], lambda now: now["leases"] + now["waiters"] > 0),
    "prefill": ([LONG | {"prompt": [5 + i] + list(range(10, 1900)), "max_tokens": 8} for i in range(6)], lambda now: now["vllm:num_requests_running"] > 0),
    "prompt logprobs": ([LONG | {"prompt": list(range(10, 1500)), "max_tokens": 1, "prompt_logprobs": 5, "echo": True, "logprobs": 5}] * 3,
                        lambda now: now["vllm:num_requests_running"] > 0),
    "decode": ([LONG] * 4, lambda now: now["vllm:kv_cache_usage_perc"] > 0),
    "streaming": ([LONG | {"stream": True, "n": 2}] * 2, lambda now: now["vllm:kv_cache_usage_perc"] > 0),
    "streaming variants": ([LONG | {"stream": True, "model": m} for m in MODELS[4:8]], lambda now: now["leases"] > 0),
}


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("state", STATES)
def test_gone_in_every_state(small, state, how):
    bodies, reached = STATES[state]
    raws = [small.connect() for _ in bodies]
    for raw, body in zip(raws, bodies):
        raw.sendall(request(body=body))
    eventually(lambda: reached(held(small)), what=state)
    for raw in raws:
        leave(raw, how)
    nothing_left(small)
    for raw in raws:
        raw.close()
    still_right(small)


def test_gone_at_any_byte(small):
    """Every request is cut at a place of chance, in every way, while others are served."""
    seed = time.time_ns()
    print("seed", seed)
    rng = random.Random(seed)
    whole = [request(body=LONG | {"max_tokens": 20, "model": m, "stream": s}) for m in MODELS[:5] for s in (True, False)]
    whole.append(request("POST", "/tokenize", body={"prompt": "a" * 200_000}))
    half_closed = []
    for i in range(150):
        raw = small.connect()
        data = whole[i % len(whole)]
        raw.sendall(data[:rng.randrange(len(data) + 1)])
        if rng.random() < 0.3:
            raw.settimeout(rng.random() * 0.02)
            try:
                raw.recv(rng.randrange(1, 400))
            except TimeoutError:
                pass
        leave(raw, rng.choice(["close", "reset", "half-close"]))
        half_closed.append(raw)
    for raw in half_closed:
        raw.close()
    still_right(small)


def test_the_gone_leave_no_memory(small):
    """Every request that is left holds about 250 KB of prepared choices and biases: hundreds of them, waiting and streaming, leave none of it."""
    many = LONG | {"n": 120, "logit_bias": {str(i): 1 for i in range(3000)}}

    def leave_some(count):
        for i in range(count):
            raws = [small.connect() for _ in range(4)]
            for raw in raws:
                raw.sendall(request(body=many | {"stream": i % 2 == 0}))
            eventually(lambda: held(small)["vllm:num_requests_waiting"] >= 400, what="queue")
            for raw in raws:
                raw.close()
            eventually(lambda: held(small)["bd_http_requests_active"] == 0, what="end of the requests")

    leave_some(10)
    before = small.resident_bytes()
    leave_some(60)
    nothing_left(small)
    assert small.resident_bytes() - before < 30 << 20


@pytest.mark.parametrize("where", ["head", "body"])
def test_a_crowd_that_drips(small, where):
    """Slow senders take nothing from others. Those of heads are cut at the deadline, those of bodies here leave."""
    whole = request(body=LONG, headers=["X: " + "y" * 300])
    sent = 20 if where == "head" else whole.index(b"\r\n\r\n") + 6
    raws = [small.connect() for _ in range(200)]
    for raw in raws:
        raw.sendall(whole[:sent])
    closed = 0
    for turn in range(5):
        for raw in raws:
            try:
                raw.sendall(whole[sent + turn:sent + turn + 1])
            except OSError:
                closed += 1
        assert small.complete("b", max_tokens=2)["usage"]["completion_tokens"] == 2
    if where == "head":
        for raw in raws:
            assert Reader(raw).at_end()
    for raw in raws:
        raw.close()
    still_right(small)


def test_ten_thousand_idle_connections(launch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, hard - 600)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 300), hard))
    print(count, "connections")
    server = launch("--max-connections", str(count + 100))
    nothing_left(server)
    before = server.resident_bytes()
    raws = []
    try:
        for i in range(count):
            raws.append(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            if i % 3 == 0:
                raws[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
        eventually(lambda: held(server)["bd_http_connections"] == count + 1, seconds=60, what="all connections")
        grown = server.resident_bytes() - before
        assert grown < count * (40 << 10), grown
        ids, want = goldens(MODELS[2])[0]
        for _ in range(5):
            answer = server.post("/v1/completions", golden_body(MODELS[2], ids, 6))
            assert answer.json()["choices"][0]["token_ids"] == want[:6]
    finally:
        for raw in raws:
            raw.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    nothing_left(server, seconds=60)


def test_a_gigabyte(small):
    before = small.resident_bytes()
    raw = small.connect()
    raw.sendall(request(headers=[f"Content-Length: {1 << 30}"]) + b"{" * 1000)
    reader = Reader(raw)
    assert reader.answer().status == 413 and reader.at_end()
    raw = small.connect()
    raw.sendall(request(headers=["Transfer-Encoding: chunked"]))
    piece, sent = b"100000\r\n" + b" " * (1 << 20) + b"\r\n", 0
    try:
        while sent < 1 << 30:
            raw.sendall(piece)
            sent += 1 << 20
    except OSError:
        pass
    assert sent < 200 << 20, "the server took it all"
    raw.close()
    nothing_left(small)
    assert small.resident_bytes() - before < 96 << 20


DEEP = 100_000
BODIES = {
    "deep arrays": b'{"prompt":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep objects": b'{"messages":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    "unclosed": b"[" * DEEP,
    "deep and chatty": b'{"messages":[{"role":"user","content":' + b"[" * DEEP + b"]" * DEEP + b"}]}",
    "a million members": b"{" + b",".join(b'"a%d":1' % i for i in range(1_000_000)) + b"}",
    "a number of a million digits": b'{"prompt":"a","max_tokens":' + b"1" * 1_000_000 + b"}",
    "escapes": b'{"prompt":"' + b"\\u00e9" * 500_000 + b'"}',
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("name", BODIES)
def test_bodies_of_excess(small, name, path):
    answer = requests.post(small.url + path, data=BODIES[name], headers={"Content-Type": "application/json", "Connection": "close"}, timeout=60)
    if (name, path) == ("escapes", "/tokenize"):
        assert answer.status_code == 200 and answer.json()["count"] > 1000
    else:
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error", answer.text[:500]
    nothing_left(small)


@pytest.mark.parametrize("prompt", [b'"' + b"a b " * (8 << 20) + b'"', b'"' + b"x" * (32 << 20) + b'"', b"[" + b"1," * (16 << 20) + b"1]", b"[[1]" + b",[1]" * (8 << 20) + b"]"],
                         ids=["words", "one word", "ids", "prompts"])
def test_prompts_of_32_megabytes(small, prompt):
    body = b'{"max_tokens":1,"prompt":' + prompt[:(32 << 20) - 100] + prompt[-1:] + b"}"
    if prompt.startswith(b"[["):
        body = body[:body.rindex(b",")] + b"]}"
    before = small.resident_bytes()
    answer = requests.post(small.url + "/v1/completions", data=body, headers={"Connection": "close"}, timeout=120)
    assert answer.status_code == 400, answer.text[:500]
    nothing_left(small)
    assert small.resident_bytes() - before < 256 << 20
    still_right(small)


HIDDEN = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = request(headers=["Transfer-Encoding: chunked"])
FRAMING = {
    "length with a sign": request(headers=["Content-Length: +5"]) + b"{   }",
    "lengths in one line": request(headers=["Content-Length: 5, 5"]) + b"{   }",
    "length in hex": request(headers=["Content-Length: 0x5"]) + b"{   }",
    "folded length": request(headers=["Content-Length: 5\r\n 0"]) + b"{   }",
    "encoding after a bare LF": request(headers=["X: a\nTransfer-Encoding: chunked", "Content-Length: 5"]) + b"0\r\n\r\n",
    "encoding after a bare CR": request(headers=["Content-Length: 5", "X: a\rTransfer-Encoding: chunked"]) + b"0\r\n\r\n",
    "space before the encoding's colon": request(headers=["Content-Length: 5", "Transfer-Encoding : chunked"]) + b"0\r\n\r\n",
    "vertical tab": request(headers=["Content-Length: 5", "Transfer-Encoding: \x0bchunked"]) + b"0\r\n\r\n",
    "chunked, identity": request(headers=["Transfer-Encoding: chunked, identity"]) + b"0\r\n\r\n",
    "identity and chunked": request(headers=["Transfer-Encoding: identity", "Transfer-Encoding: chunked"]) + b"0\r\n\r\n",
    "folded encoding": request(headers=["Transfer-Encoding: chunked\r\n , gzip"]) + b"0\r\n\r\n",
    "quoted encoding": request(headers=['Transfer-Encoding: "chunked"']) + b"0\r\n\r\n",
    "chunk of 2^64 + 5": CHUNKED + b"10000000000000005\r\n{   }\r\n0\r\n\r\n",
    "chunk in 0x": CHUNKED + b"0x5\r\n{   }\r\n0\r\n\r\n",
    "chunk with a sign": CHUNKED + b"+5\r\n{   }\r\n0\r\n\r\n",
    "negative chunk": CHUNKED + b"-5\r\n{   }\r\n0\r\n\r\n",
    "chunk without an end": CHUNKED + b"5\r\n{   }garbage\r\n0\r\n\r\n",
    "chunk of nothing": CHUNKED + b"\r\n{   }\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("name", FRAMING)
def test_framing_that_proxies_may_read_otherwise(small, name):
    """Refused or cut; what follows is never taken for a request."""
    raw = small.connect()
    raw.sendall(FRAMING[name] + HIDDEN)
    raw.shutdown(socket.SHUT_WR)
    seen = b""
    try:
        while piece := raw.recv(65536):
            seen += piece
    except ConnectionResetError:
        pass
    raw.close()
    assert b'{"version"' not in seen, seen
    assert seen == b"" or seen.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 ")), seen
    nothing_left(small)


def test_pipelines_of_the_impatient(small):
    """A hundred requests in one send, the client gone after the first answers."""
    data = b"".join(request(body=LONG | {"max_tokens": 3, "model": MODELS[i % 4], "stream": i % 2 == 0}) for i in range(100))
    for how in ("close", "reset", "half-close"):
        raw = small.connect()
        raw.sendall(data)
        reader = Reader(raw)
        assert [reader.answer().status for _ in range(4)] == [200] * 4
        leave(raw, how)
        nothing_left(small)
        raw.close()
    raw = small.connect()
    raw.sendall(data[:len(data) // 2])
    reader = Reader(raw)
    raw.sendall(data[len(data) // 2:])
    assert [reader.answer().status for _ in range(100)] == [200] * 100
    raw.close()
    still_right(small)


def test_a_refused_stream_keeps_its_connection(launch, tmp_path):
    """A whole answer that says why, so the next request on the connection has its own."""
    for name in MODELS[1:3]:
        copy_variant(name, tmp_path / name)
    data = bytearray((tmp_path / MODELS[1] / SHARD).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / MODELS[1] / SHARD).write_bytes(data)
    server = launch(deltas=str(tmp_path))
    raw = server.connect()
    raw.sendall(b"".join(request(body=LONG | {"model": m, "stream": True, "max_tokens": 3}) for m in (MODELS[1], MODELS[2], MODELS[1])) + request("GET", "/version"))
    reader = Reader(raw)
    assert [reader.answer().status for _ in range(4)] == [503, 200, 503, 200]
    raw.close()
    nothing_left(server)
