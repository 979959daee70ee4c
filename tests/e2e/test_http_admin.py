"""The admin listener, loading, faulty variants, draining, start-up faults."""

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
import requests
from conftest import BASE, BINARY, ROOT, VARIANTS, error_of, events_of, eventually, start_server
from raw_http import Reader, request


def variants(server):
    body = requests.get(server.admin_url + "/admin/variants", timeout=20).json()
    return {v["name"]: v for v in body["variants"]}


def verb(server, name, what, status=200):
    answer = requests.post(f"{server.admin_url}/admin/variants/{name}/{what}", timeout=20)
    assert answer.status_code == status, answer.text
    return answer


def test_variants_list(launch):
    server = launch()
    infos = variants(server)
    assert sorted(infos) == VARIANTS and all(v["state"] == "absent" and v["loads"] == 0 for v in infos.values())
    server.complete("x", VARIANTS[0], max_tokens=1)
    info = variants(server)[VARIANTS[0]]
    assert info["state"] == "ready" and info["loads"] == 1 and info["page_bytes"] > 0 and info["file_bytes"] > 900_000
    assert info["load_seconds"] > 0 and info["idle_seconds"] < 30 and info["rate_per_s"] > 0 and info["references"] == 0
    assert info["retry_in_seconds"] is None


def test_verbs(launch):
    server = launch()
    name = VARIANTS[2]
    assert verb(server, name, "load").json() == {"ok": True, "pending": True}
    eventually(lambda: variants(server)[name]["state"] == "ready", what="loaded variant")
    assert verb(server, name, "load").json() == {"ok": True, "pending": False} and variants(server)[name]["failure"] is None
    verb(server, name, "pin")
    assert variants(server)[name]["pinned"] is True
    verb(server, name, "unpin")
    assert variants(server)[name]["pinned"] is False
    verb(server, name, "unload")
    eventually(lambda: variants(server)[name]["state"] == "absent", what="unloaded variant")
    server.complete("x", name, max_tokens=1)
    assert variants(server)[name]["loads"] == 2
    error_of(verb(server, "nope", "load", 404), 404, "model_not_found")
    error_of(verb(server, name, "frobnicate", 404), 404, "unknown_url")
    error_of(verb(server, BASE, "unload", 400), 400, "invalid_value")
    error_of(requests.get(f"{server.admin_url}/admin/variants/{name}/load"), 405, "method_not_allowed")
    error_of(requests.get(f"{server.admin_url}/v1/models"), 404, "unknown_url")
    assert requests.get(server.admin_url + "/health").status_code == 200
    assert "vllm:num_requests_running" in requests.get(server.admin_url + "/metrics").text


PAGES = ["http://evil.com", "null", "http://127.0.0.1", "http://127.0.0.1:1", "https://localhost:8081.evil.com", ""]


def ask(port, line, *headers, body=None):
    """One request with the headers as they are; host is 127.0.0.1:port unless one of them is a Host."""
    method, path = line.split()
    raw = socket.create_connection(("127.0.0.1", port), timeout=20)
    lines = [f"{method} {path} HTTP/1.1", *headers, "Connection: close"]
    if not any(h.startswith("Host:") for h in headers):
        lines.append(f"Host: 127.0.0.1:{port}")
    data = json.dumps(body).encode() if body else b""
    if body:
        lines.append("Content-Type: application/json")
    if method == "POST":
        lines.append(f"Content-Length: {len(data)}")
    raw.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
    answer = Reader(raw).answer()
    raw.close()
    return answer.status, answer.body


def refused(answer):
    return answer[0] == 403 and json.loads(answer[1])["error"]["code"] == "origin_not_allowed"


def test_web_pages_give_no_orders(launch):
    """A page may send a POST anywhere, and a name of its own may lead here."""
    server = launch("--runtime-loading")
    name = VARIANTS[0]
    port = server.admin_port
    order = f"POST /admin/variants/{name}/pin"
    unload = {"lora_name": name}
    for page in PAGES:
        for line in (order, "POST /admin/rescan", "GET /admin/variants", "GET /metrics", "OPTIONS /admin/rescan", "GET /nope"):
            assert refused(ask(port, line, f"Origin: {page}")), (line, page)
        assert refused(ask(port, "POST /v1/unload_lora_adapter", f"Origin: {page}", body=unload))
        assert refused(ask(server.port, "POST /v1/unload_lora_adapter", f"Origin: {page}", body=unload))
        assert ask(server.port, "GET /v1/models", f"Origin: {page}")[0] == 200
    for host in ("evil.com", f"evil.com:{port}", "127.0.0.1.evil.com", "localhost.evil.com", "10.1.2.3", "[::2]:80", "[::1", "a b", ":80"):
        for line in (order, "GET /admin/variants"):
            assert refused(ask(port, line, f"Host: {host}", f"Origin: http://{host}")), host
            assert refused(ask(port, line, f"Host: {host}")), host
        assert refused(ask(server.port, "POST /v1/unload_lora_adapter", f"Host: {host}", body=unload))
        assert ask(server.port, "GET /v1/models", f"Host: {host}")[0] == 200
    assert variants(server)[name]["pinned"] is False
    for host in ("localhost", "LOCALHOST.:1", "127.0.0.1", "127.3.2.1:80", "[::1]", f"[::1]:{port}", "[::ffff:127.0.0.1]"):
        assert ask(port, order, f"Host: {host}")[0] == 200
    assert ask(port, order, f"Origin: http://127.0.0.1:{port}")[0] == 200
    assert ask(port, order, f"Origin: HTTPS://LocalHost:{port}", f"Host: localhost:{port}")[0] == 200
    assert ask(server.port, "POST /v1/unload_lora_adapter", body=unload)[0] == 200


def test_web_pages_and_keys(launch):
    """With a key any name may lead here, but no other page's script gives orders."""
    server = launch("--admin-key", "k", "--runtime-loading")
    order = f"POST /admin/variants/{VARIANTS[0]}/pin"
    key = "Authorization: Bearer k"
    assert ask(server.admin_port, order, key, "Host: gpu7.lan:81")[0] == 200
    assert ask(server.admin_port, order, "Host: gpu7.lan:81")[0] == 401
    assert ask(server.admin_port, order, key, "Host: gpu7.lan:81", "Origin: http://gpu7.lan:81")[0] == 200
    assert refused(ask(server.admin_port, order, key, "Origin: http://evil.com"))
    unload = {"lora_name": VARIANTS[0]}
    assert refused(ask(server.port, "POST /v1/unload_lora_adapter", key, "Origin: http://evil.com", body=unload))
    assert ask(server.port, "POST /v1/unload_lora_adapter", key, "Host: gpu7.lan", body=unload)[0] == 200


def test_a_listener_on_every_address(launch):
    """It is reached by any address, but a name may be a page's."""
    server = launch("--admin", "0.0.0.0:0")
    assert ask(server.admin_port, "GET /admin/variants", "Host: 10.1.2.3:81")[0] == 200
    assert refused(ask(server.admin_port, "GET /admin/variants", "Host: evil.com"))
    for more, warned in ((), True), (("--admin-key", "k"), False), (("--admin", "127.1.2.3:0"), False), (("--admin", "localhost:0"), False), (("--admin", "[::]:0"), True):
        server = launch(*(() if "--admin" in more else ("--admin", "0.0.0.0:0")), *more)
        assert server.stop() == 0
        assert any("level=warn" in line and "see --admin-key" in line for line in server.lines) == warned, more


def test_eviction_under_two_slots(launch):
    """More variants than slots: each answers, and answers the same when it comes back."""
    server = launch("--slots", "2", "--pinned-top", "0")
    first = {name: server.complete("The", name, max_tokens=6)["choices"] for name in VARIANTS[:6]}
    assert {name: server.complete("The", name, max_tokens=6)["choices"] for name in VARIANTS[:6]} == first
    infos = variants(server)
    assert sum(v["state"] == "ready" for v in infos.values()) <= 2 and sum(v["evictions"] for v in infos.values()) >= 6


def eventually_failed(server, name):
    """The answer to a load while the variant may not be tried again: asked for until the load has failed."""
    answers = []

    def refused():
        answers.append(requests.post(f"{server.admin_url}/admin/variants/{name}/load", timeout=20))
        return answers[-1].status_code != 200

    eventually(refused, what="refused load")
    return answers[-1]


def test_a_damaged_variant_fails_alone(launch, tmp_path):
    for name in VARIANTS[:2]:
        shutil.copytree(ROOT / "demo/deltas" / name, tmp_path / name)
    shard = tmp_path / VARIANTS[0] / "shard-00-of-01.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(data)
    server = launch(deltas=str(tmp_path))
    for stream in (False, True):
        answer = server.post("/v1/completions", {"prompt": "x", "model": VARIANTS[0], "stream": stream})
        message = error_of(answer, 503, "variant_unavailable")
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert VARIANTS[0] in message and str(tmp_path) not in message and "safetensors" not in message
    assert server.complete("x", VARIANTS[1], max_tokens=1)["model"] == VARIANTS[1]
    info = variants(server)[VARIANTS[0]]
    assert info["state"] in ("failed", "absent", "loading", "queued")
    # The operator, and only the operator, hears what is wrong: in the log, in the list, and when asking for a load.
    line = server.find(rf'level=error mod=cache what="load of variant {VARIANTS[0]} failed.*').group(0)
    assert "BD_E_CORRUPT" in line and str(shard) in line
    assert str(shard) in info["failure"] and "chunk" in info["failure"]
    message = error_of(eventually_failed(server, VARIANTS[0]), 503, "variant_unavailable")
    assert str(shard) in message and "chunk" in message
    failed = int(server.metric("bitdelta_delta_loads_total", result="failed", variant=VARIANTS[0]))
    eventually(lambda: sum("mod=cache what=" in line for line in server.lines) == failed, what="one line a failure")
    assert variants(server)[VARIANTS[1]]["failure"] is None


def test_drain_lets_streams_finish(launch):
    server = launch("--drain-seconds", "30")
    raw = server.connect()
    idle = server.connect()
    raw.sendall(request(body={"prompt": "a", "stream": True, "max_tokens": 150, "ignore_eos": True}))
    reader = Reader(raw)
    assert reader.head()[0] == 200
    first = reader.chunk()
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: requests.get(server.url + "/health").status_code == 503, what="503 health")
    assert requests.get(server.url + "/health").json()["error"]["code"] == "shutting_down"
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
        answer = requests.post(server.url + path, json=body)
        error_of(answer, 503, "shutting_down")
        assert answer.headers["connection"] == "close"
    assert requests.get(server.url + "/v1/models").status_code == 200
    data = first
    while piece := reader.chunk():
        data += piece
    events = events_of(data)
    assert len(events) == 150 and events[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(20) == 0
    idle.close()


def test_drain_time_over(launch):
    """Streams get the error event, whole answers 503; then the process ends well."""
    server = launch("--drain-seconds", "1")
    long = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "n": 4}
    raw = server.connect()
    raw.sendall(request(body=long | {"stream": True, "stream_options": {"include_usage": True}}))
    reader = Reader(raw)
    reader.head()
    results = []
    whole = threading.Thread(target=lambda: results.append(requests.post(server.url + "/v1/completions", json=long)))
    whole.start()
    eventually(lambda: server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") >= 5, what="running requests")
    server.process.send_signal(signal.SIGTERM)
    data = b""
    while piece := reader.chunk():
        data += piece
    events = events_of(data)
    assert events[-1]["error"]["code"] == "shutting_down" and events[-1]["error"]["type"] == "server_error"
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert reader.at_end()
    whole.join(60)
    error_of(results[0], 503, "shutting_down")
    assert server.process.wait(60) == 0


def test_second_signal_ends_at_once(launch):
    server = launch("--drain-seconds", "100")
    raw = server.connect()
    raw.sendall(request(body={"prompt": "a", "stream": True, "max_tokens": 2000, "ignore_eos": True, "n": 8}))
    Reader(raw).head()
    server.process.send_signal(signal.SIGTERM)
    server.find("draining")
    time.sleep(0.15)  # sooner it could be the same order sent twice
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == -signal.SIGTERM


def test_third_signal_ends_at_once(launch):
    """However soon it comes: an order is sent twice by mistake, but not three times."""
    server = launch("--drain-seconds", "100")
    raw = server.connect()
    raw.sendall(request(body={"prompt": "a", "stream": True, "max_tokens": 2000, "ignore_eos": True, "n": 8}))
    Reader(raw).head()
    server.process.send_signal(signal.SIGTERM)
    server.find("draining")
    server.process.send_signal(signal.SIGINT)  # another number, or the two could become one on their way
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) < 0


def test_stop_with_every_kind_of_connection(launch):
    """Idle, half a head, half a body, queued, streaming, stalled: SIGTERM still ends in time, with status 0."""
    server = launch("--drain-seconds", "1", "--max-seqs", "2")
    held = [server.connect() for _ in range(12)]
    held[1].sendall(b"GET /heal")
    held[2].sendall(request(headers=["Content-Length: 100"]) + b"{")
    held[3].sendall(request("GET", "/health"))
    for raw in held[4:]:
        raw.sendall(request(body={"prompt": "a", "stream": raw.fileno() % 2 == 0, "max_tokens": 1500, "ignore_eos": True, "logprobs": 20}))
    time.sleep(0.5)
    assert server.stop() == 0
    for raw in held:
        raw.close()


def test_addresses(launch):
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1]
    common = [BINARY, "serve", "--base", "demo/zen-mini"]
    for listen, words in [(f"127.0.0.1:{port}", "in use"), ("nonsense", "HOST:PORT"), ("127.0.0.1:99999", "127.0.0.1:99999"),
                          ("[::1", "[::1"), ("192.0.2.1:0", "192.0.2.1")]:
        done = subprocess.run([*common, "--listen", listen, "--admin", "none"], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode in (1, 2) and words in done.stderr, done.stderr
    taken.close()  # one address under two names: told by the address
    done = subprocess.run([*common, "--listen", f"127.0.0.1:{port}", "--admin", f"localhost:{port}"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"127.0.0.1:{port}: cannot listen: Address already in use" in done.stderr, done.stderr
    # Two servers on one port, also when each of them shares it between threads.
    server = launch("--http-threads", "3")
    second = subprocess.run([*common, "--listen", f"127.0.0.1:{server.port}", "--admin", "none", "--http-threads", "3"], cwd=ROOT,
                            capture_output=True, text=True, timeout=60)
    assert second.returncode == 1 and "in use" in second.stderr
    for _ in range(20):
        assert requests.get(server.url + "/health").status_code == 200
    none = launch("--admin", "none", deltas=None)
    assert none.admin_port is None and none.get("/v1/models").json()["data"][0]["id"] == BASE


def test_ipv6(launch):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    server = launch("--listen", "[::1]:0", deltas=None)
    assert requests.get(f"http://[::1]:{server.port}/health").status_code == 200


def test_loading_answers():
    """From the first moment: 503 until ready, never a refused connection, and then service."""
    server = start_server(ready=False)
    port = int(server.find(r"mod=http listening address=\S*:(\d+)").group(1))
    seen = set()
    end = time.monotonic() + 30
    while time.monotonic() < end and 200 not in seen:
        answer = requests.get(f"http://127.0.0.1:{port}/health")
        seen.add(answer.status_code)
        if answer.status_code == 503:
            assert answer.json()["error"]["code"] == "model_loading" and int(answer.headers["retry-after"]) >= 1
            work = requests.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "x"})
            if work.status_code != 200:  # it may have become ready in between
                error_of(work, 503, "model_loading")
    assert 200 in seen
    assert server.wait_ready().stop() == 0


def test_no_secrets_in_the_log(launch):
    server = launch("--api-key", "sk-very-secret", "--log-level", "debug", "--admin-key", "admin-secret")
    requests.post(server.url + "/v1/completions", json={"prompt": "my private words", "max_tokens": 2},
                  headers={"Authorization": "Bearer sk-very-secret"})
    requests.get(server.url + "/v1/models", headers={"Authorization": "Bearer sk-wrong-one"})
    assert server.stop() == 0
    text = "\n".join(server.lines)
    for secret in ("sk-very-secret", "sk-wrong-one", "admin-secret", "private words"):
        assert secret not in text


def test_no_connection_takes_a_closed_streams_place():
    """With standard error closed, its number must not be a socket's: the log would be written into it. Nor does a tool think its output written."""
    closed = {"cwd": ROOT, "preexec_fn": lambda: [os.close(fd) for fd in (0, 1, 2)]}
    process = subprocess.Popen([BINARY, "serve", "--base", "demo/zen-mini", "--backend", "cpu", "--listen", "127.0.0.1:0", "--admin", "none"], **closed)
    try:
        fds = Path(f"/proc/{process.pid}/fd")
        eventually(lambda: any("socket:" in os.path.realpath(fd) for fd in fds.iterdir()), what="a listening socket")
        assert [os.readlink(fds / str(fd)) for fd in (0, 1, 2)] == ["/dev/null"] * 3
    finally:
        process.kill()
        process.wait()
    said = subprocess.Popen([BINARY, "generate", "--base", "demo/zen-mini", "--backend", "cpu", "--prompt", "a", "--max-tokens", "1"], **closed)
    assert said.wait(timeout=60) == 1


def test_the_shipped_configuration_starts(tmp_path):
    shipped = json.loads((ROOT / "configs" / "zen-mini.json").read_text())
    shipped.update(listen="127.0.0.1:0", admin="127.0.0.1:0")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shipped))
    process = subprocess.Popen([BINARY, "serve", "--config", path], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "mod=serve ready" in line:
            break
    else:
        raise AssertionError(f"exit status {process.wait()}")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


@pytest.mark.parametrize("deltas, words", [("no/such/place", "No such file"), ("README.md", "Not a directory")])
def test_a_wrong_directory_of_deltas_is_named(deltas, words):
    run = subprocess.run([BINARY, "serve", "--base", "demo/zen-mini", "--deltas", deltas, "--listen", "127.0.0.1:0", "--admin", "none"],
                         cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and deltas in run.stderr and words in run.stderr


def test_the_base_alone_and_sighup(tmp_path):
    process = subprocess.Popen([BINARY, "serve", "--base", "demo/zen-mini", "--listen", "127.0.0.1:0", "--admin", "none"], cwd=ROOT,
                               stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "mod=serve ready" in line:
            break
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_a_fifo_is_refused_not_waited_for(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    os.mkfifo(base / "config.json")
    run = subprocess.run([BINARY, "serve", "--base", base, "--listen", "127.0.0.1:0", "--admin", "none"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert run.returncode == 1 and "config.json is not a regular file" in run.stderr
