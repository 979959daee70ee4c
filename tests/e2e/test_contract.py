"""contract.txt: the numbered rules of the API and the tests that hold the server to them. Below, those that fit no other file."""

import ast
import concurrent.futures
import json
import re
import select
import socket
import time

import pytest
import requests
from conftest import BASE, BOS, CONTEXT, ROOT, VARIANTS, VOCAB, error_of, events_of, eventually, start_server, strict_json
from raw_http import Reader, chunked, request

HERE = ROOT / "tests" / "e2e"


def test_every_rule_has_a_test():
    tests = {}
    for path in HERE.glob("**/test_*.py"):
        names = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
        tests[path.stem.removeprefix("test_")] = names
    seen = set()
    for line in (HERE / "contract.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        number, rule, where = re.fullmatch(r"([\d.]+)  (\S.*?) \| (\S.*)", line).groups()
        assert number not in seen, number
        seen.add(number)
        for file, name in re.findall(r"([a-z_]+):([a-z0-9_]+)", where):
            assert f"test_{name}" in tests[file] if file != "unit" else (ROOT / "tests/unit" / f"test_{name}.c").is_file(), line
        assert re.fullmatch(r"[a-z_]+:[a-z0-9_]+(, [a-z_]+:[a-z0-9_]+)*", where), line
    assert len(seen) > 150


def send(server, data, path="/v1/completions", **headers):
    headers = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    return requests.post(server.url + path, data=data, headers=headers, timeout=60)


# ---- 2: bodies ----

BROKEN = [b"", b"null", b"[]", b'"x"', b"5", b"true", b'{"prompt":"x"}xyz', b'{"prompt":"x"}{}', b'{"prompt":"x",}', b"{'prompt':'x'}",
          b'{"prompt":"x","a":NaN}', b'{"prompt":"x","a":Infinity}', b'{"prompt":"x","a":+1}', b'{"prompt":"x","a":.5}', b'{"prompt":"x","a":01}',
          b'{"prompt":"x","a":1.}', b'{"prompt":"x","a":1e999}', b'{"prompt":"x","a":-1.8e308}', b'{"prompt":"x"/*c*/}', b'{"prompt":"a\x01b"}', b'{"prompt":"a\0b"}',
          b'\x0b{"prompt":"x"}', b'{"prompt":"\\ud83d"}', b'{"prompt":"\\uX000"}', b'{"prompt":"\\ude00\\ud83d"}', b'{"prompt":"\xff"}',
          b'{"prompt":"\xc0\xaf"}', b'{"prompt":"\xed\xa0\x80"}', b'{"prompt":"\xf5\x80\x80\x80"}', b'{"prompt":"x","a":' + b"[" * 200 + b"]" * 200 + b"}",
          b'{"prompt":"x","a":' + b"[" * 10_000, b'{"prompt":"x","a":' + b'{"a":' * 10_000, b'{"prompt"', b'{"prompt":"x","\\u0000":1}']


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_broken_json(server, path):
    for data in BROKEN:
        error_of(send(server, data, path), 400, "invalid_json")


def test_accepted_json(server):
    for data in (b'\xef\xbb\xbf{"prompt":"x","max_tokens":1}', b' \t\r\n{"prompt":"x","max_tokens":1.0} ', b'{"prompt":"x","max_tokens":1e0}',
                 b'{"prompt":"x","max_tokens":1,"a":' + b"[" * 60 + b"]" * 60 + b"}", b'{"prompt":"\\ud83d\\ude00","max_tokens":1}',
                 b'{"prompt":5,"prompt":"x","max_tokens":"y","max_tokens":1}', b'{"\\u0070rompt":"x","max_tokens":1,"Prompt":5,"PROMPT":5}',
                 b'{"prompt":"x","max_tokens":1,"nobody":{"knows":[1,null,1.7e308]},"messages":7}'):
        answer = send(server, data)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 1, data
    error_of(send(server, b'{"prompt":"x","prompt":5}'), 400, "invalid_type", "prompt")


def test_nul_is_carried(server):
    for field in ({"prompt": "a\0b", "max_tokens": 0, "echo": True}, {"prompt": ["a\0b"], "max_tokens": 0, "echo": True}):
        assert server.post("/v1/completions", field).json()["choices"][0]["text"] == "a\0b"
    free = server.complete("The city", max_tokens=20)["choices"][0]["text"]
    assert server.complete("The city", max_tokens=20, stop=free[3:5] + "\0")["choices"][0]["text"] == free


NULLS = ["model", "max_tokens", "n", "best_of", "echo", "logprobs", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed",
         "stop", "stream", "stream_options", "suffix", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "top_k", "min_p",
         "repetition_penalty", "ignore_eos", "min_tokens", "stop_token_ids", "skip_special_tokens", "add_special_tokens", "include_stop_str_in_output",
         "return_token_ids", "return_tokens_as_token_ids", "prompt_logprobs", "priority", "truncate_prompt_tokens", "allowed_token_ids", "bad_words",
         "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "tools"]


def test_null_is_absent(server):
    answer = server.post("/v1/completions", {"prompt": "x"} | {name: None for name in NULLS} | {"temperature": 0}).json()
    assert answer["choices"] == server.complete("x")["choices"] and answer["usage"]["completion_tokens"] <= 16
    assert server.complete("x", max_tokens=None, ignore_eos=True)["usage"]["completion_tokens"] == 16
    unused = {"user": 5, "metadata": {"a": [1]}, "store": "x", "service_tier": {}, "safety_identifier": 1, "prompt_cache_key": [], "max_completion_tokens": "x"}
    assert server.complete("x", **unused)["choices"] == answer["choices"]


LOW_INT, HIGH_INT, LOW, HIGH = "integer_below_min_value", "integer_above_max_value", "decimal_below_min_value", "decimal_above_max_value"
INTEGERS = {"max_tokens": (-1, 2**31), "n": (0, 129), "best_of": (0, 129), "logprobs": (-1, 21), "seed": (-2**63 - 1, 2**63), "top_k": (-2, 2**31),
            "min_tokens": (-1, 2**31), "prompt_logprobs": (-1, 21), "priority": (-2**63 - 1, 2**63)}
NUMBERS = {"temperature": (-0.1, 2.1), "top_p": (-0.1, 1.1), "presence_penalty": (-2.1, 2.1), "frequency_penalty": (-2.1, 2.1), "min_p": (-0.1, 1.1),
           "repetition_penalty": (0, None)}
BOOLS = ["echo", "stream", "ignore_eos", "skip_special_tokens", "add_special_tokens", "include_stop_str_in_output", "return_token_ids",
         "return_tokens_as_token_ids"]


def test_types_and_ranges(server):
    def fails(name, value, code):
        error_of(send(server, json.dumps({"prompt": "x", name: value})), 400, code, name)
    for name, (low, high) in INTEGERS.items():
        fails(name, low, LOW_INT)
        fails(name, high, HIGH_INT)
        for wrong in ("16", True, 1.5, [], {}):
            fails(name, wrong, "invalid_type")
    for name, (low, high) in NUMBERS.items():
        fails(name, low, LOW)
        if high is not None:
            fails(name, high, HIGH)
        for wrong in ("1", True, [1]):
            fails(name, wrong, "invalid_type")
    for name in BOOLS:
        for wrong in ("true", 2, -1, 0.5, []):
            fails(name, wrong, "invalid_type")
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, name: 0}).status_code == 200
    assert server.complete("x", max_tokens=1, echo=1)["choices"][0]["text"].startswith("x")


def test_wrong_prompts(server):
    for prompt, code in [([], "empty_array"), ([[]], "empty_array"), ([[5], []], "empty_array"), (["a", 5], "invalid_type"), ([5, "a"], "invalid_type"),
                         ([[5], "a"], "invalid_type"), ([True], "invalid_type"), ([1.5], "invalid_type"), ([[1.5]], "invalid_type"), ([-1], "invalid_value"),
                         ([[-1]], "invalid_value"), ([2**63], "invalid_value"), ([[[5]]], "invalid_type"), ([None], "invalid_type"), ({}, "invalid_type"),
                         ([{}], "invalid_type"), (5, "invalid_type"), (True, "invalid_type"), ([2**31], "invalid_value"), ([VOCAB], "invalid_value")]:
        for stream in (False, True):
            error_of(server.post("/v1/completions", {"prompt": prompt, "stream": stream}), 400, code, "prompt")
    for body in ({}, {"prompt": None}):
        error_of(server.post("/v1/completions", body), 400, "missing_required_parameter", "prompt")
    error_of(server.post("/v1/completions", {"prompt": [[5], [VOCAB], [6]]}), 400, "invalid_value", "prompt")


def test_wrong_stops_and_biases(server):
    for field, value, code in [("stop", "", "empty_string"), ("stop", ["a", ""], "empty_string"), ("stop", ["x"] * 17, "array_above_max_length"),
                               ("stop", ["a", 5], "invalid_type"), ("stop", 5, "invalid_type"), ("stop", "x" * 4097, "string_above_max_length"),
                               ("stop_token_ids", [-1], LOW_INT), ("stop_token_ids", [2**63], HIGH_INT), ("stop_token_ids", ["5"], "invalid_type"),
                               ("stop_token_ids", [5] * 257, "array_above_max_length"), ("logit_bias", {"x": 1}, "invalid_value"), ("logit_bias", [], "invalid_type"),
                               ("logit_bias", {"-1": 1}, "invalid_value"), ("logit_bias", {"1.0": 1}, "invalid_value"), ("logit_bias", {"5": "1"}, "invalid_type"),
                               ("logit_bias", {"5": None}, "invalid_type"), ("logit_bias", {str(2**64): 1}, "invalid_value"),
                               ("suffix", "x", "unsupported_parameter"), ("suffix", 5, "invalid_type")]:
        error_of(server.post("/v1/completions", {"prompt": "x", field: value}), 400, code, field)
    assert server.complete("x", max_tokens=1, stop=["\u0416"] * 16, suffix="")["choices"]


def test_unsupported_fields(server):
    for field, values in {"truncate_prompt_tokens": [5], "allowed_token_ids": [[5]], "bad_words": [["x"]], "structured_outputs": [{"regex": "a"}],
                          "guided_json": [{"type": "object"}], "guided_regex": ["a"], "guided_choice": [["a", "b"]], "guided_grammar": ["root ::= a"],
                          "response_format": [{"type": "json_object"}, {"type": "text", "strict": True}, "json"], "tools": [[{"type": "function"}]]}.items():
        for value in values:
            error_of(server.post("/v1/completions", {"prompt": "x", field: value}), 400, "unsupported_parameter", field)
    assert server.complete("x", max_tokens=1, response_format={"type": "text"}, allowed_token_ids=[], tools=[], bad_words=[])["choices"]


def test_rules_over_fields(server):
    for fields, param in [({"min_tokens": 5, "max_tokens": 4}, "min_tokens"), ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
                          ({"n": 3, "best_of": 2}, "best_of"), ({"best_of": 2, "stream": True}, "best_of"),
                          ({"stream_options": {"include_usage": True}}, "stream_options"), ({"stream_options": {"include_usage": 5}, "stream": True}, "stream_options")]:
        answer = server.post("/v1/completions", {"prompt": "x", **fields})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    error_of(server.post("/v1/completions", {"prompt": "x", "n": 1, "best_of": 21}), 400, HIGH_INT, "best_of")
    error_of(server.post("/v1/completions", {"prompt": ["x"] * 60, "best_of": 20}), 400, "invalid_value", "best_of")
    assert server.complete("x", max_tokens=1, stream_options={})["choices"]


def test_best_of(server):
    """The n best of best_of by mean log-probability, best first; all of them are billed."""
    fields = {"temperature": 1.3, "seed": 11, "max_tokens": 8, "logprobs": 0, "return_token_ids": True}
    for prompt in ("The old", ["The old", "SELECT"]):
        every = server.complete(prompt, n=8, **fields)
        best = server.complete(prompt, n=3, best_of=8, **fields)
        count = 1 if isinstance(prompt, str) else 2
        assert [c["index"] for c in best["choices"]] == list(range(3 * count)) and best["usage"] == every["usage"]
        for at in range(count):
            mine = every["choices"][8 * at:8 * at + 8]
            mean = [sum(c["logprobs"]["token_logprobs"]) / len(c["token_ids"]) for c in mine]
            order = sorted(range(8), key=lambda k: (-round(mean[k], 6), k))
            wanted = [mine[k] | {"index": 3 * at + place} for place, k in enumerate(order[:3])]
            assert best["choices"][3 * at:3 * at + 3] == wanted
    # Their lengths differ: what counts is the mean, not the sum. Any of these seeds may have the same best by both; some do not.
    differ = 0
    for seed in range(12):
        uneven = {"temperature": 1.3, "seed": seed, "max_tokens": 30, "logprobs": 0, "stop": [" "]}
        values = [c["logprobs"]["token_logprobs"] for c in server.complete("The old", n=6, **uneven)["choices"]]
        mean = [sum(v) / len(v) for v in values]
        wanted = sorted(mean, reverse=True)[:2]
        best = server.complete("The old", n=2, best_of=6, **uneven)["choices"]
        assert [sum(v) / len(v) for v in (c["logprobs"]["token_logprobs"] for c in best)] == pytest.approx(wanted, abs=1e-6)
        differ += max(values, key=sum) != max(values, key=lambda v: sum(v) / len(v))
    assert differ > 0
    assert len(server.complete("x", n=25, best_of=25, max_tokens=1)["choices"]) == 25
    plain = server.complete("The old", n=1, best_of=8, **{k: v for k, v in fields.items() if k != "logprobs"})["choices"]
    assert plain[0]["logprobs"] is None and plain[0]["token_ids"] == server.complete("The old", best_of=8, **fields)["choices"][0]["token_ids"]
    assert server.complete("x", max_tokens=0, best_of=4, n=2)["usage"]["completion_tokens"] == 0


# ---- 1: errors ----

def test_messages_are_short_and_valid(server):
    """Long and odd values of the client are quoted in part, as valid UTF-8; no rate limit is spoken of where there is none."""
    for body in ({"prompt": "x", "model": "\U0001F600" * 5000}, {"prompt": "x", "model": "\0" * 500}, {"prompt": "x", "model": "\x7f\u2028\"\\\n" * 90},
                 {"prompt": "x", "n": "429 rate limit"}, {"prompt": "x" * 100_000}, {"prompt": [VOCAB]}, {"prompt": "x", "temperature": 9}):
        answer = server.post("/v1/completions", body)
        message = answer.json()["error"]["message"]
        assert 400 <= answer.status_code < 500 and len(message) < 500 and "429" not in message and "rate limit" not in message.lower()
        assert "/home" not in message and ".c:" not in message and "0x" not in message
    for name, shown in (("a\0b", "a\ufffdb"), ("\U0001F600" * 30, "\U0001F600" * 25), ("xyz" + "\u00e9" * 90, "xyz" + "\u00e9" * 48)):
        assert f"'{shown}'" in error_of(server.post("/v1/completions", {"prompt": "x", "model": name}), 404, "model_not_found", "model")


def test_codes_are_strings(server):
    for answer, status, code, param in ((server.get("/nope"), 404, "unknown_url", None), (server.post("/v1/models", {}), 405, "method_not_allowed", None),
                                        (server.post("/v1/completions", {}), 400, "missing_required_parameter", "prompt"),
                                        (server.get("/v1/models/none"), 404, "model_not_found", "model"), (send(server, b"{"), 400, "invalid_json", None)):
        error_of(answer, status, code, param)
        assert "x-request-id" in answer.headers


def test_order_of_checks_to_the_end(launch):
    """Each fault alone shows once those before it are mended."""
    server = launch("--api-key", "k", "--max-body-bytes", "2000")
    key = {"Authorization": "Bearer k"}
    big, bad = b"x" * 3000, b"not json"

    def code(method, path, data=None, **headers):
        answer = requests.request(method, server.url + path, data=data, headers=headers, timeout=20)
        return answer.status_code if answer.status_code == 204 else answer.json()["error"]["code"]

    text = {"Content-Type": "text/plain"}
    assert code("PUT", "/nope", big, **text) == "unknown_url"
    assert code("OPTIONS", "/v1/completions", big, **text) == 204
    assert code("PUT", "/v1/completions", big, **text) == "method_not_allowed"
    assert code("POST", "/v1/completions", big, **text) == "invalid_api_key"
    assert code("POST", "/v1/completions", big, **text, **key) == "request_too_large"
    assert code("POST", "/v1/completions", bad, **text, **key) == "unsupported_content_type"
    assert code("POST", "/v1/completions", bad, **key) == "invalid_json"
    assert code("POST", "/v1/completions", iter([big]), **key, **{"Content-Type": "application/json"}) == "request_too_large"
    assert code("POST", "/v1/completions", b'{"prompt":[99999],"n":0,"model":"no"}', **key) == LOW_INT
    assert code("POST", "/v1/completions", b'{"prompt":[99999],"model":"no"}', **key) == "model_not_found"
    assert code("POST", "/v1/completions", b'{"prompt":[99999],"max_tokens":99999}', **key) == "invalid_value"
    assert code("POST", "/v1/completions", b'{"prompt":[5],"max_tokens":99999}', **key) == "context_length_exceeded"


# ---- 9 and 12: streams, limits, headers ----

def test_cors(launch):
    server = launch("--cors-origin", "*", "--api-key", "k", deltas=None)
    key = {"Authorization": "Bearer k"}
    preflight = requests.options(server.url + "/v1/completions", headers={"Origin": "http://a.example", "Access-Control-Request-Method": "POST",
                                                                          "Access-Control-Request-Headers": "authorization,content-type"})
    assert preflight.status_code == 204 and preflight.headers["access-control-allow-origin"] == "*"
    assert preflight.headers["access-control-allow-methods"] == "GET, POST, OPTIONS" and int(preflight.headers["access-control-max-age"]) > 0
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    body = {"prompt": "a", "max_tokens": 1}
    for answer in (requests.get(server.url + "/v1/models", headers=key), requests.get(server.url + "/v1/models"), requests.get(server.url + "/nope"),
                   requests.post(server.url + "/v1/completions", json=body, headers=key), requests.post(server.url + "/v1/completions", json={}, headers=key),
                   requests.post(server.url + "/v1/completions", json=body | {"stream": True}, headers=key), requests.put(server.url + "/health")):
        assert answer.headers["access-control-allow-origin"] == "*" and answer.headers["access-control-expose-headers"] == "x-request-id, retry-after"
    assert "access-control-allow-origin" not in requests.get(server.admin_url + "/health").headers
    one = launch("--cors-origin", "https://chat.example", deltas=None)
    assert one.get("/health").headers["access-control-allow-origin"] == "https://chat.example"


def limited(server, limit):
    return server.metric("bd_http_limited_total", limit=limit)


def test_limits_have_errors_and_counters(launch):
    """Every limit of the table: what a client is told, and that it is counted."""
    server = launch("--max-body-bytes", "300000", "--max-upload-bytes", "700000", "--max-response-bytes", "200000", "--max-connections", "40",
                    "--request-header-seconds", "1", "--request-body-seconds", "1", deltas=None)
    for limit in ("connections", "body_bytes", "upload_bytes", "queue", "stream_bytes", "response_bytes", "header_seconds", "body_seconds"):
        assert limited(server, limit) == 0
    error_of(send(server, b"x" * 300_001), 413, "request_too_large")
    error_of(send(server, iter([b"x" * 300_001])), 413, "request_too_large")
    assert limited(server, "body_bytes") == 2
    message = error_of(server.post("/v1/completions", {"prompt": ["a"] * 200, "max_tokens": 50, "ignore_eos": True, "logprobs": 20}), 400, "invalid_value")
    assert "too large" in message and limited(server, "response_bytes") == 1
    held = []
    for _ in range(3):  # bodies that are not finished yet
        held.append(server.connect())
        held[-1].sendall(request(headers=["Content-Length: 290000"]) + b"x" * 250_000)
    eventually(lambda: limited(server, "upload_bytes") == 1, what="refused upload")
    eventually(lambda: limited(server, "body_seconds") >= 2, seconds=20, what="slow bodies")
    for raw in held:
        raw.close()
    silent = server.connect()
    silent.sendall(b"GET /health HT")
    assert silent.recv(100) == b""
    assert limited(server, "header_seconds") >= 1
    eventually(lambda: server.metric("bd_http_upload_bytes") == 0, what="no body held")
    server.session.close()  # its connection was there before the others and would be served
    many = [server.connect() for _ in range(45)]
    eventually(lambda: (answer := server.get("/version")).status_code == 429 and answer.headers["retry-after"], what="too many connections")
    for raw in many:
        raw.close()
    eventually(lambda: server.get("/version").status_code == 200, what="room again")
    assert limited(server, "connections") >= 1


def test_upload_limit_is_429(launch):
    server = launch("--max-upload-bytes", "100000", deltas=None)
    answer = send(server, b'{"prompt":"' + b"x" * 200_000 + b'"}')
    error_of(answer, 429, "rate_limit_exceeded")
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert server.complete("a", max_tokens=1)["choices"]


def test_queue_limit_is_counted(launch):
    server = launch("--max-queue", "2", "--max-seqs", "1", deltas=None)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        body = {"prompt": "a", "max_tokens": 300, "ignore_eos": True}
        codes = list(pool.map(lambda _: requests.post(server.url + "/v1/completions", json=body).status_code, range(16)))
    assert codes.count(429) == limited(server, "queue") > 0


def test_a_slow_reader_is_counted(launch):
    server = launch("--max-stream-bytes", "20000", deltas=None)
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", server.port))
    raw.sendall(request(body={"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True, "n": 8, "logprobs": 20,
                              "stream_options": {"include_usage": True}}))
    eventually(lambda: limited(server, "stream_bytes") == 1, seconds=60, what="lost stream")
    # What was made before comes, then the error, [DONE] and the end of the connection; no usage.
    raw.settimeout(60)
    data = b""
    while piece := raw.recv(65536):
        data += piece
    raw.close()
    last = [line for line in data.split(b"\r\n") if line.startswith(b"data: ")][-3:]
    assert last[2] == b"data: [DONE]\n\n" and json.loads(last[1][6:])["error"]["code"] == "request_timeout" and b'"usage":null' in last[0]
    assert b'"usage":{' not in data


def test_idle_connections_are_closed(launch):
    server = launch("--idle-seconds", "1", deltas=None)
    raw = server.connect()
    raw.sendall(request("GET", "/health"))
    assert Reader(raw).answer().status == 200
    assert raw.recv(100) == b""


def test_waiting_for_generation_has_no_limit(launch):
    """A request that came in time may wait longer than heads, bodies and idle connections may take."""
    server = launch("--request-header-seconds", "1", "--request-body-seconds", "1", "--idle-seconds", "1", "--max-seqs", "1")
    holder, waits = server.connect(), server.connect(seconds=60)
    long = {"prompt": "a", "ignore_eos": True}
    holder.sendall(request(body=long | {"max_tokens": 2000, "stream": True, "n": 50}))
    reader = Reader(holder)
    reader.head()
    waits.sendall(request(body=long | {"max_tokens": 2}))
    until = time.monotonic() + 4
    while time.monotonic() < until:
        reader.chunk()
    assert server.metric("vllm:num_requests_waiting") >= 1
    holder.close()
    assert Reader(waits).answer().status == 200


def test_stream_comments(launch):
    """A stream that waits behind others is commented, each comment by itself. One place: between the two choices of the stream the variants have
    their turns, of thousands of steps until it was commented."""
    server = launch("--stream-comment-seconds", "1", "--max-seqs", "1")
    plug, raw, others = server.connect(), server.connect(), [server.connect() for _ in VARIANTS[:6]]
    for model in VARIANTS[:6]:
        server.complete("a", model, max_tokens=1)  # resident from now on
    long = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True}
    plug.sendall(request(body=long | {"stream": True}))
    Reader(plug).head()
    raw.sendall(request(body={"prompt": "a", "max_tokens": 2, "stream": True, "ignore_eos": True, "n": 2}))
    eventually(lambda: server.metric("vllm:num_requests_waiting") == 2, what="the stream in the queue")
    for other, model in zip(others, VARIANTS):
        other.sendall(request(body=long | {"model": model}))
    eventually(lambda: server.metric("vllm:num_requests_waiting") == 2 + len(others), what="the others in the queue")
    plug.close()
    reader, comments, events = Reader(raw), [], b""
    reader.head()
    while piece := reader.chunk():
        if piece.startswith(b"data: "):
            events += piece
            continue
        comments.append(piece)
        for other in others:
            other.close()
    assert set(comments) == {b": keep-alive\n\n"} and len(events_of(events)) == 4


def test_metric_samples(server):
    """A request of T tokens adds one first token and T - 1 gaps."""
    names = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
             "request_prompt_tokens", "request_generation_tokens")
    count = lambda: {name: server.metric(f"vllm:{name}_count") for name in names}
    eventually(lambda: server.metric("vllm:num_requests_running") == 0, what="idle server")
    server.complete("a", max_tokens=1)
    before = count()
    server.complete("x", max_tokens=7, ignore_eos=True)
    added = {name: value - before[name] for name, value in count().items()}
    assert added == {name: 6 if name == "inter_token_latency_seconds" else 1 for name in names}
    for name in ("vllm:kv_cache_usage_perc", "vllm:num_preemptions_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"):
        assert server.metric(name) >= 0
    assert server.metric("vllm:request_success_total", finished_reason="length") > 0
    steps, rows = server.metric("bitdelta_steps_total"), server.metric("bitdelta_step_rows_total")
    server.complete("x y z", max_tokens=7, ignore_eos=True)
    assert server.metric("bitdelta_steps_total") == steps + 7
    assert server.metric("bitdelta_step_rows_total") >= rows + 7
    assert server.metric("bitdelta_step_seconds_total", part="launch") > 0 and server.metric("bitdelta_step_seconds_total", part="wait") >= 0
    assert server.metric("vllm:prompt_tokens_total", model_name=BASE) > 0


def test_rows_of_a_step(launch):
    """On the CPU 512 tokens where nobody says otherwise, and a prompt that does not end in them leaves half to others."""
    for options, steps, first in (((), 3, 1), (("--max-batch-tokens", "100"), 13, 1), (("--prefill-chunk-tokens", "700"), 3, 0)):
        server = launch("--backend", "cpu", *options)
        before = server.metric("bitdelta_steps_total")
        prompts = [[4 + i * k % 4000 for i in range(1, n + 1)] for n, k in ((1200, 7), (60, 11))]
        body = {"model": BASE, "prompt": prompts, "max_tokens": 1, "stream": True, "ignore_eos": True}
        events = events_of(requests.post(server.url + "/v1/completions", json=body, timeout=60).content)
        assert [e["choices"][0]["index"] for e in events if e.get("choices")][0] == first
        assert server.metric("bitdelta_steps_total") - before == steps


def test_no_redirects_no_compression(server):
    for path in ("/v1/models/", "/v1//models", "/health/", "//health"):
        answer = requests.get(server.url + path, allow_redirects=False, headers={"Accept-Encoding": "gzip, br, zstd"}, timeout=20)
        assert answer.status_code == 200 and "content-encoding" not in answer.headers


def test_chunked_and_declared_bodies_agree(server):
    body = json.dumps({"prompt": "a", "max_tokens": 3, "temperature": 0}).encode()
    raw = server.connect()
    raw.sendall(request(headers=["Transfer-Encoding: chunked"]) + chunked(body[:7], body[7:]) + request(body=body))
    reader = Reader(raw)
    first, second = (reader.answer().json for _ in range(2))
    assert first["choices"] == second["choices"]


# ---- 11: tokenizer_info, openapi ----

def test_tokenizer_info(server):
    """What the directory says, with the tokens as texts; the harness's own probe takes it."""
    info = strict_json(server.get("/tokenizer_info").content)
    own = json.loads((ROOT / "demo/zen-mini/tokenizer_config.json").read_text())
    texts = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template", "tokenizer_class")
    assert {k: v for k, v in info.items() if k not in texts} == {k: v for k, v in own.items() if k not in texts}
    assert info["bos_token"] == "<|begin_of_text|>" and info["eos_token"] == "<|end_of_text|>" and info["tokenizer_class"] == own["tokenizer_class"]
    assert info["chat_template"] is None and set(texts) <= set(info)
    for token, number in ((info["bos_token"], BOS), (info["eos_token"], BOS + 1)):
        assert server.post("/tokenize", {"prompt": token, "add_special_tokens": False}).json()["tokens"] == [number]


def test_tokenizer_info_of_other_directories(launch, tmp_path):
    import shutil
    base = tmp_path / "zen-mini"
    shutil.copytree(ROOT / "demo/zen-mini", base)
    path = base / "tokenizer_config.json"

    def serve(config):
        path.write_text(config) if config is not None else path.unlink()
        return launch("--base", str(base), "--admin", "none", deltas=None).get("/tokenizer_info")

    info = serve('{"eos_token":{"content":"<|end_of_text|>","__type":"AddedToken"},"chat_template":[{"name":"default","template":"{{ 1 }}\\n"}],"n":1e30}').json()
    assert info == {"n": 1e30, "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "pad_token": None, "unk_token": None,
                    "chat_template": "{{ 1 }}", "eos_token": "<|end_of_text|>"}
    assert serve("{}").json()["eos_token"] == "<|end_of_text|>"  # of the end ids in config.json
    error_of(serve(None), 404, "unknown_url")


def test_description_is_the_shipped_one(server):
    shipped = (ROOT / "configs/openapi.json").read_bytes()
    answer = server.get("/openapi.json")
    assert answer.content == shipped and answer.headers["content-type"] == "application/json"
    described = json.loads(shipped)
    assert described["info"]["version"] == server.get("/version").json()["version"]
    for path, methods in described["paths"].items():
        allowed = requests.options(server.url + path.replace("{id}", BASE)).headers["allow"].split(", ")
        assert {m.upper() for m in methods} == set(allowed) - {"HEAD", "OPTIONS"}


# ---- 6: numbers ----

def test_equal_keys_keep_the_larger(server):
    """Greedy tokens are always the maximum of their own position, as harnesses ask; the printed numbers are the same."""
    for logprobs in (0, 1, 5, 20):
        choice = server.complete(["The sea", "é😀", "def f("], max_tokens=12, logprobs=logprobs, echo=True, ignore_eos=True)["choices"]
        for lists in (c["logprobs"] for c in choice):
            for at in range(1, len(lists["tokens"])):
                top, token, value = lists["top_logprobs"][at], lists["tokens"][at], lists["token_logprobs"][at]
                assert value is not None and top[token] >= value and value in top.values() or top[token] > value
                assert 1 <= len(top) <= logprobs + 1 and all(-9999.0 <= v <= 0 for v in top.values())
            new = len(lists["tokens"]) - 12
            assert all(lists["token_logprobs"][at] == max(lists["top_logprobs"][at].values()) for at in range(new, len(lists["tokens"])))


def test_same_numbers_alone_and_in_chunks(server):
    whole = server.complete("The sea", max_tokens=10, logprobs=3, ignore_eos=True)["choices"][0]["logprobs"]
    events = server.stream("The sea", max_tokens=10, logprobs=3, ignore_eos=True)
    joined = {k: sum((e["choices"][0]["logprobs"][k] for e in events), []) for k in whole}
    assert joined == whole


def test_truncated_by_the_context(server):
    answer = server.post("/v1/completions", {"prompt": [5] * (CONTEXT - 5), "ignore_eos": True, "temperature": 0}).json()
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 5


def test_priority_orders_the_queue():
    """One at a time: of those that wait the lowest number runs next, and among equals whoever came first."""
    server = start_server("--max-seqs", "1")

    def ask(priority, prompt="x"):
        body = {"prompt": prompt, "max_tokens": 2000, "ignore_eos": True, "stream": True, "priority": priority}
        raw = server.connect()
        raw.sendall(request(body=body))
        return raw

    try:
        first, waiting, order = ask(-9, ["x"] * 20), {}, []  # long enough for all to come
        eventually(lambda: server.metric("vllm:num_requests_waiting") == 19, what="first request")
        for number, priority in enumerate([3, 0, 7, 0, -2, 3]):
            waiting[ask(priority)] = (priority, number)
            eventually(lambda: server.metric("vllm:num_requests_waiting") == 20 + number, what="queue")
        first.close()
        heard = dict.fromkeys(waiting, b"")
        while waiting:  # whoever speaks has the place, and leaves it
            for raw in select.select(list(waiting), [], [], 60)[0]:
                heard[raw] += raw.recv(65536)
                if b"data: {" in heard[raw]:
                    order.append(waiting.pop(raw))
                    raw.close()
        assert order == sorted(order)
    finally:
        server.stop()
