"""SIGINT, SIGTERM and SIGHUP to a tool that is writing: what it had begun is gone, and it has died of the signal, as shells and make expect.
Nothing is timed: the tool is held where its temporary exists and the result does not."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("numpy")

from test_compress import BINARY, ROOT, big_pair  # noqa: E402
from test_reshard import big_delta  # noqa: E402

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def compress(folder):
    base, tuned = big_pair(folder, 48)
    return ["compress", "--base", base, "--finetuned", tuned, "--out", folder / "out"]


def reshard(folder):
    return ["reshard", "--delta", big_delta(folder / "delta"), "--out", folder / "out", "--shards", "8"]


def generate(folder):
    ids = ",".join(["665"] * 1500)
    return ["generate", "--base", ROOT / "demo/zen-mini", "--backend", "cpu", "--prompt-ids", ids, "--max-tokens", "0", "--chunk-tokens", "1", "--threads", "1",
            "--dump-logits", folder / "out"]


def hear_all():
    """Also where whoever runs the tests has told them to ignore some, as nohup does."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def stop(child):
    """Returns when it stands still, not when the signal is on its way."""
    child.send_signal(signal.SIGSTOP)
    while child.poll() is None and Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        time.sleep(0.001)


def hold(command, folder, **options):
    """A run that is stopped while its temporary exists, and no result."""
    options.setdefault("preexec_fn", hear_all)
    for _ in range(50):
        child = subprocess.Popen([BINARY, *map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **options)
        while child.poll() is None and not list(folder.glob("out.*")):
            time.sleep(0.001)
        stop(child)
        if child.poll() is None and list(folder.glob("out.*")) and not (folder / "out").exists():
            return child
        child.kill()
        child.communicate()
        subprocess.run(["rm", "-rf", folder / "out"], check=True)
    raise AssertionError("never met while it was writing")


@pytest.mark.parametrize("tool", [compress, reshard, generate])
def test_nothing_half_done_stays(tmp_path, tool):
    command = tool(tmp_path)
    before = sorted(p.name for p in tmp_path.iterdir())
    for number in SIGNALS:
        child = hold(command, tmp_path)
        child.send_signal(number)
        child.send_signal(signal.SIGCONT)
        _, said = child.communicate(timeout=60)
        assert child.returncode == -number, said
        assert f"{tmp_path / 'out'}: given up: {signal.strsignal(number)}" in said
        assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize("tool", [compress, reshard, generate])
def test_nobody_reads_on(tmp_path, tool):
    """Whoever watched the progress has left, as with `2>&1 | head`: the work goes on and is whole."""
    command = tool(tmp_path)
    before = {p.name for p in tmp_path.iterdir()}
    child = hold(command, tmp_path)
    child.stderr.close()
    child.send_signal(signal.SIGCONT)
    assert child.wait(timeout=60) == 0
    assert {p.name for p in tmp_path.iterdir()} == before | {"out"}


def test_what_is_ignored_stays_so(tmp_path):
    """As nohup starts it."""
    child = hold(compress(tmp_path), tmp_path, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    child.send_signal(signal.SIGHUP)
    child.send_signal(signal.SIGCONT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 0, said
    assert (tmp_path / "out" / "delta.json").is_file()
