"""The bytes of HTTP/1.1: framing, pipelining, chunks, Expect, slow and vanishing clients."""

import json
import random
import re
import socket
import struct
import time

import pytest
from conftest import eventually, start_server
from raw_http import Reader, chunked, request

BODY = json.dumps({"prompt": "a", "max_tokens": 2, "temperature": 0}).encode()
HIDDEN = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


def exchange(server, data):
    raw = server.connect()
    raw.sendall(data)
    return Reader(raw)


SMUGGLING = {
    "two lengths": request("POST", headers=["Content-Length: 29", "Content-Length: 5"]) + BODY[:29] + HIDDEN,
    "equal lengths": request("POST", headers=["Content-Length: 5", "Content-Length: 5"]) + b"{   }" + HIDDEN,
    "length and chunks": request("POST", headers=["Content-Length: 5", "Transfer-Encoding: chunked"]) + b"0\r\n\r\n" + HIDDEN,
    "xchunked": request("POST", headers=["Transfer-Encoding: xchunked"]) + b"0\r\n\r\n" + HIDDEN,
    "gzip, chunked": request("POST", headers=["Transfer-Encoding: gzip, chunked"]) + b"0\r\n\r\n" + HIDDEN,
    "chunked twice": request("POST", headers=["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"]) + b"0\r\n\r\n" + HIDDEN,
    "identity": request("POST", headers=["Transfer-Encoding: identity", "Content-Length: 2"]) + b"{}" + HIDDEN,
    "chunks in 1.0": request("POST", headers=["Transfer-Encoding: chunked"], version="1.0") + b"0\r\n\r\n" + HIDDEN,
    "space before colon": request("POST", headers=["Content-Length : 5"]) + b"{   }" + HIDDEN,
    "two hosts": request("GET", "/version", headers=["Host: y"]) + HIDDEN,
    "tab in name": request("GET", "/version", headers=["X\tY: 1"]) + HIDDEN,
}


@pytest.mark.parametrize("name", SMUGGLING)
def test_no_second_request_is_smuggled(server, name):
    reader = exchange(server, SMUGGLING[name])
    answer = reader.answer()
    assert answer.status == 400, (answer.status, answer.body)
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert "x-request-id" in answer.headers and answer.headers.get("connection", "").lower() == "close"
    assert reader.at_end(), reader.rest


BROKEN = {
    "no host": (request("GET", "/version", host=None), 400),
    "no host, 1.2": (request("GET", "/version", host=None, version="1.2"), 400),
    "blank in the target": (request("GET", "/version?a b"), 400),
    "length x": (request("POST", headers=["Content-Length: x"]), 400),
    "length -5": (request("POST", headers=["Content-Length: -5"]), 400),
    "length +5": (request("POST", headers=["Content-Length: +5"]) + b"{   }", 400),
    "length 5x": (request("POST", headers=["Content-Length: 5x"]) + b"{   }", 400),
    "no length": (request("POST", headers=["Content-Length:"]), 400),
    "length of a get": (request("GET", "/version", headers=["Content-Length: 0x0"]), 400),
    "length beyond 64 bits": (request("POST", headers=["Content-Length: 99999999999999999999999"]), 413),
}


def one_answer(reader, status):
    """Its x-request-id; there is one, in the API's own form, and the end."""
    answer = reader.answer()
    assert answer.status == status and answer.json["error"]["type"] == "invalid_request_error"
    assert answer.headers["content-type"] == "application/json" and answer.headers["connection"].lower() == "close"
    assert reader.at_end(), reader.rest
    return answer.headers["x-request-id"]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_head_is_answered_once(server, name):
    data, status = BROKEN[name]
    assert one_answer(exchange(server, data + HIDDEN), status)
    before = server.metric("bd_http_requests_total", code=str(status))
    assert one_answer(exchange(server, data + HIDDEN), status)
    assert server.metric("bd_http_requests_total", code=str(status)) == before + 1
    # In the middle of others, one of which is not through with its own head.
    beside = server.connect()
    beside.sendall(b"GET /version HTTP/1.1\r\n")
    reader = exchange(server, request("GET", "/version") + data.replace(b"\r\n", b"\r\nX-Request-Id: mine\r\n", 1))
    assert reader.answer().status == 200
    assert one_answer(reader, status) == "mine"
    beside.sendall(b"Host: x\r\n\r\n")
    assert Reader(beside).answer().status == 200


@pytest.mark.parametrize("data", [
    b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET /version HTTP/9.9\r\n\r\n", b"\0" * 100,
    request("GET", "/" + "x" * 40_000), request("GET", "/version", headers=["X: " + "y" * 40_000]),
    request("GET", "/version", headers=[f"X{i}: y" for i in range(2000)]),
])
def test_hostile_heads_close(server, data):
    raw = server.connect(seconds=20 if b"\n" in data else 0.5)
    seen = b""
    try:
        raw.sendall(data)
        while piece := raw.recv(65536):
            seen += piece
    except TimeoutError:  # not even a whole head: its deadline will close it
        assert b"\n" not in data
    except OSError:
        pass
    raw.close()
    assert not seen or seen.split(b" ")[1][:1] == b"4" or seen.split(b" ")[1] == b"505"
    assert server.get("/health").status_code == 200


def test_one_point_zero(server):
    reader = exchange(server, request("GET", "/version", host=None, version="1.0"))
    answer = reader.answer()
    assert answer.status == 200 and reader.at_end()
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 3}).encode()
    answer = exchange(server, request(body=body, version="1.0")).answer()
    assert answer.status == 200 and "transfer-encoding" not in answer.headers and answer.body.endswith(b"data: [DONE]\n\n")


def test_pipelining(server):
    wanted = [request("GET", "/version"), request(body=BODY), request("GET", "/nope"), request(body=b"{}"), request("GET", "/v1/models")] * 3
    reader = exchange(server, b"".join(wanted))
    assert [reader.answer().status for _ in wanted] == [200, 200, 404, 400, 200] * 3


def test_requests_wait_behind_a_stream(server):
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 20, "ignore_eos": True}).encode()
    reader = exchange(server, request(body=body) + request("GET", "/version"))
    assert reader.answer().body.count(b"data: ") == 21
    assert reader.answer().status == 200


def test_keep_alive(server):
    raw = server.connect()
    reader = Reader(raw)
    for data, status in [(request("GET", "/health"), 200), (request(body=b"[]"), 400), (request("GET", "/nope"), 404),
                         (request("PUT", "/health"), 405), (request(body=BODY), 200),
                         (request(body=BODY, headers=["Content-Type: text/plain"]), 415),
                         (request(body=b'{"prompt":"a","stream":true,"max_tokens":2}'), 200), (request("GET", "/health"), 200)]:
        raw.sendall(data)
        answer = reader.answer()
        assert answer.status == status and answer.headers.get("connection", "").lower() != "close", data
    raw.sendall(request("GET", "/health", headers=["Connection: close"]))
    assert reader.answer().status == 200 and reader.at_end()


def test_get_with_a_body(server):
    reader = exchange(server, request("GET", "/version", body=b"x" * 50_000) + request("GET", "/health"))
    assert [reader.answer().status for _ in range(2)] == [200, 200]


def test_chunked_bodies(server):
    head = request(headers=["Transfer-Encoding: chunked", "Content-Type: application/json"])
    rng = random.Random(5)
    for _ in range(10):
        cuts = sorted(rng.sample(range(1, len(BODY)), 5))
        pieces = [BODY[a:b] for a, b in zip([0, *cuts], [*cuts, len(BODY)])]
        reader = exchange(server, head + chunked(*pieces) + request("GET", "/health"))
        assert [reader.answer().status for _ in range(2)] == [200, 200]
    reader = exchange(server, head + b"5;ext=1\r\n{   }\r\n0\r\nTrailer: x\r\n\r\n" + request("GET", "/health"))
    assert [reader.answer().status for _ in range(2)] == [400, 200]
    assert exchange(server, head + b"zz\r\n").at_end() or True
    assert server.get("/health").status_code == 200


def test_body_in_single_bytes(server):
    raw = server.connect()
    for byte in request(body=BODY):
        raw.sendall(bytes([byte]))
    assert Reader(raw).answer().status == 200


def test_expect(server):
    raw = server.connect()
    reader = Reader(raw)
    raw.sendall(request(headers=["Expect: 100-continue", f"Content-Length: {len(BODY)}"]))
    assert reader.head()[0] == 100  # nothing else is sent before
    raw.sendall(BODY)
    assert reader.answer().status == 200
    for data, status in [(request("POST", "/nope", headers=["Expect: 100-continue", "Content-Length: 10"]), 404),
                         (request("PUT", "/health", headers=["Expect: 100-continue", "Content-Length: 10"]), 405),
                         (request(headers=["Expect: 100-continue", "Content-Length: 10", "Content-Type: text/plain"]), 415),
                         (request(headers=["Expect: 100-continue", "Content-Length: 99999999"]), 413)]:
        reader = exchange(server, data)
        answer = reader.answer()
        assert answer.status == status and reader.at_end()


def test_one_event_per_chunk(server):
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 30, "ignore_eos": True, "n": 2}).encode()
    reader = exchange(server, request(body=body))
    status, headers = reader.head()
    assert status == 200 and headers["transfer-encoding"] == "chunked" and "content-length" not in headers
    assert headers["cache-control"] == "no-cache" and headers["x-accel-buffering"] == "no"
    chunks = []
    while piece := reader.chunk():
        chunks.append(piece)
    assert len(chunks) == 61
    for chunk in chunks:
        assert chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") and chunk.count(b"\n") == 2


def running(server):
    """Of one page: who moves from one to the other between two would be missed."""
    numbers = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", server.get("/metrics").text, re.MULTILINE)
    assert len(numbers) == 2
    return sum(map(float, numbers))


LONG = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels(server, how, stream):
    eventually(lambda: running(server) == 0, what="idle server")
    before = server.metric("vllm:generation_tokens_total")
    raw = server.connect()
    raw.sendall(request(body=LONG | {"stream": stream, "n": 4}))
    if stream:
        reader = Reader(raw)
        reader.head()
        reader.chunk()
    eventually(lambda: running(server) > 0, what="running request")
    if how == "reset":
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "half-close":
        raw.shutdown(socket.SHUT_WR)
    else:
        raw.close()
    eventually(lambda: running(server) == 0, what="cancelled request")
    after = server.metric("vllm:generation_tokens_total")
    time.sleep(0.3)
    assert server.metric("vllm:generation_tokens_total") == after and after - before < 8000


HALF = request(body={"model": "none", "prompt": "zz"})


@pytest.fixture(scope="module")
def alone():
    """A server whose connections are all this file's: the shared one may hold idle ones of other tests' clients."""
    running = start_server()
    yield running
    assert running.stop() == 0, "\n".join(running.lines[-40:])


@pytest.mark.parametrize("sent", [b"", HALF[:9], HALF[:60], HALF[:HALF.index(b"\r\n\r\n") + 4], HALF[:-3], HALF],
                         ids=["nothing", "line", "head", "whole head", "body", "whole"])
@pytest.mark.parametrize("how", ["close", "half-close"])
def test_part_of_a_request_and_gone(alone, how, sent):
    """The end may come together with the last bytes. Who only half-closes after a whole request is still answered."""
    def held():
        return alone.metric("bd_http_connections"), alone.metric("bd_http_upload_bytes")

    eventually(lambda: held() == (1, 0), what="connection of the test alone")
    half_closed = []
    for _ in range(50):
        raw = alone.connect()
        raw.sendall(sent)
        raw.shutdown(socket.SHUT_WR)
        if how == "close":
            raw.close()
        else:
            half_closed.append(raw)
    for raw in half_closed:
        answer = b""
        while piece := raw.recv(4096):
            answer += piece
        assert (b"model_not_found" in answer) == (sent == HALF), answer
        raw.close()
    eventually(lambda: held() == (1, 0), what="end of the connections")


def test_leaving_while_queued(launch):
    server = launch("--max-seqs", "2")
    holders = [server.connect() for _ in range(2)]
    for raw in holders:
        raw.sendall(request(body=LONG | {"stream": True}))
        Reader(raw).head()
    waiting = [server.connect() for _ in range(10)]
    for raw in waiting:
        raw.sendall(request(body=LONG))
    eventually(lambda: server.metric("vllm:num_requests_waiting") >= 10, what="queue")
    for raw in waiting:
        raw.close()
    eventually(lambda: server.metric("vllm:num_requests_waiting") == 0, what="empty queue")
    for raw in holders:
        raw.close()
    eventually(lambda: running(server) == 0, what="idle server")
    eventually(lambda: server.metric("bd_http_requests_active") == 0, what="no active request")


def test_dripping_heads_and_silence_are_cut(launch):
    server = launch("--request-header-seconds", "1")
    started = time.monotonic()
    raw, silent = server.connect(), server.connect()
    data = request("GET", "/version", headers=["X: " + "y" * 500])
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        for byte in data:
            raw.sendall(bytes([byte]))
            time.sleep(0.05)  # in all less than the 30 seconds that heads have otherwise
    assert time.monotonic() - started > 0.8
    assert silent.recv(100) == b""
    # A request that came in time may take longer than that to be answered.
    assert server.post("/v1/completions", LONG | {"max_tokens": 400}).status_code == 200


def test_a_reader_that_stalls_loses_its_stream(server):
    """Nothing is read while megabytes are made: the request ends, others do not notice, memory stays."""
    eventually(lambda: running(server) == 0, what="idle server")
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", server.port))
    raw.sendall(request(body=LONG | {"stream": True, "n": 16, "logprobs": 20}))
    eventually(lambda: running(server) > 0, what="running request")
    before = server.resident_bytes()
    assert len(server.complete("b", max_tokens=3)["choices"]) == 1
    eventually(lambda: running(server) == 0, seconds=60, what="end of the stalled stream")
    assert server.resident_bytes() - before < 64 << 20
    raw.settimeout(20)
    data = b""
    try:
        while b"data: [DONE]" not in data and (piece := raw.recv(65536)):
            data += piece
        assert b'"error"' in data and b"data: [DONE]\n\n" in data
    except ConnectionResetError:
        pass  # on a slow machine the kernel gives up first: nothing was taken off the socket for 30 seconds
    raw.close()


def test_random_bytes_never_stop_the_server(server):
    seed = time.time_ns()
    print("seed", seed)
    rng = random.Random(seed)
    whole = request(body=BODY, headers=["Content-Type: application/json"])
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(data))
            match rng.randrange(3):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    del data[at:at + rng.randrange(1, 20)]
                case 2:
                    data[at:at] = rng.randbytes(rng.randrange(1, 20))
        raw = server.connect()
        try:
            raw.sendall(data)
            if rng.random() < 0.5:
                raw.settimeout(0.02)
                raw.recv(1000)
        except OSError:
            pass
        raw.close()
    assert server.get("/health").status_code == 200
    assert server.complete("a", max_tokens=1)["usage"]["completion_tokens"] == 1
    eventually(lambda: running(server) == 0, what="idle server")
