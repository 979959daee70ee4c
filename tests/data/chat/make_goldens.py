#!/usr/bin/env python3
"""Writes goldens.jsonl: templates and variables with the text that jinja2 renders ("fails" where it does not).

    python3 tests/data/chat/make_goldens.py        needs jinja2 of tests/requirements.txt
"""

import json
import random
import re
from pathlib import Path

from conversations import Snippets, conversation
from reference import environment, render

HERE = Path(__file__).resolve().parent


def main():
    made = environment()
    chance = random.Random(20260307)
    lines = []
    for path in sorted((HERE / "templates").iterdir()):
        for _ in range(12):
            variables = conversation(chance, parts=path.name == "tools-and-dates.jinja")
            lines.append({"file": path.name, "variables": variables, "text": render(made, path.read_text(), variables)})
    snippets = Snippets(chance)
    while len(lines) < 700:
        template, variables = snippets.template(), snippets.variables()
        wanted = render(made, template, variables)
        # Few of those that fail; none that shows a function or another object without a text of its own.
        if wanted is None and chance.random() < 0.9 or wanted and re.search(r" at 0x|<Macro|<built-in", wanted):
            continue
        lines.append({"template": template, "variables": variables, "text": wanted})
    with open(HERE / "goldens.jsonl", "w", encoding="utf-8") as out:
        for line in lines:
            if line["text"] is None:
                del line["text"]
            out.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
