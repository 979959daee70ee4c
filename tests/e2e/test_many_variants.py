"""Many requests for one variant, many variants for few slots, and many variants altogether."""

import bisect
import itertools
import os
import random
import shutil
import signal
import threading
import time

import pytest
import requests
from conftest import BASE, VARIANTS, error_of
from raw_http import Reader, request
from variants_support import DEMO, SHARD, bytes_read, copy_variant, counts_direct_reads, golden_body, goldens, rescan, variants

CROWD = 1000
ZIPF_SECONDS = float(os.environ.get("BITDELTA_ZIPF_SECONDS", "60"))


@pytest.mark.parametrize("io", ["pread", "uring"])
def test_a_crowd_for_a_cold_variant_reads_once(launch, tmp_path, io):
    """1000 first requests at once: one load by the server's own count, one by the kernel's, every answer right."""
    name = "zen-mini-math"
    if io == "uring" and not counts_direct_reads(tmp_path):
        pytest.skip(f"direct reads below {tmp_path} are not counted by the kernel (no disk behind it, or an overlay)")
    copy_variant(name, tmp_path / "deltas" / "alone", "alone")
    crowded = copy_variant(name, tmp_path / "deltas" / "crowded", "crowded")
    server = launch("--max-queue", str(2 * CROWD), "--io", "pread" if io == "pread" else "auto", deltas=str(tmp_path / "deltas"))
    if f"io={io}" not in (line := server.find(r"mod=loader reads by.*").group(0)):
        pytest.skip(f"no io_uring here: {line}")
    cases = [(ids, want[:2]) for ids, want in goldens(name)[:3]]
    size = (crowded / SHARD).stat().st_size
    before = bytes_read(server.process.pid, io)
    server.complete("x", "alone", max_tokens=1)
    of_a_load = bytes_read(server.process.pid, io) - before
    assert size <= of_a_load < 2 * size
    before = bytes_read(server.process.pid, io)
    # Stopped while they arrive, so that all of them find the variant cold.
    server.process.send_signal(signal.SIGSTOP)
    raws = [server.connect(seconds=120) for _ in range(CROWD)]
    for i, raw in enumerate(raws):
        raw.sendall(request(body=golden_body("crowded", cases[i % len(cases)][0], 2)))
    server.process.send_signal(signal.SIGCONT)
    for i, raw in enumerate(raws):
        answer = Reader(raw).answer()
        assert answer.status == 200, answer.body
        assert answer.json["choices"][0]["token_ids"] == cases[i % len(cases)][1]
        raw.close()
    assert size <= bytes_read(server.process.pid, io) - before < 2 * size
    assert server.metric("bitdelta_delta_loads_total", variant="crowded") == 1
    info = variants(server)["crowded"]
    assert info["loads"] == 1 and info["evictions"] == 0 and info["references"] == 0


class Deck:
    """Draws from a Zipf distribution, in strata: of every hundred draws each rank has its share, rounded up or down by chance, in
    random order. Plain draws would need tens of thousands to tell ranks 6 and 7 apart. Any thread."""

    SIZE, EXPONENT = 100, 1.1

    def __init__(self, ranked, chance):
        self.ranked, self.chance, self.cards, self.lock = ranked, chance, [], threading.Lock()
        self.upto = list(itertools.accumulate((rank + 1) ** -self.EXPONENT for rank in range(len(ranked))))

    def draw(self):
        with self.lock:
            if not self.cards:
                start = self.chance.random()
                places = [(i + start) * self.upto[-1] / self.SIZE for i in range(self.SIZE)]
                self.cards = [self.ranked[bisect.bisect_right(self.upto[:-1], place)] for place in places]
                self.chance.shuffle(self.cards)
            return self.cards.pop()


def test_popular_variants_stay(launch):
    """14 variants, 8 slots, Zipf traffic: the six most wanted are never evicted, the others share two slots, all answer right.
    tests/unit/test_cache_popular.c plays the same with a thousand seeds."""
    server = launch("--slots", "8")
    seed = int(os.environ.get("BITDELTA_TEST_SEED", time.time_ns()))
    print("seed", seed)
    chance = random.Random(seed)
    ranked = chance.sample(VARIANTS, len(VARIANTS))
    deck = Deck(ranked, chance)
    cases = {name: [(ids, want) for ids, want in goldens(name)[:3]] for name in ranked}
    faults, counts, stop, known = [], dict.fromkeys(ranked, 0), threading.Event(), threading.Event()

    def client(number):
        own = random.Random(seed + number)
        session = requests.Session()
        while not stop.is_set() and not faults:
            name = deck.draw()
            ids, want = own.choice(cases[name])
            want = want[: 6 if known.is_set() else 1]
            answer = session.post(server.url + "/v1/completions", json=golden_body(name, ids, len(want)), timeout=60)
            if answer.status_code != 200 or answer.json()["choices"][0]["token_ids"] != want:
                faults.append((name, answer.status_code, answer.text, want))
            counts[name] += 1

    def serve(least, seconds):
        began, end = sum(counts.values()), time.monotonic() + seconds
        while not faults and (sum(counts.values()) - began < least or time.monotonic() < end):
            assert time.monotonic() < end + 300, counts
            time.sleep(0.1)

    threads = [threading.Thread(target=client, args=(n + 1,)) for n in range(6)]
    for thread in threads:
        thread.start()
    try:
        serve(2000, 0)  # until their popularity is known they are like any other
        known.set()
        before, began = variants(server), dict(counts)
        serve(1000, ZIPF_SECONDS)
        after = variants(server)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not faults, faults[:3]
    evicted = {name: after[name]["evictions"] - before[name]["evictions"] for name in ranked}
    print(sum(counts.values()), "requests", counts, "evictions", evicted)
    assert all(evicted[name] == 0 for name in ranked[:6]), evicted
    assert all(after[name]["state"] == "ready" and after[name]["loads"] == before[name]["loads"] for name in ranked[:6])
    assert all(evicted[name] > 0 and counts[name] > began[name] for name in ranked[6:])
    assert sum(v["state"] in ("ready", "loading", "queued") for v in after.values()) <= 8


def test_ten_thousand_variants(launch, tmp_path):
    """The server starts, lists, serves one of them, knows what it has not, rescans, and stays small."""
    count = 10_000
    root = tmp_path / "deltas"
    root.mkdir()
    manifest = (DEMO / "zen-mini-math" / "delta.json").read_text()
    shutil.copyfile(DEMO / "zen-mini-math" / SHARD, tmp_path / SHARD)

    def add(name):
        (root / name).mkdir()
        (root / name / "delta.json").write_text(manifest.replace('"variant": "zen-mini-math"', f'"variant": "{name}"'))
        (root / name / SHARD).hardlink_to(tmp_path / SHARD)

    for i in range(count):
        add(f"v{i:05}")
    small = launch(deltas=None)
    base_bytes = small.resident_bytes()
    small.stop()
    started = time.monotonic()
    server = launch(deltas=str(root))
    print("start", time.monotonic() - started, "s; bytes a variant", (server.resident_bytes() - base_bytes) / count)
    assert server.resident_bytes() - base_bytes < count * 40_000
    ids = [m["id"] for m in server.get("/v1/models").json()["data"]]
    assert ids == [BASE, *(f"v{i:05}" for i in range(count))]
    for prompt, want in goldens("zen-mini-math")[:2]:
        answer = server.post("/v1/completions", golden_body("v07001", prompt, 8))
        assert answer.json()["choices"][0]["token_ids"] == want[:8]
    error_of(server.post("/v1/completions", {"model": "v10000", "prompt": "x"}), 404, "model_not_found", "model")
    assert len(variants(server)) == count
    assert rescan(server)["unchanged"] == count
    add("another")
    for i in range(0, 1000):
        shutil.rmtree(root / f"v{i:05}")
    reply = rescan(server)
    assert reply["added"] == ["another"] and len(reply["removed"]) == 1000 and reply["unchanged"] == count - 1000
    error_of(server.post("/v1/completions", {"model": "v00000", "prompt": "x"}), 404, "model_not_found", "model")
    assert server.complete("x", "another", max_tokens=1)["model"] == "another"
    assert server.resident_bytes() - base_bytes < count * 40_000
