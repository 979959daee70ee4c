"""Requests that a thread reads in one turn wake the scheduler together: every one of them is answered."""

import json
import os
import random
import signal
import time
from pathlib import Path

from raw_http import Reader

COUNT = 8


def test_all_requests_of_a_turn_are_answered(launch):
    """The server is stopped while they are sent, so that it finds all of them at once. They need no step of the engine, which
    would look for more work after it anyway. On one core, and with more right to it, the scheduler runs, and sleeps again, before the
    thread goes on."""
    server = launch()
    core = {min(os.sched_getaffinity(0))}
    for task in Path(f"/proc/{server.process.pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), core)
        if (task / "comm").read_text().startswith("bd-http"):
            os.setpriority(os.PRIO_PROCESS, int(task.name), 19)
    for _ in range(100):
        raws = [server.connect() for _ in range(COUNT)]
        server.get("/health")  # and all of them are accepted
        os.kill(server.process.pid, signal.SIGSTOP)
        token = random.randrange(300, 1000)
        marks = [f"turn-{random.getrandbits(64):x}" for _ in raws]
        try:
            for raw, mark in zip(raws, marks):
                body = json.dumps({"prompt": [token], "max_tokens": 0, "echo": True}).encode()
                raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nx-request-id: %s\r\n"
                            b"Content-Length: %d\r\n\r\n%s" % (mark.encode(), len(body), body))
            time.sleep(0.005)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        for raw, mark in zip(raws, marks):
            raw.settimeout(20)
            answer = Reader(raw).answer()
            assert answer.status == 200 and answer.headers["x-request-id"] == mark, answer.whole
            assert answer.json["usage"] == {"prompt_tokens": 1, "completion_tokens": 0, "total_tokens": 1}
            raw.close()
