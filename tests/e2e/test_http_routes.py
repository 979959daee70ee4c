"""Paths, methods, headers, keys and error bodies."""

import concurrent.futures
import re

import pytest
import requests
from conftest import BASE, CONTEXT, MODELS, VARIANTS, error_of
from raw_http import Reader, request

GETS = ["/v1/models", f"/v1/models/{BASE}", "/health", "/ping", "/version", "/metrics", "/tokenizer_info", "/openapi.json"]
POSTS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]


def test_models_list(server):
    answer = server.get("/v1/models")
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body["object"] == "list" and [card["id"] for card in body["data"]] == MODELS
    for card in body["data"]:
        assert card["object"] == "model" and card["parent"] is None and card["max_model_len"] == CONTEXT
        assert isinstance(card["created"], int) and card["owned_by"] and card["root"] and len(card["permission"]) == 1


@pytest.mark.parametrize("path", ["/v1//models", "//v1/models/", "/v1/models?x=1&y", "/v1/models/"])
def test_slashes_and_queries(server, path):
    raw = server.connect()  # requests would tidy the path up
    raw.sendall(request("GET", path))
    answer = Reader(raw).answer()
    assert answer.status == 200 and answer.json["object"] == "list"


def test_one_model(server):
    for name in (BASE, VARIANTS[3]):
        assert server.get(f"/v1/models/{name}").json()["id"] == name
    encoded = "".join(f"%{ord(c):02x}" for c in VARIANTS[0])
    assert server.get(f"/v1/models/{encoded}").json()["id"] == VARIANTS[0]
    for name in ("nope", "a/b", "a%2Fb", BASE.upper(), f"{BASE}%2F", "%2e%2e", BASE + "%20", BASE.replace("-", "%252d")):
        error_of(server.get(f"/v1/models/{name}"), 404, "model_not_found", "model")
    raw = server.connect()
    raw.sendall(request("GET", f"/v1/models/{BASE}%00x"))
    assert Reader(raw).answer().status == 400
    message = error_of(server.get("/v1/models/" + "x" * 900), 404, "model_not_found", "model")
    assert len(message) < 200
    error_of(server.get("/v1/models/" + "x" * 2000), 404, "unknown_url")


def test_id_with_a_slash(launch, tmp_path):
    from conftest import ROOT
    own = tmp_path / "config.json"
    own.write_text('{"variants":[{"name":"org/astro","path":"%s"}]}' % (ROOT / "demo/deltas/zen-mini-astro"))
    server = launch("--config", str(own), deltas=None)
    assert server.get("/v1/models/org%2Fastro").json()["id"] == "org/astro"
    raw = server.connect()
    raw.sendall(request("GET", "/v1/models/org/astro"))
    assert Reader(raw).answer().json["id"] == "org/astro"
    assert server.complete("Mars", "org/astro")["model"] == "org/astro"
    assert requests.post(server.admin_url + "/admin/variants/org%2Fastro/pin").json()["ok"] is True
    assert requests.post(server.admin_url + "/admin/variants/org/astro/unpin").json()["ok"] is True


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/nope", "/V1/models", "/v1/completions/x", "/admin/variants", "/v1%2Fmodels"])
def test_unknown_paths(server, path):
    for method in ("GET", "POST", "PUT", "OPTIONS"):
        answer = requests.request(method, server.url + path, timeout=20)
        error_of(answer, 404, "unknown_url")
        assert answer.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("path", GETS + POSTS)
def test_methods(server, path):
    allowed = {"POST", "OPTIONS"} if path in POSTS else {"GET", "HEAD", "OPTIONS"}
    if path == "/ping":
        allowed |= {"POST"}
    for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "FOO"):
        if method in allowed:
            continue
        answer = requests.request(method, server.url + path, timeout=20)
        assert set(answer.headers["allow"].split(", ")) == allowed
        if method != "HEAD":
            error_of(answer, 405, "method_not_allowed")
        assert answer.status_code == 405
    answer = requests.options(server.url + path, timeout=20)
    assert answer.status_code == 204 and answer.content == b"" and set(answer.headers["allow"].split(", ")) == allowed


@pytest.mark.parametrize("path", GETS)
def test_head(server, path):
    raw = server.connect()
    raw.sendall(request("HEAD", path) + request("GET", path))
    reader = Reader(raw)
    head, get = reader.answer(head_only=True), reader.answer()
    assert head.status == get.status == 200
    assert head.headers.get("content-type") == get.headers.get("content-type")
    if path != "/metrics":  # whose length changes
        assert head.headers["content-length"] == get.headers["content-length"]


def test_health_version_metrics(server):
    for path in ("/health", "/ping"):
        assert server.get(path).status_code == 200 and server.get(path).content == b""
    assert server.post("/ping", {}).status_code == 200
    assert re.fullmatch(r"\d+\.\d+\.\d+", server.get("/version").json()["version"])
    answer = server.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    server.complete("x", max_tokens=2)
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        server.metric(name)
    before = server.metric("vllm:generation_tokens_total")
    server.complete("x", max_tokens=7, ignore_eos=True)
    assert server.metric("vllm:generation_tokens_total") == before + 7


def test_metrics_form(server):
    """Names, label escapes, one TYPE per family before its samples, histograms cumulative, no series twice."""
    server.complete("a b c", max_tokens=4)
    text = server.get("/metrics").text
    assert text.endswith("\n") and "\n\n" not in text
    kinds, seen, buckets = {}, set(), {}
    for line in text.splitlines():
        if line.startswith("# "):
            _, what, name, rest = line.split(" ", 3)
            if what == "TYPE":
                assert name not in kinds
                kinds[name] = rest
            continue
        sample = re.fullmatch(r'([a-zA-Z_:][\w:]*)(\{(?:\w+="(?:[^"\\\n]|\\[\\"n])*",?)*\})? (\S+)', line)
        assert sample, line
        name, labels, value = sample.groups()
        assert (name, labels) not in seen
        seen.add((name, labels))
        family = re.sub(r"_(bucket|sum|count)$", "", name) if name not in kinds else name
        assert family in kinds, line
        if kinds[family] == "counter":
            assert name.endswith("_total") and float(value) >= 0
        if name.endswith("_bucket"):
            series = (family, re.sub(r',?le="[^"]*"', "", labels))
            assert float(value) >= buckets.get(series, 0)
            buckets[series] = float(value)
        if name.endswith("_count"):
            assert float(value) == buckets[(family, labels or "{}")]


def test_request_ids(server):
    assert re.fullmatch(r"req-[0-9a-f]{32}", server.get("/health").headers["x-request-id"])
    for sent in ("a", "my-id_1.2:3/4", "x" * 128):
        for path in ("/health", "/nope", "/v1/models"):
            assert server.get(path, headers={"x-request-id": sent}).headers["x-request-id"] == sent
    for sent in ("x" * 129, "a b", "\u00e9".encode()):
        assert server.get("/health", headers={"x-request-id": sent}).headers["x-request-id"] != sent
    stream = requests.post(server.url + "/v1/completions", json={"prompt": "a", "stream": True}, headers={"x-request-id": "s1"})
    assert stream.headers["x-request-id"] == "s1"
    first, second = (server.complete("a", max_tokens=1)["id"] for _ in range(2))
    assert first != second and first.startswith("cmpl-")


def test_content_types(server):
    body = b'{"prompt":"a","max_tokens":1}'
    def send(**headers):
        return requests.post(server.url + "/v1/completions", data=body, headers={k.replace("_", "-"): v for k, v in headers.items()})
    for good in ("application/json", "APPLICATION/JSON", "application/json; charset=utf-8", "application/json;x", "application/vnd.api+json"):
        assert send(Content_Type=good).status_code == 200, good
    assert send().status_code == 200
    for bad in ("text/plain", "application/x-www-form-urlencoded", "application/jsonx", "application/", "json", "application/xml"):
        error_of(send(Content_Type=bad), 415, "unsupported_content_type")
    form = "application/x-www-form-urlencoded"  # what curl -d declares: believed from curl alone
    assert send(Content_Type=form, User_Agent="curl/8.5.0").status_code == 200
    for agent in ("Mozilla/5.0 curl/8", "curl", ""):
        error_of(send(Content_Type=form, User_Agent=agent), 415, "unsupported_content_type")
    error_of(send(Content_Type="text/plain", User_Agent="curl/8.5.0"), 415, "unsupported_content_type")
    for encoding in ("gzip", "br", "deflate"):
        error_of(send(Content_Encoding=encoding), 415, "unsupported_content_type")
    assert send(Content_Encoding="identity").status_code == 200
    assert send(Accept_Encoding="gzip, br").headers.get("content-encoding") is None


def test_keys(launch):
    server = launch("--api-key", "alpha", "--api-key", "beta-2", "--admin-key", "root")
    good = {"Authorization": "Bearer alpha"}
    guarded = [("GET", "/v1/models"), ("GET", f"/v1/models/{BASE}"), ("GET", "/tokenizer_info"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
               ("POST", "/tokenize"), ("POST", "/detokenize")]
    for method, path in guarded:
        for header in (None, "", "alpha", "Basic alpha", "Bearer", "Bearer ", "Bearer alph", "Bearer alphaa", "Bearer Alpha", "Bearer root"):
            answer = requests.request(method, server.url + path, data="not json" if method == "POST" else None,
                                      headers={"Authorization": header} if header is not None else {})
            message = error_of(answer, 401, "invalid_api_key")
            assert "Incorrect API key provided" in message and answer.headers["www-authenticate"] == "Bearer"
        assert requests.options(server.url + path).status_code == 204
    for header in ("Bearer alpha", "bearer beta-2", "BEARER alpha"):
        assert requests.get(server.url + "/v1/models", headers={"Authorization": header}).status_code == 200
    error_of(requests.get(server.url + "/v1/nope"), 404, "unknown_url")
    error_of(requests.put(server.url + "/v1/models"), 405, "method_not_allowed")
    error_of(requests.get(server.url + "/v1/models/nope", headers=good), 404, "model_not_found", "model")
    for path in ("/health", "/ping", "/version", "/metrics", "/openapi.json"):
        assert requests.get(server.url + path).status_code == 200
    error_of(requests.get(server.admin_url + "/admin/variants", headers=good), 401, "invalid_api_key")
    assert requests.get(server.admin_url + "/admin/variants", headers={"Authorization": "Bearer root"}).status_code == 200


def test_without_keys_any_header_will_do(server):
    for header in ("Bearer ", "Bearer x", "nonsense", ""):
        assert server.get("/v1/models", headers={"Authorization": header}).status_code == 200


def test_tokenize_and_detokenize(server):
    text = "Hello  wörld 😀\n\tif x == 10:\u0000end"
    body = server.post("/tokenize", {"prompt": text}).json()
    assert body["count"] == len(body["tokens"]) and body["max_model_len"] == CONTEXT and body["token_strs"] is None
    assert body["tokens"][0] == 4080
    plain = server.post("/tokenize", {"prompt": text, "add_special_tokens": False, "return_token_strs": True, "model": VARIANTS[1]}).json()
    assert plain["tokens"] == body["tokens"][1:] and len(plain["token_strs"]) == plain["count"]
    assert server.post("/detokenize", {"tokens": plain["tokens"]}).json() == {"prompt": text}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    assert server.post("/tokenize", {"prompt": "", "add_special_tokens": False, "return_token_strs": True}).json()["token_strs"] == []
    error_of(server.post("/tokenize", {}), 400, "missing_required_parameter", "prompt")
    error_of(server.post("/tokenize", {"prompt": 5}), 400, "invalid_type", "prompt")
    error_of(server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}), 400, "unsupported_parameter", "messages")
    error_of(server.post("/tokenize", {"prompt": "x", "model": "nope"}), 404, "model_not_found", "model")
    error_of(server.post("/detokenize", {"tokens": [-1]}), 400, "integer_below_min_value", "tokens")
    error_of(server.post("/detokenize", {"tokens": [4096]}), 400, "integer_above_max_value", "tokens")
    error_of(server.post("/detokenize", {"tokens": [2**70]}), 400, "integer_above_max_value", "tokens")
    error_of(server.post("/detokenize", {"tokens": "x"}), 400, "invalid_type", "tokens")
    error_of(server.post("/detokenize", {}), 400, "missing_required_parameter", "tokens")


def test_chat_is_refused(server):
    message = error_of(server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}), 400, "unsupported_parameter")
    assert "/v1/completions" in message


def test_large_bodies_go_to_workers(server):
    """A body over 64 KB takes the other path; the answers are the same."""
    padding = "x" * 100_000
    small = server.complete("The sea", max_tokens=5)["choices"]
    large = server.complete("The sea", max_tokens=5, user=padding)["choices"]
    assert small == large
    error_of(server.post("/v1/completions", {"prompt": padding * 4, "n": "x"}), 400, "invalid_type", "n")
    long_text = server.post("/tokenize", {"prompt": "word " * 40_000}).json()
    assert long_text["count"] > 40_000
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: server.complete("The sea", max_tokens=5, user=padding + str(i))["choices"], range(16)))
    assert answers == [small] * 16


def test_body_limit(launch):
    server = launch("--max-body-bytes", "100000")
    fits = b'{"prompt":"a","max_tokens":1,"user":"' + b"x" * 90_000 + b'"}'
    def send(data):
        return requests.post(server.url + "/v1/completions", data=data, headers={"Content-Type": "application/json"})
    assert send(fits).status_code == 200
    assert send(iter([fits[:1000], fits[1000:]])).status_code == 200
    for size in (100_001, 390_000):
        answer = send(b"x" * size)
        error_of(answer, 413, "request_too_large")
        assert answer.headers["connection"] == "close"
        error_of(send(iter([b"x" * size])), 413, "request_too_large")
    # Far above the limit: refused at the head, or cut off when no length was given.
    raw = server.connect()
    raw.sendall(request(headers=["Content-Length: 100000000"]))
    reader = Reader(raw)
    answer = reader.answer()
    assert answer.status == 413 and answer.code == "request_too_large" and reader.at_end()
    assert server.get("/health").status_code == 200


def test_cors_is_off(server):
    answer = server.get("/v1/models", headers={"Origin": "http://example.org"})
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]
