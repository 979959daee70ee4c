"""Tenants that share a busy server: what each is served, in tokens by weight, stays within the bound of the virtual token counters
(arXiv:2401.00588), whatever their prompts and variants are. All requests of a test are there before any of them runs, so that only the
server's own order counts; nothing is timed."""

import hashlib
import json
import random
import re
import selectors
import signal

import pytest
import requests
from conftest import VARIANTS, VOCAB, eventually
from raw_http import request

PLACES = 2  # --max-seqs
OUTPUT = 8
STEP = 64  # --max-batch-tokens
IN, OUT = 1.0, 2.0  # the default weights


def tenants_file(folder, weights):
    """Tenants of these weights; each one's key is its name."""
    entries = [{"name": name, "keys": ["sha256:" + hashlib.sha256(name.encode()).hexdigest()], "variants": "*", "weight": weight,
                "priority_min": -10} for name, weight in weights.items()]
    (folder / "tenants.json").write_text(json.dumps({"tenants": entries}))
    return str(folder / "tenants.json")


def body(numbers, prompt_tokens, **fields):
    return {"prompt": [numbers.randrange(200, VOCAB - 200) for _ in range(prompt_tokens)], "max_tokens": OUTPUT, "temperature": 0,
            "ignore_eos": True, **fields}


class Crowd:
    """Requests on a connection each; pump() reads what has come. `answers` in the order of their ends."""

    def __init__(self, server):
        self.server, self.selector, self.answers, self.parts = server, selectors.DefaultSelector(), [], {}

    def send(self, tenant, fields):
        raw = self.server.connect(seconds=60)
        headers = ["Connection: close"] + ([f"Authorization: Bearer {tenant}"] if tenant else [])
        raw.sendall(request(body=fields, headers=headers))
        raw.setblocking(False)
        self.selector.register(raw, selectors.EVENT_READ, (tenant, len(self.parts)))
        self.parts[raw] = b""
        return raw

    def pump(self):
        for key, _ in self.selector.select(0.01):
            piece = key.fileobj.recv(65536)
            self.parts[key.fileobj] += piece
            if piece:
                continue
            self.leave(key.fileobj)
            head, text = self.parts[key.fileobj].split(b"\r\n\r\n", 1)
            assert head.startswith(b"HTTP/1.1 200"), self.parts[key.fileobj][:500]
            self.answers.append((*key.data, json.loads(text)["usage"]))
        return len(self.selector.get_map()) > 0

    def leave(self, raw):
        self.selector.unregister(raw)
        raw.close()


class Look:
    """One look at the metrics: per tenant what it was served, and how many of its sequences wait."""

    def __init__(self, server):
        self.text = requests.get(server.admin_url + "/metrics", timeout=60).text
        self.service, self.loads, self.waiting = (self.family(name) for name in ("service_tokens_total", "load_bytes_total", "waiting"))

    def family(self, name):
        return {tenant: float(value) for tenant, value in re.findall(rf'^bitdelta_tenant_{name}\{{tenant="([^"]*)"\}} (\S+)$', self.text, re.M)}

    def value(self, name):
        return float(re.search(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", self.text, re.M).group(1))


class Queue:
    """A crowd whose requests all wait before the first of them runs: long sequences of another tenant are in every place meanwhile, and the
    server stands still while the requests go out."""

    def __init__(self, server, tenant="plug"):
        self.server, self.plug, self.crowd = server, Crowd(server), Crowd(server)
        self.sockets = [self.plug.send(tenant, {"prompt": [300 + i], "max_tokens": 2000, "ignore_eos": True}) for i in range(PLACES)]
        eventually(lambda: Look(server).value("vllm:num_requests_running") == PLACES, what="plug", seconds=60)
        server.process.send_signal(signal.SIGSTOP)

    def release(self):
        """Returns the crowd and a look at how things were when all of it waited."""
        self.server.process.send_signal(signal.SIGCONT)
        count = len(self.crowd.parts)
        eventually(lambda: Look(self.server).value("vllm:num_requests_waiting") == count, what="queue", seconds=60)
        before = Look(self.server)
        for raw in self.sockets:
            self.plug.leave(raw)
        return self.crowd, before


def watch(crowd, server, before, weights):
    """How far the difference of the two tenants' shares moved while both had something waiting, and the last look."""
    a, b = weights
    least = most = 0.0
    busy = True
    while busy:
        busy = crowd.pump()
        look = Look(server)
        if not (look.waiting.get(a) and look.waiting.get(b)):
            continue
        shares = [(look.service[t] - before.service[t]) / weights[t] for t in (a, b)]
        least, most = min(least, shares[0] - shares[1]), max(most, shares[0] - shares[1])
    end = Look(server)
    assert end.value("bitdelta_idle_with_ready_total") == 0, "the device was idle beside work that was there"
    return most - least, end


def unit(longest_prompt, weights):
    """Twice this is the bound: all that may run at once, at the dearer weight, by the smaller share."""
    return OUT * PLACES * (longest_prompt + OUTPUT) / min(weights.values())


@pytest.fixture
def serve(launch, tmp_path):
    def begin(weights, *extra, **options):
        file = tenants_file(tmp_path, weights | {"plug": 1})
        return launch("--tenants", file, "--max-seqs", str(PLACES), "--max-batch-tokens", str(STEP), "--prefill-chunk-tokens", "32", *extra, **options)

    return begin


@pytest.mark.parametrize("weight", [1, 3])
def test_long_prompts(serve, weight):
    """One tenant's prompts are twenty times as long as the other's and claim every priority: shares go by tokens and weight."""
    numbers, weights = random.Random(weight), {"short": 1, "long": weight}
    server = serve(weights)
    queue = Queue(server)
    counts = {"short": 120, "long": 40 * weight}
    for i in range(max(counts.values())):
        if i < counts["short"]:
            queue.crowd.send("short", body(numbers, 2))
        if i < counts["long"]:
            queue.crowd.send("long", body(numbers, 40, priority=-(i % 7)))
    crowd, before = queue.release()
    moved, end = watch(crowd, server, before, weights)
    assert moved <= 2 * unit(40, weights)
    # What the server counted is what the clients got; each prompt was a new one.
    for tenant in weights:
        usage = [u for t, _, u in crowd.answers if t == tenant]
        assert len(usage) == counts[tenant]
        expected = sum(IN * u["prompt_tokens"] + OUT * u["completion_tokens"] for u in usage)
        assert end.service[tenant] == expected


def test_cold_variants(serve):
    """One tenant goes through all variants, the other stays with the base. Loads are charged once, to the one that causes them."""
    numbers, weights = random.Random(5), {"hot": 1, "cold": 1}
    load_unit, residency = 65536, 100
    server = serve(weights, "--slots", "3", "--fair-load-bytes", str(load_unit), "--fair-residency-bound", str(residency), "--pinned-top", "0")
    sizes = {v["name"]: v["file_bytes"] for v in requests.get(server.admin_url + "/admin/variants", timeout=20).json()["variants"]}
    queue = Queue(server)
    for i in range(80):
        queue.crowd.send("hot", body(numbers, 10))
        queue.crowd.send("cold", body(numbers, 10, model=VARIANTS[i % len(VARIANTS)]))
    crowd, before = queue.release()
    moved, end = watch(crowd, server, before, weights)
    assert moved <= 2 * (unit(10, weights) + residency + max(sizes.values()) / load_unit)
    loads = {v["name"]: v["loads"] for v in requests.get(server.admin_url + "/admin/variants", timeout=20).json()["variants"]}
    assert sum(loads.values()) >= len(VARIANTS)
    assert end.loads["cold"] == sum(loads[name] * sizes[name] for name in loads)
    assert end.loads["hot"] == 0
    assert end.service["cold"] == 80 * (10 * IN + OUTPUT * OUT) + end.loads["cold"] / load_unit
    assert end.service["hot"] == 80 * (10 * IN + OUTPUT * OUT)


def test_idle_then_back(serve):
    """A tenant that was idle while another was served a lot is not served a lot first."""
    numbers, weights = random.Random(6), {"steady": 1, "back": 1}
    server = serve(weights)
    alone = Crowd(server)
    for _ in range(70):
        alone.send("steady", body(numbers, 4))
    alone.send("back", body(numbers, 4))
    while alone.pump():
        pass
    assert Look(server).service["steady"] > 5 * 2 * unit(4, weights)
    queue = Queue(server)
    for _ in range(70):
        queue.crowd.send("steady", body(numbers, 4))
        queue.crowd.send("back", body(numbers, 4))
    crowd, before = queue.release()
    moved, _ = watch(crowd, server, before, weights)
    assert moved <= 2 * unit(4, weights)


def test_found_prefixes_are_free(serve):
    """What the prefix cache has is not computed and not paid for; others, who cannot find it, pay in full."""
    numbers = random.Random(8)
    server = serve({"first": 1, "other": 2})
    prompt = body(numbers, 90)
    paid = {"first": 0.0, "other": 0.0}
    for tenant in ("first", "first", "other", "first", "other"):
        found = Look(server).value("vllm:prefix_cache_hits_total")
        crowd = Crowd(server)
        crowd.send(tenant, prompt)
        while crowd.pump():
            pass
        end = Look(server)
        found = end.value("vllm:prefix_cache_hits_total") - found
        assert (found > 60) == (paid[tenant] > 0)  # the first time nothing is found
        paid[tenant] += IN * (90 - found) + OUT * OUTPUT
        assert end.service[tenant] == paid[tenant], (tenant, found)


def test_nobody_is_configured(launch):
    """Without tenants all are served, and there are no series of tenants."""
    numbers = random.Random(7)
    server = launch("--max-seqs", str(PLACES))
    queue = Queue(server, tenant=None)
    for i in range(40):
        queue.crowd.send(None, body(numbers, 1 + i % 20))
    crowd, _ = queue.release()
    while crowd.pump():
        pass
    assert len(crowd.answers) == 40
    assert "bitdelta_tenant_" not in Look(server).text
