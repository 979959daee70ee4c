"""Chat templates of the C renderer against jinja2, on fresh random conversations and templates."""

import json
import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from conftest import BINARY, ROOT

DATA = ROOT / "tests" / "data" / "chat"
sys.path.insert(0, str(DATA))
from conversations import Snippets, conversation  # noqa: E402
from reference import environment, render  # noqa: E402

RENDERER = Path(BINARY).parent / "tests" / "test_tokenizer_chat"
SNIPPETS = 2000
CONVERSATIONS = 120


def answers_of(lines):
    """What the renderer says to {"template", "variables"} lines."""
    if not RENDERER.exists():
        pytest.skip("the unit tests are not built")
    sent = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    done = subprocess.run([RENDERER, "--lines"], input=sent.encode(), capture_output=True, cwd=ROOT, env={"TZ": "UTC"}, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return [json.loads(line) for line in done.stdout.decode().rstrip("\n").split("\n")]


def compare(lines, seed):
    """Counts: same text, fails on both sides, refused here as unsupported."""
    counts = {"same": 0, "fails": 0, "refused": 0}
    made = environment()
    for line, answer in zip(lines, answers_of(lines), strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            wanted = render(made, line["template"], line["variables"])
        where = f"seed {seed}\n{line['template']}\n{json.dumps(line['variables'], ensure_ascii=False)}\nwanted {wanted!r}\ngot    {answer}"
        if answer["status"] == "BD_OK":
            assert wanted == answer["text"], where
            counts["same"] += 1
        elif wanted is None:
            counts["fails"] += 1
        else:
            known = answer["status"] == "BD_E_UNSUPPORTED" or "64 bits" in answer["error"]
            assert known, where
            counts["refused"] += 1
    return counts


def test_random_templates():
    seed = random.SystemRandom().getrandbits(32)
    snippets = Snippets(random.Random(seed))
    lines = [{"template": snippets.template(), "variables": snippets.variables()} for _ in range(SNIPPETS)]
    counts = compare(lines, seed)
    print(f"seed {seed}: {counts}")
    assert counts["same"] > SNIPPETS // 4 and counts["refused"] < SNIPPETS // 20, counts


NUMBERS = ["0", "1", "3", "-7", "true", str(2**62), str(-(2**63) + 1), "-0.0", "0.1", "-0.3", "-2.0", "7.5", "-1e300", "1e-310", "1e308 * 10", "-1e308 * 10",
           "1e308 * 10 - 1e308 * 10"]


def test_arithmetic():
    """Each operator over each pair: signs of zero, the last bit, what overflows, what has no answer."""
    lines = [{"template": f"{{{{ ({a}) {op} ({b}) }}}}", "variables": {}}
             for op in ("+", "-", "*", "/", "//", "%") for a in NUMBERS for b in NUMBERS]
    counts = compare(lines, "fixed")
    assert counts["same"] > len(lines) * 3 // 4, counts


RARE = ["{{ 'abc'.startswith(('', 5)) }}", "{{ 'abc'.endswith(('c', none)) }}", "{{ 1e3 % -2 // -1 }}", "{{ -(not none) / 1 // -2 }}"]


def test_rare_templates():
    """What random templates found once."""
    compare([{"template": template, "variables": {}} for template in RARE], "fixed")


@pytest.mark.parametrize("path", sorted((DATA / "templates").iterdir()), ids=lambda path: path.stem)
def test_random_conversations(path):
    seed = random.SystemRandom().getrandbits(32)
    chance = random.Random(seed)
    lines = [{"template": path.read_text(), "variables": conversation(chance, parts=chance.random() < 0.3)} for _ in range(CONVERSATIONS)]
    counts = compare(lines, seed)
    print(f"seed {seed}: {counts}")
    assert counts["same"] > CONVERSATIONS // 20 and counts["refused"] == 0, counts
