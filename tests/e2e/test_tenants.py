"""Tenants: who may use what, and how much of it, on the real server. Nothing depends on how fast the machine is: limits that must
hold during a test come back too slowly to matter, those that must come back are waited for."""

import hashlib
import json
import re
import shutil
import signal
import socket
import subprocess
import threading
import time

import openai
import pytest
import requests
from conftest import BASE, BINARY, ROOT, VARIANTS, error_of, events_of, eventually
from raw_http import Reader, request
from variants_support import copy_variant

C, SQL, MATH = "zen-mini-c", "zen-mini-sql", "zen-mini-math"
KEYS = {name: f"key-of-{name}-9f3a" for name in ("alpha", "beta", "gamma", "delta")}
WRONG_KEY = b'{"error":{"message":"Incorrect API key provided or no key given.","type":"authentication_error","param":null,"code":"invalid_api_key"}}'
IDS = [7, 8, 9, 10, 11]


def hashed(key):
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def tenant(name, variants="*", **fields):
    return {"name": name, "keys": [hashed(KEYS[name])], "variants": variants, **fields}


def write(path, *tenants):
    path.write_text(json.dumps({"tenants": list(tenants)}))
    return path


def bearer(name):
    return {"Authorization": "Bearer " + KEYS[name]}


def ask(server, name, prompt=IDS, path="/v1/completions", **fields):
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    return requests.post(server.url + path, json=body, headers=bearer(name), timeout=120)


def usage(server, name):
    listed = requests.get(server.admin_url + "/admin/tenants", timeout=20).json()["tenants"]
    return {t["name"]: t for t in listed}[name]


def idle(server, *names):
    def look():
        seen = [usage(server, name) for name in names]
        return all(t["requests_now"] == 0 and t["sequences_now"] == 0 for t in seen)

    eventually(look, what="everything given back")


def samples(text, name, **labels):
    """{labels as text: value} of a metric."""
    found = {}
    for line in text.splitlines():
        if (sample := re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", line)) and sample.group(1) == name:
            have = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', sample.group(2) or ""))
            if all(have.get(k) == v for k, v in labels.items()):
                found[sample.group(2) or ""] = float(sample.group(3))
    return found


def admin_metrics(server):
    return requests.get(server.admin_url + "/metrics", timeout=20).text


def reload(server, status=200):
    answer = requests.post(server.admin_url + "/admin/reload", timeout=20)
    assert answer.status_code == status, answer.text
    return answer


def no_secrets(text):
    for key in KEYS.values():
        assert key not in text and hashed(key)[7:] not in text and hashed(key)[7:23] not in text


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("tenants")


@pytest.fixture(scope="module")
def shared(home):
    """Three tenants without limits: some variants and the base, all, and one variant without the base."""
    from conftest import start_server

    path = write(home / "shared.json", tenant("alpha", [C, BASE], weight=2), tenant("beta"), tenant("gamma", [SQL], priority_min=-5), tenant("delta", priority_min=2))
    running = start_server("--tenants", str(path))
    yield running
    assert running.stop() == 0, "\n".join(running.lines[-40:])
    no_secrets("\n".join(running.lines))
    assert not [line for line in running.lines if "level=error" in line or "Sanitizer" in line]


# ---- Keys ----

GUARDED = [("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("HEAD", "/v1/models"), ("GET", f"/v1/models/{BASE}"),
           ("GET", "/v1/models/a%2Fb"), ("GET", "/v1/models/a/b"), ("GET", "/v1/models/%00"), ("GET", "//v1//models//"), ("GET", "/v1/models?key=x"),
           ("GET", "http://x/v1/models"), ("POST", "/tokenize"), ("POST", "//tokenize/"), ("POST", "/detokenize"), ("GET", "/tokenizer_info"), ("HEAD", "/tokenizer_info")]
OPEN = [("GET", "/health"), ("HEAD", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/version"), ("GET", "/metrics"), ("GET", "/openapi.json")]
UNKNOWN = ["/", "/v1", "/V1/models", "/v1/Models", "/v1/%6dodels", "/%2fv1/models", "/admin/tenants", "/admin/reload", "/v1/load_lora_adapter", "/v1/models\\"]


def raw_ask(server, method, path, headers=()):
    raw = server.connect()
    body = b"{}" if method == "POST" else None
    raw.sendall(request(method, path, body, [*headers, "Connection: close"]))
    answer = Reader(raw).answer(head_only=method == "HEAD")
    raw.close()
    return answer


def test_every_route_needs_a_key(shared):
    described = set(json.loads((ROOT / "configs/openapi.json").read_text())["paths"])
    assert described <= {path for _, path in GUARDED + OPEN} | {"/v1/models/{id}"}
    wrong = [(), ("Authorization: Bearer ",), ("Authorization: Bearer wrong",), (f"Authorization: Basic {KEYS['alpha']}",), (f"Authorization: {KEYS['alpha']}",),
             (f"Authorization: Bearer {KEYS['alpha']}x",), (f"Authorization: Bearer {KEYS['alpha'][:-1]}",), (f"Authorization: Bearer {hashed(KEYS['alpha'])}",),
             (f"X-Api-Key: {KEYS['alpha']}",)]
    for method, path in GUARDED:
        if path.endswith("%00"):
            continue  # refused as malformed before any key
        for headers in wrong:
            answer = raw_ask(shared, method, path, headers)
            assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer", (method, path, headers, answer.status)
            assert answer.body == (b"" if method == "HEAD" else WRONG_KEY)
        with_key = raw_ask(shared, method, path, [f"Authorization: bEARER  {KEYS['alpha']}"])
        assert with_key.status in (200, 400, 404) and with_key.body != WRONG_KEY, (method, path)
        assert raw_ask(shared, "OPTIONS", path).status == 204
    for method, path in OPEN:
        assert raw_ask(shared, method, path).status == 200, path
    for path in UNKNOWN:
        for method in ("GET", "POST"):
            answer = raw_ask(shared, method, path)
            assert answer.status == 404 and answer.code == "unknown_url", path


def test_a_variant_that_is_not_theirs_does_not_exist(shared):
    """The same bytes as for a name that nobody has."""
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
                       ("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
        for stream in (False, True):
            answers = [requests.post(shared.url + path, json={**body, "model": name, "stream": stream}, headers=bearer("alpha"), timeout=20)
                       for name in (SQL, "zen-mini-???")]
            for answer in answers:
                error_of(answer, 404, "model_not_found", "model")
            assert answers[0].content == answers[1].content.replace(b"zen-mini-???", SQL.encode()), path
            same = [{k: v for k, v in a.headers.items() if k.lower() not in ("date", "x-request-id", "content-length")} for a in answers]
            assert same[0] == same[1] and len(answers[0].content) == len(answers[1].content)
    answers = [requests.get(f"{shared.url}/v1/models/{name}", headers=bearer("alpha"), timeout=20) for name in (SQL, "zen-mini-xyz")]
    assert answers[0].status_code == 404 and answers[0].content == answers[1].content.replace(b"zen-mini-xyz", SQL.encode())


def test_models_are_the_tenants_own(shared):
    def listed(name):
        return [m["id"] for m in requests.get(shared.url + "/v1/models", headers=bearer(name), timeout=20).json()["data"]]

    assert listed("alpha") == [BASE, C] and listed("beta") == [BASE, *VARIANTS] and listed("gamma") == [SQL]
    for name, models in (("alpha", [BASE, C]), ("gamma", [SQL])):
        for model in models:
            assert ask(shared, name, model=model).json()["model"] == model
    # No model named: the base, which is not gamma's.
    assert ask(shared, "alpha").json()["model"] == BASE
    message = error_of(ask(shared, "gamma"), 404, "model_not_found", "model")
    assert BASE not in message
    error_of(ask(shared, "gamma", model=BASE), 404, "model_not_found", "model")
    error_of(requests.get(f"{shared.url}/v1/models/{BASE}", headers=bearer("gamma"), timeout=20), 404, "model_not_found", "model")
    for name in (SQL, MATH):
        assert ask(shared, "beta", "x", "/tokenize", model=name).status_code == 200
    error_of(ask(shared, "gamma", "x", "/tokenize", model=MATH), 404, "model_not_found", "model")


def test_asking_for_it_keeps_nothing(launch, home):
    """A variant that was refused to somebody goes like any other when its files go."""
    deltas = home / "going"
    for name in (C, SQL):
        copy_variant(name, deltas / name)
    server = launch("--tenants", str(write(home / "going.json", tenant("alpha", [BASE]), tenant("beta"))), deltas=str(deltas))
    assert ask(server, "beta", model=C).status_code == 200
    for path, body in (("/v1/completions", {}), ("/tokenize", {}), ("/v1/completions", {"stream": True})):
        error_of(ask(server, "alpha", "x", path, model=C, **body), 404, "model_not_found", "model")
    requests.get(server.url + "/v1/models", headers=bearer("alpha"), timeout=20)
    shutil.rmtree(deltas / C)
    assert requests.post(server.admin_url + "/admin/rescan", timeout=20).json()["removed"] == [C]

    def names():
        return [v["name"] for v in requests.get(server.admin_url + "/admin/variants", timeout=20).json()["variants"]]

    eventually(lambda: names() == [SQL], what="an end of the variant")


def test_sdk(shared):
    with openai.OpenAI(base_url=shared.url + "/v1", api_key=KEYS["alpha"], max_retries=0, timeout=60) as client:
        assert [m.id for m in client.models.list()] == [BASE, C]
        assert client.completions.create(model=C, prompt="int", max_tokens=2).choices[0].text
        with pytest.raises(openai.NotFoundError) as fault:
            client.completions.create(model=SQL, prompt="x")
        assert fault.value.code == "model_not_found" and fault.value.param == "model"
    with openai.OpenAI(base_url=shared.url + "/v1", api_key="nobody", max_retries=0, timeout=60) as client:
        with pytest.raises(openai.AuthenticationError) as fault:
            client.models.list()
        assert fault.value.code == "invalid_api_key" and "Incorrect API key provided" in fault.value.message


def test_priority_is_granted(shared):
    message = error_of(ask(shared, "alpha", priority=-1), 400, "integer_below_min_value", "priority")
    assert "0" in message
    assert ask(shared, "alpha", priority=3).status_code == 200 and ask(shared, "gamma", priority=-5, model=SQL).status_code == 200
    error_of(ask(shared, "gamma", priority=-6, model=SQL), 400, "integer_below_min_value", "priority")
    assert ask(shared, "delta").status_code == 200 and ask(shared, "delta", priority=2).status_code == 200  # who asks for none gets what there is
    error_of(ask(shared, "delta", priority=0), 400, "integer_below_min_value", "priority")


# ---- What one tenant does is not seen by another ----


def hits(server):
    return sum(samples(admin_metrics(server), "vllm:prefix_cache_hits_total").values())


def test_prefixes_are_not_shared(shared):
    """Whether a prompt was seen before shows in the time it takes: only its own tenant may find it."""
    for model in (BASE, C):
        prompt = [100 + (i * 37 + len(model)) % 3000 for i in range(130)]
        before = hits(shared)
        assert ask(shared, "alpha", prompt, model=model).status_code == 200
        assert hits(shared) == before
        assert ask(shared, "alpha", prompt, model=model).status_code == 200
        own = hits(shared)
        assert own >= before + 112
        assert ask(shared, "beta", prompt, model=model).status_code == 200
        assert hits(shared) == own, "another tenant's prompt was found"
        assert ask(shared, "beta", prompt, model=model).status_code == 200
        assert hits(shared) >= own + 112


def test_metrics(shared):
    ask(shared, "alpha", model=C)
    ask(shared, "gamma", model=SQL, stream=True)
    idle(shared, "alpha", "gamma")
    public, admin = shared.get("/metrics").text, admin_metrics(shared)
    for word in (C, SQL, "alpha", "gamma", "tenant="):
        assert word not in public, word
    assert f'variant="{C}"' in admin and 'tenant="alpha"' in admin and f'model_name="{SQL}"' in admin
    for name in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:e2e_request_latency_seconds_count", "vllm:inter_token_latency_seconds_count",
                 "vllm:request_success_total", "bitdelta_requests_total", "bitdelta_delta_loads_total"):
        assert sum(samples(public, name).values()) == sum(samples(admin, name).values()) > 0 or "inter_token" in name, name
    assert list(samples(public, "vllm:prompt_tokens_total")) == [f'model_name="{BASE}"']
    seen = [line.split(" ")[0] for line in admin.splitlines() if not line.startswith("#")]
    assert len(seen) == len(set(seen)), "a series twice"
    mine = usage(shared, "gamma")
    assert sum(samples(admin, "bitdelta_tenant_requests_total", tenant="gamma", result="ok").values()) == mine["results"]["ok"] > 0
    assert sum(samples(admin, "bitdelta_tenant_prompt_tokens_total", tenant="gamma").values()) == mine["prompt_tokens"] >= len(IDS)
    assert sum(samples(admin, "bitdelta_tenant_generation_tokens_total", tenant="gamma").values()) == mine["generated_tokens"] >= 1
    assert sum(samples(admin, "bitdelta_tenant_sequences", tenant="gamma").values()) == 0
    waits = sum(samples(admin, "bitdelta_tenant_wait_seconds_count", tenant="gamma").values())
    assert waits == sum(samples(admin, "bitdelta_tenant_wait_seconds_bucket", tenant="gamma", le="+Inf").values()) >= 1
    no_secrets(public + admin)


def test_metrics_public(launch, home):
    server = launch("--tenants", str(write(home / "public.json", tenant("alpha"))), "--metrics-public")
    ask(server, "alpha", model=C)
    names = [{line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith(("#", "bd_http_"))} for text in (server.get("/metrics").text, admin_metrics(server))]
    assert names[0] == names[1]
    for series in ('bitdelta_tenant_requests_total{result="ok",tenant="alpha"}', 'bitdelta_tenant_service_tokens_total{tenant="alpha"}',
                   f'vllm:prompt_tokens_total{{model_name="{C}"}}'):
        assert series in names[0], series


def test_unused_tenants_have_no_series(launch, home):
    """A file of thousands does not make thousands of series: each begins with its tenant's first request."""
    server = launch("--tenants", str(write(home / "unused.json", tenant("alpha"), tenant("beta"), tenant("gamma", [SQL]))))
    seen = set()
    for name in (None, "alpha", "beta"):
        if name:
            assert ask(server, name).status_code == 200
            idle(server, name)
            seen.add(name)
        text = admin_metrics(server)
        assert set(re.findall(r'tenant="([^"]*)"', text)) == seen, text


def test_admin_list(shared):
    answer = requests.get(shared.admin_url + "/admin/tenants", timeout=20)
    alpha, beta, gamma, delta = listed = answer.json()["tenants"]
    assert [one["name"] for one in listed] == ["alpha", "beta", "gamma", "delta"] and len({one["id"] for one in listed}) == 4
    assert alpha["weight"] == 2 and alpha["variants"] == sorted([BASE, C]) and beta["variants"] == "*" and alpha["keys"] == 1
    assert alpha["requests_per_minute"] is None and alpha["tokens_left"] is None and alpha["max_concurrent"] is None and gamma["priority_min"] == -5 and delta["priority_min"] == 2
    no_secrets(answer.text)
    error_of(requests.get(shared.url + "/admin/tenants", timeout=20), 404, "unknown_url")


# ---- Limits ----


def limited(answer, words):
    message = error_of(answer, 429, "rate_limit_exceeded")
    assert words in message, message
    seconds = answer.headers["retry-after"]
    assert re.fullmatch(r"[1-9]\d*", seconds)
    return int(seconds)


def test_requests_per_minute(launch, home):
    """One a minute, two at once."""
    path = write(home / "rpm.json", tenant("alpha", requests_per_minute=1, request_burst=2), tenant("beta"))
    server = launch("--tenants", str(path))
    assert ask(server, "alpha").status_code == 200
    assert ask(server, "alpha", "x", "/tokenize").status_code == 200  # that is work too
    for _ in range(3):
        assert limited(ask(server, "alpha"), "requests per minute") <= 60
        limited(ask(server, "alpha", stream=True), "requests per minute")
    limited(ask(server, "alpha", "x", "/tokenize"), "requests per minute")
    # What comes before in the order of checks is answered first; other tenants and listings are not touched.
    error_of(ask(server, "alpha", model="none"), 404, "model_not_found", "model")
    error_of(ask(server, "alpha", max_tokens=-1), 400, "integer_below_min_value", "max_tokens")
    assert ask(server, "beta").status_code == 200
    assert requests.get(server.url + "/v1/models", headers=bearer("alpha"), timeout=20).status_code == 200
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEYS["alpha"], max_retries=0, timeout=60) as client:
        with pytest.raises(openai.RateLimitError) as fault:
            client.completions.create(model=BASE, prompt="x")
        assert fault.value.code == "rate_limit_exceeded" and int(fault.value.response.headers["retry-after"]) >= 1
    mine = usage(server, "alpha")
    assert mine["limited"]["requests"] == 8 and mine["results"] == {"ok": 2, "refused": 0, "cancelled": 0, "failed": 0} and mine["requests_left"] == 0
    assert sum(samples(admin_metrics(server), "bitdelta_tenant_limited_total", tenant="alpha", limit="requests").values()) == 8


def test_every_kind_of_work_is_a_request(launch, home):
    """Also what is refused later: that there is no template for a chat shows only once it is let in."""
    server = launch("--tenants", str(write(home / "kinds.json", *(tenant(name, requests_per_minute=1) for name in KEYS))))
    for name, path, status, body in (("alpha", "/v1/completions", 200, {"prompt": "x", "max_tokens": 1}), ("beta", "/tokenize", 200, {"prompt": "x"}),
                                     ("gamma", "/detokenize", 200, {"tokens": [5]}),
                                     ("delta", "/v1/chat/completions", 400, {"messages": [{"role": "user", "content": "x"}]})):
        first, second = (requests.post(server.url + path, json=body, headers=bearer(name), timeout=20) for _ in range(2))
        assert first.status_code == status, first.text
        limited(second, "requests per minute")
        assert usage(server, name)["admitted"] == 1


def test_retry_after_is_honest(launch, home):
    """Who waits as long as told is served."""
    path = write(home / "retry.json", tenant("alpha", requests_per_minute=30, request_burst=1), tenant("beta", tokens_per_minute=600, token_burst=40))
    server = launch("--tenants", str(path))
    for name, fields in (("alpha", {"path": "/tokenize", "prompt": "x"}), ("beta", {"prompt": list(range(34))})):
        for _ in range(2):
            refused = next((a for a in (ask(server, name, **fields) for _ in range(100)) if a.status_code == 429), None)
            assert refused is not None, "never limited"
            time.sleep(int(refused.headers["retry-after"]))
            assert ask(server, name, **fields).status_code == 200


def test_tokens_per_minute(launch, home):
    """One token a minute, two hundred at once: what is used is what usage says, the rest comes back."""
    path = write(home / "tpm.json", tenant("alpha", tokens_per_minute=1, token_burst=200), tenant("beta", tokens_per_minute=1, token_burst=50))
    server = launch("--tenants", str(path))
    started, used = time.monotonic(), 0

    def left():
        eventually(lambda: usage(server, "alpha")["requests_now"] == 0, what="idle tenant")
        return usage(server, "alpha")["tokens_left"]

    def check():
        grown = (time.monotonic() - started) / 60 + 1
        assert 200 - used <= left() <= 200 - used + grown, (used, left())

    assert left() == 200
    # Refused after it was admitted: nothing is used, however often.
    for _ in range(5):
        error_of(ask(server, "alpha", [1, 5000], max_tokens=150), 400, "invalid_value", "prompt")
        error_of(ask(server, "alpha", list(range(10)), max_tokens=150, logit_bias={"99999": 1}), 400, "invalid_value", "logit_bias")
    check()
    # Less than was asked for: a stop string, a text whose size was guessed, several choices of one prompt, a chat's default.
    whole = ask(server, "alpha", max_tokens=8).json()
    used += whole["usage"]["total_tokens"]
    stopped = ask(server, "alpha", max_tokens=120, stop=[whole["choices"][0]["text"][:1]]).json()
    used += stopped["usage"]["total_tokens"]
    assert stopped["usage"]["total_tokens"] < 60
    check()
    for fields in ({"prompt": "The old man and the sea", "max_tokens": 4}, {"n": 3, "max_tokens": 3}, {"prompt": [[5, 6], [7]], "max_tokens": 2, "stream": False}):
        used += ask(server, "alpha", **fields).json()["usage"]["total_tokens"]
        check()
    with server.session.post(server.url + "/v1/completions", headers=bearer("alpha"), timeout=60, stream=True,
                             json={"prompt": IDS, "max_tokens": 9, "ignore_eos": True, "stream": True}) as answer:
        events_of(b"".join(answer.iter_content(None)))
    used += len(IDS) + 9
    check()
    # What does not fit now is waited for; what never fits is not.
    room = left()
    limited(ask(server, "alpha", max_tokens=room + 20), "tokens per minute")
    message = error_of(ask(server, "alpha", max_tokens=300), 400, "invalid_value", "max_tokens")
    assert "200 tokens" in message and "305" in message and "429" not in message and "rate limit" not in message.lower()
    assert "245" in error_of(ask(server, "alpha", max_tokens=80, n=3), 400, "invalid_value", "max_tokens")
    long_text = " ".join(f"{i}xq" for i in range(60))
    count = requests.post(server.url + "/tokenize", json={"prompt": long_text}, headers=bearer("beta"), timeout=20).json()["count"]
    assert count > 50 > len(long_text) // 8
    error_of(ask(server, "beta", long_text[: len(long_text)]), 400, "invalid_value", "max_tokens")
    check()
    mine = usage(server, "alpha")
    assert mine["too_large"] == 2 and mine["limited"]["tokens"] == 1 and usage(server, "beta")["too_large"] == 1
    assert mine["prompt_tokens"] + mine["generated_tokens"] == used


def test_a_text_counts_as_its_tokens(launch, home):
    """Once it is tokenised, before it runs: not as the guess from its bytes. A chat without a limit counts 512 new tokens."""
    path = write(home / "text.json", tenant("alpha", tokens_per_minute=1, token_burst=900), tenant("beta"))
    (home / "text.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    server = launch("--tenants", str(path), "--max-seqs", "1", "--chat-template", str(home / "text.jinja"))
    plug = Long(server, "beta")
    talk = {"messages": [{"role": "user", "content": " sea" * 100 + " " * 300}]}
    for body, new in (({"prompt": " the" * 100, "max_tokens": 10}, 10), ({"prompt": "\U0001F600" * 50, "max_tokens": 3, "n": 2}, 6),
                      ({"prompt": "a" * 400, "max_tokens": 0}, 0), ({"prompt": " " * 400, "max_tokens": 5}, 5), (talk, 512), (talk | {"max_tokens": 7}, 7), (talk | {"max_completion_tokens": 600}, 600)):
        asked = {k: v for k, v in body.items() if k in ("prompt", "messages")}
        count = requests.post(server.url + "/tokenize", json=asked, headers=bearer("alpha"), timeout=20).json()["count"]
        before = usage(server, "alpha")["tokens_left"]
        raw = server.connect()
        raw.sendall(request(path="/v1/completions" if "prompt" in body else "/v1/chat/completions", body=body,
                            headers=[f"Authorization: Bearer {KEYS['alpha']}"]))
        eventually(lambda: usage(server, "alpha")["requests_now"] == 1, what="a waiting request")
        wanted = before - count - new
        eventually(lambda: wanted <= usage(server, "alpha")["tokens_left"] <= wanted + 2, what=f"{wanted} left of {before}")
        raw.close()
        idle(server, "alpha")
    plug.close()


class Long:
    """A stream that goes on until it is closed."""

    def __init__(self, server, name, model=None, n=1, tokens=2000):
        body = {"prompt": IDS, "max_tokens": tokens, "ignore_eos": True, "stream": True, "n": n, "temperature": 1.0}
        if model:
            body["model"] = model
        self.raw = server.connect(seconds=120)
        self.raw.sendall(request(body=body, headers=[f"Authorization: Bearer {KEYS[name]}"]))
        self.reader = Reader(self.raw)
        self.status, _ = self.reader.head()

    def rest(self):
        data = b""
        while piece := self.reader.chunk():
            data += piece
        return events_of(data)

    def close(self):
        self.raw.close()


def test_concurrency(launch, home):
    """A stream of as many choices as are allowed keeps others of its tenant out until it is gone."""
    path = write(home / "many.json", tenant("alpha", max_concurrent=100), tenant("beta", max_concurrent=1))
    server = launch("--tenants", str(path))
    first = Long(server, "alpha", n=100)
    assert first.status == 200 and usage(server, "alpha")["sequences_now"] == 100
    assert limited(ask(server, "alpha"), "sequences at once") >= 1
    message = error_of(ask(server, "alpha", n=101), 400, "invalid_value", "n")
    assert "100" in message and "101" in message
    error_of(ask(server, "alpha", [[5]] * 101), 400, "invalid_value", "prompt")
    assert "prompts x best_of" in error_of(ask(server, "beta", best_of=2), 400, "invalid_value", "best_of")
    assert ask(server, "beta").status_code == 200
    first.close()
    eventually(lambda: ask(server, "alpha").status_code == 200, what="room for alpha")
    # One after the other is never too many: the answer comes after the room it took.
    for i in range(40):
        answer = ask(server, "beta", stream=i % 2 == 0, max_tokens=2)
        assert answer.status_code == 200, (i, answer.text)
        assert ask(server, "beta", max_tokens=0 if i % 3 else 1).status_code == 200
    idle(server, "alpha", "beta")
    assert usage(server, "alpha")["results"]["cancelled"] == 1


def test_everything_comes_back(launch, home):
    """Good, refused, faulty and abandoned requests of two tenants at once, over more variants than fit."""
    path = write(home / "chaos.json", tenant("alpha", max_concurrent=64, tokens_per_minute=1000000, requests_per_minute=100000), tenant("beta", [BASE, C, SQL]))
    server = launch("--tenants", str(path), "--slots", "2", "--max-queue", "12")
    faults, ends = [], []

    def client(name, number):
        models = [BASE, C, SQL]
        for i in range(10):
            kind = (number + i) % 5
            if kind == 0:
                long = Long(server, name, models[i % 3]) if i % 2 else None
                if long:
                    long.close()
                continue
            answer = ask(server, name, model=models[i % 3], max_tokens=[4, 4, 30, 9999, 3][kind], n=1 + i % 3, stream=kind == 1)
            if answer.status_code not in ([200, 429] if kind != 3 else [400, 429]):
                faults.append(answer.text)
        ends.append(number)

    threads = [threading.Thread(target=client, args=(("alpha", "beta")[k % 2], k)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and len(ends) == 8, faults[:3]
    idle(server, "alpha", "beta")
    for name in ("alpha", "beta"):
        mine = usage(server, name)
        assert sum(mine["results"].values()) == mine["admitted"] > 0
    assert server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") == 0


def test_slow_reader(launch, home):
    """A stream that nobody reads ends with an error, whatever it still wants to say; its sequences and its share are free again."""
    server = launch("--tenants", str(write(home / "slow.json", tenant("alpha", max_concurrent=16))), "--max-stream-bytes", "4KiB")
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", server.port))
    raw.sendall(request(body={"prompt": IDS, "max_tokens": 2000, "ignore_eos": True, "stream": True, "n": 16, "logprobs": 5},
                        headers=[f"Authorization: Bearer {KEYS['alpha']}"]))
    eventually(lambda: samples(server.get("/metrics").text, "bd_http_limited_total", limit="stream_bytes").popitem()[1] == 1, 60, "slow reader's end")
    eventually(lambda: usage(server, "alpha")["sequences_now"] == 0, 60, "free sequences")
    assert ask(server, "alpha", n=16).status_code == 200
    raw.settimeout(60)
    data = b""
    while piece := raw.recv(65536):
        data += piece
    raw.close()
    assert b'"code":"request_timeout"' in data and b"read too slowly" in data


# ---- The file changes ----


def test_reload(launch, home):
    path = write(home / "reload.json", tenant("alpha", requests_per_minute=1, request_burst=3), tenant("beta"))
    server = launch("--tenants", str(path))
    for _ in range(2):
        assert ask(server, "alpha").status_code == 200
    before = usage(server, "alpha")
    stream = Long(server, "beta", n=2, tokens=900)
    assert stream.status == 200
    # A bad file: named, and nothing changes.
    for text, words in (("{", "not valid JSON"), (json.dumps({"tenants": [tenant("alpha", rate=1)]}), "tenants[0].rate: unknown member")):
        path.write_text(text)
        message = error_of(reload(server, 409), 409, "conflict")
        assert words in message and str(path) in message
        server.find(r"level=error mod=tenants .*" + re.escape(words))
        assert usage(server, "alpha") == before or usage(server, "alpha")["id"] == before["id"]
        assert requests.get(server.url + "/v1/models", headers=bearer("beta"), timeout=20).status_code == 200
    # Beta goes, gamma comes, alpha may use less.
    write(path, tenant("gamma"), tenant("alpha", [C], weight=5, requests_per_minute=1, request_burst=3))
    assert reload(server).json() == {"ok": True, "tenants": 2, "added": 1, "removed": 1}
    assert ask(server, "beta").content == WRONG_KEY and ask(server, "gamma").status_code == 200
    error_of(ask(server, "alpha"), 404, "model_not_found", "model")
    assert ask(server, "alpha", model=C).status_code == 200
    limited(ask(server, "alpha", model=C), "requests per minute")  # three were used in all
    after = usage(server, "alpha")
    assert after["id"] == before["id"] and after["results"]["ok"] == 3 and after["weight"] == 5
    # What beta began goes on to its end.
    events = stream.rest()
    assert [e["choices"][0]["finish_reason"] for e in events].count("length") == 2
    stream.close()
    # The signal does the same.
    write(path, tenant("alpha"), tenant("beta", [SQL]))
    server.process.send_signal(signal.SIGHUP)
    server.find(r"mod=tenants reloaded tenants=2 added=1 removed=1")
    eventually(lambda: ask(server, "beta", model=SQL).status_code == 200, what="beta again")
    assert ask(server, "alpha", model=C).status_code == 200 and usage(server, "beta")["results"]["ok"] == 1
    path.unlink()
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: sum("mod=tenants not reloaded" in line or "not reloaded" in line for line in list(server.lines)) >= 3, what="a complaint")
    assert ask(server, "alpha", model=C).status_code == 200
    no_secrets("\n".join(server.lines))


def test_names_that_are_not_served_are_logged(launch, home):
    """One line a reading, the first of them; none where all are there."""
    path = write(home / "misspelt.json", tenant("alpha", [BASE, C]), tenant("beta", [C, "zen-mini-sqk", "zzz"]), tenant("gamma", ["none"]))
    server = launch("--tenants", str(path))

    def told():
        return [line for line in list(server.lines) if "level=warn mod=tenants" in line]

    eventually(lambda: len(told()) == 1, what="a line about the file")
    assert "tenant=beta may use variant=zen-mini-sqk, which is not served" in told()[0] and "are 2 more names" in told()[0]
    write(path, tenant("alpha", [BASE, C]), tenant("beta", [C, SQL]), tenant("gamma"))
    reload(server)
    assert len(told()) == 1
    write(path, tenant("alpha", ["Zen-mini"]))
    reload(server)
    eventually(lambda: len(told()) == 2, what="a second line")
    assert "tenant=alpha may use variant=Zen-mini, which is not served" in told()[1]


def test_left_and_back(launch, home):
    """A name that leaves the file and comes back is a new tenant, but its series are not there twice."""
    path = home / "back.json"
    server = launch("--tenants", str(write(path, tenant("alpha", requests_per_minute=1), tenant("beta"))))
    assert ask(server, "alpha").status_code == 200 and ask(server, "alpha").status_code == 429
    write(path, tenant("beta"))
    assert reload(server).json()["removed"] == 1 and ask(server, "alpha").content == WRONG_KEY
    write(path, tenant("beta"), tenant("alpha", requests_per_minute=1))
    assert reload(server).json()["added"] == 1
    assert ask(server, "alpha").status_code == 200 and ask(server, "alpha").status_code == 429
    seen = [line.rsplit(" ", 1)[0] for line in admin_metrics(server).splitlines() if not line.startswith("#")]
    assert len(seen) == len(set(seen)), [series for series in seen if seen.count(series) > 1]
    served = samples(admin_metrics(server), "bitdelta_tenant_service_tokens_total", tenant="alpha")
    assert list(served.values()) == [2 * (len(IDS) + 2)]  # each IDS and one token, which counts 2


def test_reload_under_load(launch, home):
    """Sixty reloads while four clients work: no request fails that one file or the other allows."""
    path = home / "busy.json"
    files = [[tenant("alpha", [BASE, C]), tenant("beta", weight=3)], [tenant("beta"), tenant("delta"), tenant("alpha", weight=2)]]
    write(path, *files[0])
    server = launch("--tenants", str(path), "--http-threads", "3")
    stop, faults, done = threading.Event(), [], [0] * 4

    def client(number):
        with requests.Session() as session:
            while not stop.is_set():
                name = ("alpha", "beta")[number % 2]
                body = {"model": (BASE, C)[done[number] % 2], "prompt": IDS, "max_tokens": 3, "stream": number > 1, "ignore_eos": True}
                answer = session.post(server.url + "/v1/completions", json=body, headers=bearer(name), timeout=120)
                if answer.status_code != 200 or (number > 1 and len(events_of(answer.content)) != 3):
                    faults.append(answer.text)
                done[number] += 1

    threads = [threading.Thread(target=client, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for i in range(60):
        write(path.with_suffix(".new"), *files[(i + 1) % 2]).rename(path)
        reload(server)
    eventually(lambda: min(done) >= 3, 120, "work beside reloads")
    stop.set()
    for thread in threads:
        thread.join()
    assert not faults, faults[:3]
    idle(server, "alpha", "beta")
    assert usage(server, "alpha")["results"]["ok"] == done[0] + done[2] and usage(server, "beta")["results"]["ok"] == done[1] + done[3]


# ---- At start ----


def begin(*flags, environment=None):
    command = [BINARY, "serve", "--base", "demo/zen-mini", "--listen", "127.0.0.1:0", "--admin", "none", "--backend", "cpu", *flags]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin:/bin", **(environment or {})})
    assert "mod=model" not in run.stderr and "listening" not in run.stderr, run.stderr
    return run


def test_faults_at_start(home):
    good = write(home / "good.json", tenant("alpha"))
    run = begin("--tenants", str(home / "none.json"))
    assert run.returncode == 1 and "none.json" in run.stderr
    bad = home / "bad.json"
    bad.write_text(json.dumps({"tenants": [tenant("alpha"), tenant("beta", keys=["plain-text-key"])]}))
    run = begin("--tenants", str(bad))
    assert run.returncode == 1 and "bad.json: tenants[1].keys[0]" in run.stderr and "plain-text-key" not in run.stderr
    for flags, environment in ((["--api-key", "k"], None), ([], {"BITDELTA_API_KEY": "k"})):
        run = begin("--tenants", str(good), *flags, environment=environment)
        assert run.returncode == 2 and "api_keys" in run.stderr
    run = begin("--tenants", str(good), "--runtime-loading")
    assert run.returncode == 2 and "admin_key" in run.stderr


def test_without_tenants(server):
    assert requests.get(server.admin_url + "/admin/tenants", timeout=20).json() == {"tenants": []}
    error_of(reload(server, 409), 409, "conflict")


def test_adapters_are_not_the_tenants_to_load(launch, home):
    server = launch("--tenants", str(write(home / "adapters.json", tenant("alpha"))), "--runtime-loading", "--admin-key", "operator")
    body = {"lora_name": C}
    for headers in ({}, bearer("alpha")):
        answer = requests.post(server.url + "/v1/unload_lora_adapter", json=body, headers=headers, timeout=20)
        assert answer.status_code == 401 and answer.content == WRONG_KEY
        for method, path in (("get", "/admin/tenants"), ("post", "/admin/reload"), ("get", "/metrics")):
            assert requests.request(method, server.admin_url + path, headers=headers, timeout=20).status_code == 401
    operator = {"Authorization": "Bearer operator"}
    assert requests.post(server.url + "/v1/unload_lora_adapter", json=body, headers=operator, timeout=20).status_code == 200
    assert requests.get(server.admin_url + "/admin/tenants", headers=operator, timeout=20).json()["tenants"][0]["name"] == "alpha"
    assert ask(server, "alpha", model=C).status_code == 404
    assert requests.get(server.url + "/v1/models", headers=operator, timeout=20).status_code == 401


def test_hash_key():
    key = "sk-" + "a1" * 20
    for text in (key, key + "\n", key + "\r\n"):
        run = subprocess.run([BINARY, "hash-key"], input=text, capture_output=True, text=True, timeout=20)
        assert run.returncode == 0 and run.stdout == hashed(key) + "\n" and run.stderr == ""
    for text in ("", "\n", "a b", "a\nb\n", "é", "x" * 4097, "x\0y"):
        run = subprocess.run([BINARY, "hash-key"], input=text, capture_output=True, text=True, timeout=20)
        assert run.returncode == 1 and run.stdout == "" and "one line of" in run.stderr, text
    run = subprocess.run([BINARY, "hash-key"], input="x" * 4096, capture_output=True, text=True, timeout=20)
    assert run.returncode == 0 and run.stdout == hashed("x" * 4096) + "\n"
