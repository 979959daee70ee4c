"""The real binary on free ports, serving the demo family on the CPU. BITDELTA_BIN names the binary."""

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
import requests

ROOT = Path(__file__).resolve().parents[2]
BINARY = os.environ.get("BITDELTA_BIN", str(ROOT / "build" / "bitdelta"))
BASE = "zen-mini"
VARIANTS = sorted(p.name for p in (ROOT / "demo" / "deltas").iterdir() if (p / "delta.json").is_file())
MODELS = [BASE, *VARIANTS]
CONTEXT = 2048
VOCAB = 4096
BOS, EOS = 4080, 4081


class Server:
    """One running server. Its log lines are kept; `get` and `post` are requests' with the address put in."""

    def __init__(self, arguments, environment=None, under=()):
        command = [*under, BINARY, "serve", *arguments]
        settings = {k: v for k, v in os.environ.items() if not k.startswith("BITDELTA_")} | (environment or {})
        self.lines = []
        self.process = subprocess.Popen(command, cwd=ROOT, env=settings, stderr=subprocess.PIPE, text=True, errors="replace")
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.session = requests.Session()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def find(self, pattern, seconds=60):
        """The first match of a log line, waiting for it."""
        end = time.monotonic() + seconds
        while True:
            alive = self.process.poll() is None
            for line in list(self.lines):
                if found := re.search(pattern, line):
                    return found
            if not alive or time.monotonic() > end:
                raise AssertionError(f"no line {pattern!r} in:\n" + "\n".join(self.lines[-40:]))
            time.sleep(0.01)

    def wait_ready(self):
        self.port = int(self.find(r"mod=http listening address=\S*:(\d+)").group(1))
        self.find(r"mod=serve ready ")
        admin = [m for line in list(self.lines) if (m := re.search(r"admin-listening address=\S*:(\d+)", line))]
        self.admin_port = int(admin[0].group(1)) if admin else None
        return self

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self):
        return f"http://127.0.0.1:{self.admin_port}"

    def get(self, path, **options):
        return self.session.get(self.url + path, timeout=60, **options)

    def post(self, path, body, **options):
        return self.session.post(self.url + path, json=body, timeout=120, **options)

    def complete(self, prompt, model=None, **fields):
        """The 200 answer of a completion, parsed."""
        body = {"prompt": prompt, "temperature": 0, **fields}
        if model:
            body["model"] = model
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return strict_json(answer.content)

    def stream(self, prompt, model=None, **fields):
        """All data lines of a stream, [DONE] last."""
        body = {"prompt": prompt, "temperature": 0, "stream": True, **fields}
        if model:
            body["model"] = model
        with self.session.post(self.url + "/v1/completions", json=body, stream=True, timeout=120) as answer:
            assert answer.status_code == 200, answer.text
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            return events_of(b"".join(answer.iter_content(None)))

    def connect(self, port=None, seconds=20):
        raw = socket.create_connection(("127.0.0.1", port or self.port), timeout=seconds)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return raw

    def metric(self, name, **labels):
        """The sum of a metric's samples that have these labels."""
        total, found = 0.0, False
        for line in self.get("/metrics").text.splitlines():
            if not (sample := re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", line)) or sample.group(1) != name:
                continue
            have = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', sample.group(2) or ""))
            if all(have.get(k) == v for k, v in labels.items()):
                total, found = total + float(sample.group(3)), True
        assert found, f"no sample of {name} with {labels}"
        return total

    def threads(self):
        """The program's own threads: the kernel's io_uring workers (iou-*) come and go as files are read."""
        names = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            try:
                names.append((task / "comm").read_text())
            except FileNotFoundError:
                continue
        return sum(not name.startswith("iou-") for name in names)

    def resident_bytes(self):
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", text).group(1)) * 1024

    def stop(self, seconds=60):
        """SIGTERM; returns the exit status."""
        self.session.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError("did not stop:\n" + "\n".join(self.lines[-40:]))
        self.reader.join(5)
        self.process.stderr.close()
        return status


def strict_json(text):
    """Parsed; no member is there twice, and no number is one that JSON has not."""
    def members(pairs):
        assert len({name for name, _ in pairs}) == len(pairs), [name for name, _ in pairs]
        return dict(pairs)

    def constant(name):
        raise AssertionError(name)

    return json.loads(text, object_pairs_hook=members, parse_constant=constant)


def events_of(data):
    """The payloads of a server-sent event stream, whose form is checked byte by byte."""
    assert data.endswith(b"\n\n"), data[-200:]
    events = data[:-2].split(b"\n\n")
    for event in events:
        assert event.startswith(b"data: ") and b"\n" not in event and b"\r" not in event and event == event.rstrip(b" "), event
    texts = [event[6:].decode("utf-8") for event in events]
    assert texts[-1] == "[DONE]" and "[DONE]" not in texts[:-1]
    return [strict_json(text) for text in texts[:-1]]


def start_server(*extra, deltas="demo/deltas", environment=None, ready=True, under=()):
    usual = {"--base": "demo/zen-mini", "--listen": "127.0.0.1:0", "--admin": "127.0.0.1:0", "--backend": "cpu", "--deltas": deltas, "--slots": "8"}
    given = {word.split("=")[0] for word in extra}
    arguments = [word for flag, value in usual.items() if value and flag not in given for word in (flag, value)]
    server = Server([*arguments, *extra], environment, under)
    return server.wait_ready() if ready else server


@pytest.fixture(scope="session")
def server():
    """Shared by all tests that leave it as they found it."""
    running = start_server()
    yield running
    status = running.stop()
    assert status == 0, "\n".join(running.lines[-40:])
    faults = ("Sanitizer", "runtime error", "level=error")
    assert not [line for line in running.lines if any(fault in line for fault in faults)]


@pytest.fixture
def launch():
    """A function that starts servers of this test's own; they must end well."""
    running = []

    def begin(*extra, **options):
        running.append(start_server(*extra, **options))
        return running[-1]

    yield begin
    for one in running:
        if one.process.poll() is None:
            assert one.stop() == 0, "\n".join(one.lines[-40:])


def eventually(condition, seconds=60, what="condition"):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.02)
    return value


def error_of(answer, status, code, param=None):
    """Checks an error answer's whole form; returns its message."""
    assert answer.status_code == status, (answer.status_code, answer.text)
    assert answer.headers["content-type"] == "application/json"
    body = strict_json(answer.content)
    assert list(body) == ["error"] and sorted(body["error"]) == ["code", "message", "param", "type"], body
    error = body["error"]
    assert error["code"] == code and error["param"] == param, error
    assert isinstance(error["message"], str) and error["message"]
    assert error["type"] in {"invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "server_error"}
    return error["message"]
