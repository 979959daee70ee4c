"""The profile for containers: with it the loader reads by io_uring, under one that leaves io_uring out by threads."""

import ctypes
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from variants_support import golden_body, goldens

PROFILE = ROOT / "docker" / "seccomp-io-uring.json"
RUN = Path(__file__).with_name("seccomp_run.py")
IO_URING = "io_uring_setup,io_uring_enter,io_uring_register"
MATH = "zen-mini-math"


def under(refused):
    try:
        ctypes.CDLL("libseccomp.so.2")
    except OSError:
        pytest.skip("libseccomp.so.2 is not installed")
    return [sys.executable, str(RUN), str(PROFILE), refused]


def how_it_reads(server):
    return server.find(r"mod=loader reads by io=(\w+).*")


def answers_right(server):
    for ids, want in goldens(MATH)[:2]:
        assert server.post("/v1/completions", golden_body(MATH, ids, 8)).json()["choices"][0]["token_ids"] == want[:8]
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    assert "\nSeccomp:\t2\n" in status and "\nNoNewPrivs:\t1\n" in status


def test_the_profile_lets_io_uring_through(launch):
    free = launch()
    if how_it_reads(free).group(1) != "uring":
        pytest.skip("no io_uring on this machine")
    assert free.stop() == 0
    server = launch(under=under(""))
    assert how_it_reads(server).group(1) == "uring"
    answers_right(server)


def test_without_io_uring_threads_read(launch):
    """As under the profiles that Docker and containerd bring along, which answer EPERM."""
    server = launch(under=under(IO_URING))
    line = how_it_reads(server)
    assert line.group(1) == "pread" and "not permitted" in line.group(0), line.group(0)
    answers_right(server)
    strict = launch("--io", "uring", under=under(IO_URING), ready=False)
    assert strict.process.wait(60) == 1
    strict.find("io_uring.*not permitted")
