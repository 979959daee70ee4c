"""`bitdelta tokenize` against the `tokenizers` package, on fresh random text.

10,000 strings for each tokenizer of tests/data/tokenizers, and some for files derived from them that use what the shipped ones do not.
BD_TEST_SEED repeats a run; the seed is printed. Every code point may occur but those of UNEQUAL.
"""

import functools
import itertools
import json
import os
import random
import subprocess
import time
import unicodedata
from pathlib import Path

import pytest
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
BINARY = os.environ.get("BITDELTA_BIN", str(ROOT / "build" / "bitdelta"))
DATA = ROOT / "tests" / "data" / "tokenizers"
FILES = {name: DATA / name / "tokenizer.json" for name in ("gpt2", "llama3", "qwen3", "llama2", "phi3-mini")}
FILES["zen-mini"] = ROOT / "demo" / "zen-mini" / "tokenizer.json"
SEED = int(os.environ.get("BD_TEST_SEED", time.time_ns()))

OLD = unicodedata.ucd_3_2_0
BY_CATEGORY = {}  # by Unicode 3.2: evenly many of each kind, where drawing from all planes gives mostly unassigned ones
for point in range(0x30000):
    kind = OLD.category(chr(point))
    if kind not in ("Cn", "Cs", "Co"):
        BY_CATEGORY.setdefault(kind, []).append(chr(point))
EMOJI = [chr(c) for c in range(0x1F600, 0x1F650)] + ["\u200d", "\ufe0f", "\U0001f3fd", "\U0001f1e9", "\U0001f1ea"]
# (first, last) of the code points left out, all of them combining marks or parts of compositions that are newer than the
# package's NFC tables, which are of Unicode 9: it does not reorder or compose them. Found by trying every code point.
UNEQUAL = [
    (0x7FD, 0x7FD), (0x898, 0x89F), (0x8CA, 0x8D3), (0x9FE, 0x9FE), (0xC3C, 0xC3C), (0xD3B, 0xD3C), (0xEBA, 0xEBA),
    (0x1715, 0x1715), (0x1ABF, 0x1ACE), (0x1DF6, 0x1DFA), (0xA82C, 0xA82C), (0x10D24, 0x10D27), (0x10EAB, 0x10EAC),
    (0x10EFD, 0x10EFF), (0x10F46, 0x10F50), (0x10F82, 0x10F85), (0x11070, 0x11070), (0x1133B, 0x1133B),
    (0x1145E, 0x1145E), (0x11839, 0x1183A), (0x11930, 0x11930), (0x1193D, 0x1193E), (0x11943, 0x11943),
    (0x119E0, 0x119E0), (0x11A34, 0x11A34), (0x11A47, 0x11A47), (0x11A99, 0x11A99), (0x11D42, 0x11D42),
    (0x11D44, 0x11D45), (0x11D97, 0x11D97), (0x11F41, 0x11F42), (0x16FF0, 0x16FF1), (0x1E08F, 0x1E08F),
    (0x1E130, 0x1E136), (0x1E2AE, 0x1E2AE), (0x1E2EC, 0x1E2EF), (0x1E4EC, 0x1E4EF),
    # The same of Unicode 16, for a utf8proc newer than Debian 12's.
    (0x897, 0x897), (0x10D69, 0x10D6D), (0x10EFC, 0x10EFC), (0x11380, 0x113E2), (0x16100, 0x16139),
    (0x16D40, 0x16D79), (0x1E5EE, 0x1E5EF),
]
SPACES = list(" \t\n\r\x0b\x0c\x85\xa0\u1680\u2003\u2028\u2029\u202f\u3000\u200b\ufeff\u180e")
WORDS = "the quick brown fox's they'RE I'll we've it'd don'T 'S 'ſ Straße naïve café 1 22 333 4444 x² ½ 東京 привет γειά नमस्ते 한국어 ไทย العربية".split()
NULS = ["\0", "\x01", "\x7f", "\x1b", "\x80", "\x9f", "\ufffe", "\uffff", "\U0010ffff"]
JOINED = "👩‍👩‍👧 👨🏽‍🚀 🏳️‍🌈 🇩🇪 1️⃣ ❤️‍🔥 🧑🏿‍🤝‍🧑🏻 👩‍ ‍👧".split(" ")
CODE = [
    "def f(x: int = 0) -> None:\n    return x ** 2  # why\n",
    "for (size_t i = 0; i < n; i++) {\n\t\ta[i] |= 0x1fUL << 3;\n\t}\n",
    "SELECT a.*, COUNT(1) FROM t AS a WHERE a.b LIKE '%x_' GROUP BY 1;",
    '{"key": [1.5e-3, null, "\\u00e9\\n"], "k2": {}}',
    "<div class=\"a b\">&nbsp;&#x41;</div><!-- -->",
    "$ grep -rn 'foo|bar' ./src | awk '{print $2}' > /dev/null 2>&1",
    "https://user:pw@example.org:8080/a/b?c=d&e=%20#f",
    "    if (!p) { goto fail; }\r\n    \r\n",
]
# What a byte-fallback decoder or a reader of Latin-1 for UTF-8 leaves behind.
BROKEN = "<0xE2> <0x82><0xAC> <0x0A> <0xZZ> <0x <0xFF><0xFE> <0x0> \ufffd \ufffd\ufffd Ã© â‚¬ Ä Ġ Ċ ĠĠthe ▁ ▁▁the ▁\u2581a Ā ċ".split(" ")
RUNS = list("aA 0.=\n\t_-é東") + ["  \n", "ab", "\u0301", "\u200d", "🙂", "\xa0", "12", "▁", "!?", "\r\n"]


def anywhere(rng):
    """Any character of the 17 planes, unassigned and private ones too."""
    while True:
        point = rng.randrange(rng.choice([0x250, 0x3000, 0x10000, 0x20000, 0x40000, 0xF0000, 0x110000]))
        if not 0xD800 <= point < 0xE000 and not any(first <= point <= last for first, last in UNEQUAL):
            return chr(point)


def nearly(rng, special):
    """A special token's text with one character missing, doubled, exchanged or put in."""
    at = rng.randrange(len(special))
    return special[:at] + rng.choice(["", special[at] * 2, rng.choice("<|>_ a0"), special[at] + " "]) + special[at + 1 :]


def piece(rng, specials):
    if rng.random() < 0.3:
        return rarer_piece(rng, specials)
    roll = rng.random()
    if roll < 0.35:
        return rng.choice(WORDS) + rng.choice(["", " ", " ", "  ", "\n", ", "])
    if roll < 0.5:
        letters = BY_CATEGORY[rng.choice(list(BY_CATEGORY))]
        return "".join(rng.choice(letters) for _ in range(rng.randint(1, 6)))
    if roll < 0.62:
        return "".join(rng.choice(SPACES) for _ in range(rng.randint(1, 5)))
    if roll < 0.72:
        return "".join(chr(rng.randint(33, 126)) for _ in range(rng.randint(1, 12)))
    if roll < 0.8:  # decomposed, out of order and odd combining sequences
        base = rng.choice("aeiouAEINSO가각ᄀ\u0627\u09c7\u0b47\u1025")
        return base + "".join(rng.choice(BY_CATEGORY["Mn"] + list("\u0301\u0323\u0307\u1161\u11a8\u09be")) for _ in range(rng.randint(1, 5)))
    if roll < 0.86:
        return rng.choice(EMOJI) * rng.randint(1, 3)
    if roll < 0.9:
        return rng.choice(NULS)
    if roll < 0.93:
        return rng.choice("aA 0.=\n") * rng.randint(20, 120)
    return rng.choice(specials)[: rng.choice([99, 99, 99, 5])]


def rarer_piece(rng, specials):
    roll = rng.random()
    if roll < 0.25:
        return "".join(anywhere(rng) for _ in range(rng.randint(1, 6)))
    if roll < 0.4:
        return nearly(rng, rng.choice(specials))
    if roll < 0.55:
        return rng.choice(JOINED)
    if roll < 0.7:
        return rng.choice(CODE)
    if roll < 0.85:
        return "".join(rng.choice(BROKEN) for _ in range(rng.randint(1, 3)))
    if roll < 0.985:
        return str(rng.randrange(10 ** rng.randint(1, 30))) + rng.choice(["", ".", ",", "e-7", " ", "\u0663", "½", "Ⅷ"])
    return rng.choice(RUNS) * rng.choice([200, 700, 3000])


def text(rng, specials):
    return "".join(piece(rng, specials) for _ in range(rng.choice([0, 1, 1, 2, 3, 5, 8, 20, 40])))


def run_lines(path, lines, *flags):
    payload = "".join(json.dumps(line, ensure_ascii=bool(i % 2)) + "\n" for i, line in enumerate(lines))
    done = subprocess.run([BINARY, "tokenize", "--tokenizer", str(path), *flags], input=payload.encode(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    answers = [json.loads(line) for line in done.stdout.decode().split("\n") if line]
    assert len(answers) == len(lines)
    return answers


def own(document):
    """A copy whose parts may be changed; the vocabulary and the merges are shared."""
    return {**document, "model": dict(document["model"]), "added_tokens": [dict(token) for token in document["added_tokens"]]}


def without_special(document):
    """The same tokenizer with its special tokens unmatchable: what parse_special false means."""
    plain = own(document)
    plain["added_tokens"] = [t for t in plain["added_tokens"] if not t["special"]]
    # Ids follow from the order, so drop only what nothing follows; else keep names that no text holds.
    if any(t["id"] >= len(document["model"]["vocab"]) for t in plain["added_tokens"]):
        plain = own(document)
        for token in plain["added_tokens"]:
            if token["special"] and token["id"] >= len(document["model"]["vocab"]):
                token["content"] = f"\U000e0001unmatchable {token['id']}\U000e0001"
                token["lstrip"] = token["rstrip"] = False
        plain["added_tokens"] = [t for t in plain["added_tokens"] if not (t["special"] and t["id"] < len(document["model"]["vocab"]))]
    plain["post_processor"] = None
    return plain


def compare(path, document, count, rng, parse_plain=True):
    """Encodes `count` random strings and decodes as many lists of ids."""
    print(f"BD_TEST_SEED={SEED}")
    reference = Tokenizer.from_str(json.dumps(document))
    plain = Tokenizer.from_str(json.dumps(without_special(document))) if parse_plain else None
    specials = [t["content"] for t in document["added_tokens"]] or ["<s>"]
    asks = []
    for _ in range(count):
        parse = plain is None or rng.random() < 0.7
        special = parse and rng.random() < 0.5
        asks.append({"text": text(rng, specials), "add_special_tokens": special, "parse_special": parse})
    expected = [None] * count
    for parse, special in ((True, True), (True, False), (False, False)):
        chosen = [i for i, ask in enumerate(asks) if (ask["parse_special"], ask["add_special_tokens"]) == (parse, special)]
        batch = (reference if parse else plain).encode_batch([asks[i]["text"] for i in chosen], add_special_tokens=special) if chosen else []
        for i, encoding in zip(chosen, batch):
            expected[i] = encoding.ids
    for ask, want, got in zip(asks, expected, run_lines(path, asks)):
        assert got["ids"] == want, (SEED, ask)

    lists = expected[: count // 2]
    size = max(reference.get_vocab(with_added_tokens=True).values()) + 1
    for ids in expected[count // 2 :]:
        roll = rng.random()
        if roll < 0.3:
            ids = [rng.randrange(size + 10) for _ in range(rng.randint(0, 30))]
        elif roll < 0.5:
            ids = [rng.randrange(min(size, 300)) for _ in range(rng.randint(0, 30))]  # bytes, mostly
        elif roll < 0.75 and ids:
            ids = ids[rng.randrange(len(ids)) :][: rng.randint(1, 20)]
        lists.append(ids)
    # Release 0.23 of the package shows a "normalized" token in its normalized form, earlier ones by its content.
    changed = {t["id"] for t in document["added_tokens"] if t["normalized"]}
    lists = [[i for i in ids if i not in changed] for ids in lists] if changed else lists
    asks = [{"ids": ids, "skip_special_tokens": rng.random() < 0.5} for ids in lists]
    for skip in (True, False):
        chosen = [i for i, ask in enumerate(asks) if ask["skip_special_tokens"] == skip]
        for i, want in zip(chosen, reference.decode_batch([lists[i] for i in chosen], skip_special_tokens=skip)):
            expected[i] = want
    for ask, want, got in zip(asks, expected, run_lines(path, asks, "--decode")):
        assert got["text"] == want, (SEED, ask)


@functools.cache
def parsed(name):
    return json.loads(FILES[name].read_text(encoding="utf-8"))


def load(name):
    return own(parsed(name))


@pytest.mark.parametrize("name", FILES)
def test_shipped(name):
    compare(FILES[name], load(name), 1500 if name == "zen-mini" else 10000, random.Random(f"{SEED} {name}"))


def added(document, **flags):
    """Three more added tokens with these flags; new ids follow the ones there are."""
    start = max([len(document["model"]["vocab"]) - 1] + [t["id"] for t in document["added_tokens"]]) + 1
    base = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    for content in ("quick", "Straße\u0301", "<tag x>"):
        document["added_tokens"].append({"id": start, "content": content, **base, **flags})
        if content in document["model"]["vocab"]:
            document["added_tokens"][-1]["id"] = document["model"]["vocab"][content]
        else:
            start += 1
    return document


def with_flags(name, **flags):
    return added(load(name), **flags)


def with_model(name, **options):
    document = load(name)
    document["model"].update(options)
    return document


def with_part(name, part, value):
    document = load(name)
    document[part] = value
    return document


def split(pattern, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}


def byte_level(**options):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True, **options}


def template(*single):
    ids = {"<a>": 5, "<b>": 7}
    pieces = [{"Sequence": {"id": s, "type_id": 0}} if s == "A" else {"SpecialToken": {"id": s, "type_id": 0}} for s in single]
    tokens = {s: {"id": s, "ids": [ids[s], ids[s] + 1], "tokens": [s, s]} for s in set(single) - {"A"}}
    return {"type": "TemplateProcessing", "single": pieces, "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}], "special_tokens": tokens}


# With characters missing from the vocabulary, for unknown tokens.
def thinned(name, **options):
    document = with_model(name, **options)
    model = document["model"]
    gone = set("aeé東<") | {f"<0x{b:02X}>" for b in range(0x80, 0xC8)}
    keep = {t for t in model["vocab"] if not (gone & set(t) or t in gone)} | {"<unk>", "<s>", "</s>"}
    model["vocab"] = {t: i for i, t in enumerate(sorted(keep, key=model["vocab"].get))}
    pairs = [m if isinstance(m, list) else m.split(" ") for m in model["merges"]]
    model["merges"] = [m for m in pairs if all(t in keep for t in (*m, "".join(m)))]
    return document


VARIANTS = {
    "prefix_space": lambda: with_part("gpt2", "pre_tokenizer", byte_level(add_prefix_space=True)),
    "prefix_space_no_regex": lambda: with_part("gpt2", "pre_tokenizer", byte_level(add_prefix_space=True, use_regex=False)),
    "no_regex": lambda: with_part("gpt2", "pre_tokenizer", byte_level(use_regex=False)),
    "digits": lambda: with_part("gpt2", "pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level()]}),
    "digit_runs": lambda: with_part("gpt2", "pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": False}, byte_level(use_regex=False)]}),
    "two_splits": lambda: with_part("zen-mini", "pre_tokenizer", {"type": "Sequence", "pretokenizers": [split({"Regex": "[0-9]{1,2}"}), split({"String": "a"}), byte_level()]}),
    "removed_inverted": lambda: with_part("zen-mini", "pre_tokenizer", {"type": "Sequence", "pretokenizers": [split({"Regex": "[a-z]+|[0-9]"}, "Removed", True), byte_level(use_regex=False)]}),
    "other_pattern": lambda: with_part("gpt2", "pre_tokenizer", {"type": "Sequence", "pretokenizers": [split({"Regex": r"[^\r\n\p{L}\p{N}]?\p{Lu}?\p{Ll}+|\p{N}{2}|\s+(?!\S)|\s+"}), byte_level(use_regex=False)]}),
    "ignore_merges": lambda: with_model("gpt2", ignore_merges=True),
    "no_ignore_merges": lambda: with_model("llama3", ignore_merges=False),
    "flags_plain": lambda: with_flags("qwen3"),
    "flags_normalized": lambda: with_flags("qwen3", normalized=True),
    "flags_normalized_sp": lambda: with_flags("llama2", normalized=True),
    "flags_single_word": lambda: with_flags("zen-mini", single_word=True),
    "flags_lstrip": lambda: with_flags("gpt2", lstrip=True),
    "flags_strip": lambda: with_flags("phi3-mini", lstrip=True, rstrip=True, special=True),
    "template": lambda: with_part("zen-mini", "post_processor", {"type": "Sequence", "processors": [byte_level(), template("<b>", "<a>", "A", "<b>")]}),
    "no_normalizer_sp": lambda: with_part("llama2", "normalizer", None),
    "nfc_sp": lambda: with_part("llama2", "normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, {"type": "Replace", "pattern": {"String": "th"}, "content": "q"}]}),
    "unknown_fused": lambda: thinned("llama2"),
    "unknown_single": lambda: thinned("llama2", fuse_unk=False),
    "unknown_no_bytes": lambda: thinned("llama2", byte_fallback=False),
    "unknown_dropped": lambda: thinned("llama2", byte_fallback=False, unk_token=None),
    "sp_ignore_merges": lambda: with_model("phi3-mini", ignore_merges=True),
    "no_decoder": lambda: with_part("llama2", "decoder", None),
    "fallback_decoder": lambda: with_part("llama2", "decoder", {"type": "ByteFallback"}),
    "strip_three": lambda: with_part("llama2", "decoder", {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 3, "stop": 0}]}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name, tmp_path):
    document = VARIANTS[name]()
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    compare(path, document, 300, random.Random(f"{SEED} {name}"), parse_plain=False)


def shuffled(name):
    """Merges in an order that no training gives: low ranks turn up after high ones."""
    document = load(name)
    merges = list(document["model"]["merges"])
    random.Random(f"{SEED} {name} merges").shuffle(merges)
    document["model"]["merges"] = merges
    return document


def toy():
    """All strings of up to eight of two letters, and each way to make each of them, in any order: nearly every merge gives a pair of lower rank."""
    rng = random.Random(f"{SEED} toy")
    tokens = [t for size in range(1, 9) for t in map("".join, itertools.product("ab", repeat=size))]
    merges = [[t[:cut], t[cut:]] for t in tokens for cut in range(1, len(t))]
    rng.shuffle(merges)
    document = with_model("llama2", byte_fallback=False, merges=merges, vocab={t: i for i, t in enumerate(["<unk>", "<s>", "</s>", *tokens])})
    return document | {"normalizer": None}


HUGE = {name: functools.partial(load, name) for name in FILES}
HUGE |= {f"shuffled {name}": functools.partial(shuffled, name) for name in ("gpt2", "llama2")}
HUGE["toy"] = toy
HUGE |= {name: VARIANTS[name] for name in ("unknown_fused", "unknown_single", "unknown_dropped")}


@pytest.mark.parametrize("name", HUGE)
def test_huge_words(name, tmp_path):
    """Single words of 100,000 characters and more, and one short of where such words begin."""
    print(f"BD_TEST_SEED={SEED}")
    rng = random.Random(f"{SEED} {name} huge")
    document = HUGE[name]()
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    reference = Tokenizer.from_str(json.dumps(document))
    words = ["a" * 200_000, *("".join(rng.choices(letters, k=count)) for letters, count in (
        ("abcdefghijklmnopqrstuvwxyz", 100_000), ("abcdefghijklmnopqrstuvwxyz", (1 << 16) - 1), ("ab", 70_000 + rng.randrange(999)),
        ("abc", 100_000), ("etaoin", 100_000), ("aé東ж", 70_000), ("=-_*", 70_000), ("0123456789", 70_000)))]
    words.append("".join(rng.choices("the of and ing tion er".split(), k=40_000)))
    asks = [{"text": word, "add_special_tokens": False, "parse_special": True} for word in words]
    for word, want, got in zip(words, reference.encode_batch(words, add_special_tokens=False), run_lines(path, asks)):
        assert got["ids"] == want.ids, (SEED, word[:100], len(word))


def refused(path):
    done = subprocess.run([BINARY, "tokenize", "--tokenizer", str(path)], input=b'{"text":"a"}\n', capture_output=True)
    assert done.returncode == 1 and done.stdout == b"", done
    return done.stderr.decode()


@pytest.mark.parametrize(
    "part, value, word",
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": ""}, "Precompiled"),
        ("pre_tokenizer", {"type": "BertPreTokenizer"}, "BertPreTokenizer"),
        ("post_processor", {"type": "RobertaProcessing"}, "RobertaProcessing"),
        ("decoder", {"type": "WordPiece"}, "WordPiece"),
        ("model", {"type": "Unigram", "vocab": []}, "Unigram"),
    ],
)
def test_unknown_component_is_named(part, value, word, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(with_part("zen-mini", part, value)), encoding="utf-8")
    message = refused(path)
    assert word in message and part in message


@pytest.mark.parametrize("name", FILES)
def test_ids_that_no_token_has(name):
    """Passed over, as by the package; negative ones are refused by both."""
    package, rng = Tokenizer.from_file(str(FILES[name])), random.Random(f"{SEED} {name} ids")
    known = package.get_vocab_size(with_added_tokens=True)
    lists = [[rng.choice([rng.randrange(known), rng.randrange(known, 1 << 31), known + 64, (1 << 31) - 1]) for _ in range(rng.randrange(1, 12))] for _ in range(200)]
    lines = [json.dumps({"ids": ids, "skip_special_tokens": False}) for ids in lists]
    done = subprocess.run([BINARY, "tokenize", "--tokenizer", str(FILES[name]), "--decode"], input="\n".join(lines), capture_output=True, text=True, check=True)
    assert [json.loads(line)["text"] for line in done.stdout.rstrip("\n").split("\n")] == [package.decode(ids, skip_special_tokens=False) for ids in lists]
    with pytest.raises(OverflowError):
        package.decode([-1])
    done = subprocess.run([BINARY, "tokenize", "--tokenizer", str(FILES[name]), "--decode"], input='{"ids":[5,-1]}', capture_output=True, text=True)
    assert done.returncode == 1 and "from 0 on" in done.stderr


def test_missing_file_is_named(tmp_path):
    assert "nowhere.json" in refused(tmp_path / "nowhere.json")


@pytest.mark.parametrize("line", ["{", "[]", "1", '{"text":1}', "{}", '{"text":"\\ud800"}', '{"text":"a","parse_special":1}'])
def test_faulty_line_is_numbered(line):
    payload = b'{"text":"a"}\n\n' + line.encode() + b'\n{"text":"b"}\n'
    done = subprocess.run([BINARY, "tokenize", "--tokenizer", str(FILES["zen-mini"])], input=payload, capture_output=True)
    assert done.returncode == 1 and b"line 3" in done.stderr
    assert len(done.stdout.splitlines()) == 1
