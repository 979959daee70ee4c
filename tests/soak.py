"""Mixed traffic with faults of chance against a real server, for as long as asked: whole and streamed answers, chat, many variants
over few slots, clients that leave or are killed, broken bytes, variants that are loaded, unloaded, pinned, removed and brought back.
Every answer must be the golden greedy text of its variant, whole and once; memory must stay level; at the end nothing may be held.

    BITDELTA_BIN=build/bitdelta .venv/bin/python tests/soak.py --seconds 1200
    tests/soak.py --self-test            that each of its checks can fail

The seed is printed; --seed repeats the choices, not their order in time."""

import argparse
import json
import random
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "e2e"))
import requests  # noqa: E402
from conftest import BASE, ROOT, VARIANTS, events_of, start_server  # noqa: E402
from raw_http import Reader, chunked, request  # noqa: E402
from test_faults_http import NOTHING, held  # noqa: E402
from variants_support import copy_variant, golden_body, goldens  # noqa: E402

MOVING = VARIANTS[-3:]  # these come and go
STAYING = [BASE, *VARIANTS[:-3]]
TOKENS = 12
GROWTH_MAX = 24 << 20
SANITIZED = {"ASAN_OPTIONS": "quarantine_size_mb=8"}  # or freed memory would look like growth
KILLED = """
import socket, sys
raw = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
raw.sendall(sys.stdin.buffer.read())
while raw.recv(100): pass
"""


class Fault(Exception):
    pass


def expect(truth, *what):
    if not truth:
        raise Fault(*what)


class Soak:
    def __init__(self, server, deltas, options):
        self.server, self.deltas, self.options = server, deltas, options
        self.golden = {name: goldens(name) for name in [BASE, *VARIANTS]}
        self.chat = {}
        self.counts, self.faults, self.sizes = Counter(), [], []
        self.lock = threading.Lock()
        self.over = threading.Event()

    # ---- what is asked, and what must come ----

    def chat_body(self, model):
        return {"model": model, "messages": [{"role": "user", "content": "The old sea"}], "max_tokens": TOKENS, "temperature": 0}

    def learn_chats(self):
        for model in STAYING:
            self.chat[model] = self.server.post("/v1/chat/completions", self.chat_body(model)).json()["choices"][0]["message"]["content"]

    def choose(self, rng, models=None):
        model = rng.choice(models or (STAYING if rng.random() < 0.8 else MOVING))
        ids, want = rng.choice(self.golden[model])
        count = rng.randrange(1, min(TOKENS, len(want)) + 1)
        if self.options.plant == "answer":
            want = [want[0] + 1, *want[1:]]
        return model, golden_body(model, ids, count), want[:count]

    def check_whole(self, answer, model, want, choices=1):
        if answer.status in (404, 503) and model in MOVING or answer.status == 429:
            self.counts[f"refused {answer.status}"] += 1
            return
        expect(answer.status == 200, model, answer.status, answer.body[:500])
        body = answer.json
        expect(len(body["choices"]) == choices, "choices", body)
        for choice in body["choices"]:
            expect(choice["token_ids"] == want, "another answer", model, choice["token_ids"], want)
        expect(body["usage"]["completion_tokens"] == choices * len(want), "usage", body["usage"])

    def check_stream(self, answer, model, want):
        if answer.status != 200:
            self.check_whole(answer, model, want)
            return
        events = events_of(answer.body)
        expect(len({e.get("id") for e in events}) == 1, "ids", events)
        ids = sum((e["choices"][0]["token_ids"] for e in events), [])
        expect(ids == want and len(events) == len(want), "another stream", model, ids, want)

    # ---- clients ----

    def ask(self, data):
        """One request over a connection of its own or, as often, one that is kept; nothing may come after the answer."""
        raw = self.server.connect(seconds=120)
        with raw:
            raw.sendall(data)
            reader = Reader(raw)
            answer = reader.answer()
            raw.shutdown(socket.SHUT_WR)
            expect(reader.at_end(), "something came after the answer", reader.rest[:200])
        return answer

    def do_whole(self, rng):
        model, body, want = self.choose(rng)
        choices = rng.choice([1, 1, 1, 3])
        data = request(body=body | {"n": choices})
        if rng.random() < 0.2:
            payload = json.dumps(body | {"n": choices}).encode()
            data = request(headers=["Transfer-Encoding: chunked"]) + chunked(payload[:7], payload[7:])
        self.check_whole(self.ask(data), model, want, choices)

    def do_stream(self, rng):
        model, body, want = self.choose(rng)
        self.check_stream(self.ask(request(body=body | {"stream": True})), model, want)

    def do_pipeline(self, rng):
        asked = [self.choose(rng, STAYING) for _ in range(4)]
        streams = [rng.random() < 0.5 for _ in asked]
        with self.server.connect(seconds=120) as raw:
            raw.sendall(b"".join(request(body=body | {"stream": stream}) for (_, body, _), stream in zip(asked, streams)))
            reader = Reader(raw)
            for (model, _, want), stream in zip(asked, streams):
                (self.check_stream if stream else self.check_whole)(reader.answer(), model, want)
            expect(reader.rest == b"", "a fifth answer", reader.rest[:200])

    def do_chat(self, rng):
        model = rng.choice(STAYING)
        answer = self.ask(request("POST", "/v1/chat/completions", body=self.chat_body(model)))
        if answer.status == 429:
            return
        expect(answer.status == 200, model, answer.body[:500])
        text = answer.json["choices"][0]["message"]["content"]
        expect(text == self.chat[model], "another chat", model, text, self.chat[model])

    def do_chat_stream(self, rng):
        model = rng.choice(STAYING)
        answer = self.ask(request("POST", "/v1/chat/completions", body=self.chat_body(model) | {"stream": True}))
        if answer.status == 429:
            return
        expect(answer.status == 200, model, answer.body[:500])
        text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events_of(answer.body))
        expect(text == self.chat[model], "another streamed chat", model, text, self.chat[model])

    def do_leave(self, rng):
        model, body, _ = self.choose(rng)
        data = request(body=body | {"max_tokens": 400, "stream": rng.random() < 0.5, "n": rng.choice([1, 2])})
        raw = self.server.connect()
        raw.sendall(data[:rng.randrange(len(data))] if rng.random() < 0.3 else data)
        raw.settimeout(0.001 + rng.random() * 0.1)
        try:
            raw.recv(rng.randrange(1, 2000))
        except (TimeoutError, ConnectionResetError):
            pass
        if rng.random() < 0.3:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if rng.random() < 0.3:
            raw.shutdown(socket.SHUT_WR)
            time.sleep(0.01)
        raw.close()

    def do_garbage(self, rng):
        _, body, _ = self.choose(rng)
        data = bytearray(request(body=body))
        for _ in range(rng.randrange(1, 8)):
            at = rng.randrange(len(data))
            data[at:at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        raw = self.server.connect()
        try:
            raw.sendall(data)
            raw.settimeout(0.05)
            raw.recv(1000)
        except OSError:
            pass
        raw.close()

    def do_killed(self, rng):
        _, body, _ = self.choose(rng)
        client = subprocess.Popen([sys.executable, "-c", KILLED, str(self.server.port)], stdin=subprocess.PIPE)
        client.stdin.write(request(body=body | {"max_tokens": 500, "stream": True}))
        client.stdin.close()
        time.sleep(rng.random() * 0.3)
        client.kill()
        client.wait()

    def do_routes(self, rng):
        for path in ("/v1/models", "/health", "/metrics", "/version"):
            expect(self.ask(request("GET", path)).status == 200, path)
        answer = self.ask(request("POST", "/tokenize", body={"prompt": "The old sea " * rng.randrange(1, 3000)}))
        expect(answer.status == 200 and answer.json["count"] > 2, answer.body[:200])

    def client(self, seed):
        rng = random.Random(seed)
        actions = {self.do_whole: 8, self.do_stream: 8, self.do_pipeline: 2, self.do_chat: 2, self.do_chat_stream: 2, self.do_leave: 6,
                   self.do_garbage: 3, self.do_routes: 1, self.do_killed: 0.3}
        while not self.over.is_set():
            action = rng.choices(list(actions), list(actions.values()))[0]
            self.guard(action, rng)

    # ---- orders ----

    def move(self, rng):
        name = rng.choice(MOVING)
        folder = self.deltas / name
        if folder.exists():
            shutil.rmtree(folder)
        else:
            copy_variant(name, self.deltas / f".{name}")
            (self.deltas / f".{name}").rename(folder)
        if rng.random() < 0.5:
            self.server.process.send_signal(signal.SIGHUP)
        else:
            expect(requests.post(self.server.admin_url + "/admin/rescan", timeout=120).status_code == 200)

    def order(self, rng):
        name, verb = rng.choice(VARIANTS), rng.choice(["load", "unload", "pin", "unpin", "unpin"])
        if verb == "unload":  # ends a load under way, and with it those that wait for it
            name = rng.choice(MOVING)
        answer = requests.post(f"{self.server.admin_url}/admin/variants/{name}/{verb}", timeout=120)
        expect(answer.status_code < 500 or answer.json()["error"]["code"] in ("variant_unavailable", "variant_error"), verb, answer.text)

    def orders(self, seed):
        rng = random.Random(seed)
        while not self.over.wait(0.05 + rng.random() * 0.3):
            self.guard(self.move if rng.random() < 0.3 else self.order, rng)

    # ---- the frame ----

    def guard(self, action, rng):
        try:
            action(rng)
            with self.lock:
                self.counts[action.__name__] += 1
        except Exception as fault:  # noqa: BLE001: whatever it is, it is reported
            with self.lock:
                self.faults.append(f"{action.__name__}: {fault!r}\n{traceback.format_exc(limit=-2)}")
            if self.server.process.poll() is not None or len(self.faults) > 20:
                self.over.set()

    def level(self):
        """Memory after the first third, against the end."""
        third = len(self.sizes) // 3
        if third < 5:
            return 0
        return int(statistics.median(self.sizes[-third:]) - statistics.median(self.sizes[third:2 * third]))

    def run(self, rng):
        self.learn_chats()
        threads = [threading.Thread(target=self.client, args=(rng.random(),)) for _ in range(self.options.clients)]
        threads.append(threading.Thread(target=self.orders, args=(rng.random(),)))
        for thread in threads:
            thread.start()
        end, ballast = time.monotonic() + self.options.seconds, 0
        while time.monotonic() < end and not self.over.wait(min(1.0, self.options.seconds / 20)):
            ballast += (8 << 20) * (self.options.plant == "memory")
            self.sizes.append(self.server.resident_bytes() + ballast)
        self.over.set()
        for thread in threads:
            thread.join()

    def finish(self):
        kept = self.server.connect() if self.options.plant == "held" else None
        expect(self.server.process.poll() is None, "the server is gone", self.server.lines[-20:])
        for name in VARIANTS:
            requests.post(f"{self.server.admin_url}/admin/variants/{name}/unpin", timeout=120)
        end = time.monotonic() + (3 if kept else 60)
        while (now := held(self.server)) != NOTHING:
            expect(time.monotonic() < end, "still held", {k: v for k, v in now.items() if v != NOTHING[k]})
            time.sleep(0.1)
        settles = self.options.seconds >= 60 or self.options.plant  # a short run is all warming up
        expect(not settles or self.level() < GROWTH_MAX, "memory grew", self.level(), [s >> 20 for s in self.sizes])


def soak(options):
    seed = options.seed or time.time_ns()
    print("seed", seed, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        deltas = Path(scratch) / "deltas"
        deltas.mkdir()
        for name in VARIANTS:
            copy_variant(name, deltas / name)
        server = start_server("--slots", "4", "--max-seqs", "16", "--chat-template", "tests/fuzz/corpus/chat_template/chatml.jinja",
                              "--http-threads", "2", deltas=str(deltas), environment=SANITIZED)
        run = Soak(server, deltas, options)
        try:
            run.run(random.Random(seed))
            run.finish()
        except Exception as fault:  # noqa: BLE001
            run.faults.append(repr(fault))
        status = server.stop() if server.process.poll() is None else server.process.wait()
        if status != 0:
            run.faults.append(f"exit status {status}")
        reports = [line for line in server.lines if "Sanitizer" in line or "runtime error" in line or "assertion" in line]
        if reports:
            run.faults.append("\n".join(server.lines[-200:]))
    print(dict(run.counts))
    if run.sizes:
        print(f"memory {run.sizes[0] >> 20} .. {run.sizes[-1] >> 20} MiB, the last third {run.level() >> 10} KiB above the second")
    for fault in run.faults[:5]:
        print("FAULT", fault[:6000])
    print(len(run.faults), "faults")
    return not run.faults


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--plant", choices=["answer", "held", "memory"])
    parser.add_argument("--self-test", action="store_true")
    options = parser.parse_args()
    if not options.self_test:
        sys.exit(0 if soak(options) else 1)
    for plant in ("answer", "held", "memory"):
        options.plant, options.seconds = plant, 3
        if soak(options):
            sys.exit(f"the planted fault {plant!r} was not noticed")


main()
