"""What /v1/completions means: numbers and text against transformers' goldens, against the tokenizers package, and every flag
against every other, streamed and not."""

import json
import math
import random
import time

import pytest
import requests
from conftest import BASE, BOS, CONTEXT, EOS, MODELS, ROOT, VARIANTS, VOCAB, error_of
from tokenizers import Tokenizer

TOKENIZER = Tokenizer.from_file(str(ROOT / "demo/zen-mini/tokenizer.json"))
GOLDEN = {BASE: json.loads((ROOT / "tests/data/golden/base/zen-mini.json").read_text())}
for path in sorted((ROOT / "tests/data/golden/bitdelta").glob("*.json")):
    GOLDEN[path.stem] = json.loads(path.read_text())
CLOSE = 2e-4  # float32 in another order; the largest |float64 - float32| in the goldens is 2.4e-5


def decode(ids, skip=True):
    return TOKENIZER.decode(ids, skip_special_tokens=skip)


def merge(events, index=0):
    """One choice put together from its chunks, in the form of the answer that is not streamed."""
    whole = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            assert whole["finish_reason"] is None, "a chunk after the last"
            whole["text"] += choice["text"]
            whole |= {k: v for k, v in choice.items() if k in ("finish_reason", "stop_reason", "prompt_token_ids", "prompt_logprobs")}
            if "token_ids" in choice:
                whole["token_ids"] = whole.get("token_ids", []) + choice["token_ids"]
            if choice["logprobs"] is not None:
                whole["logprobs"] = whole["logprobs"] or {k: [] for k in choice["logprobs"]}
                for name, values in choice["logprobs"].items():
                    whole["logprobs"][name] += values
    assert whole["finish_reason"] is not None
    return whole


# ---- against transformers ----

@pytest.mark.parametrize("model", GOLDEN)
def test_greedy_tokens_and_logprobs(server, model):
    for prompt in GOLDEN[model]["prompts"]:
        greedy = prompt["greedy"]
        answer = server.complete(prompt["ids"], model, max_tokens=len(greedy["ids"]), ignore_eos=True, logprobs=0, return_token_ids=True)
        choice = answer["choices"][0]
        assert choice["token_ids"] == greedy["ids"] and choice["prompt_token_ids"] == prompt["ids"]
        assert choice["finish_reason"] == "length" and choice["stop_reason"] is None and answer["model"] == model
        for got, wanted in zip(choice["logprobs"]["token_logprobs"], greedy["logprobs"], strict=True):
            assert math.isclose(got, wanted, abs_tol=CLOSE)
        assert answer["usage"] == {"prompt_tokens": len(prompt["ids"]), "completion_tokens": len(greedy["ids"]),
                                   "total_tokens": len(prompt["ids"]) + len(greedy["ids"])}


@pytest.mark.parametrize("model", [BASE, "zen-mini-coder", "zen-mini-french"])
def test_prompt_logprobs(server, model):
    """echo with logprobs, as evaluation harnesses score."""
    for prompt in GOLDEN[model]["prompts"]:
        ids = prompt["ids"]
        answer = server.complete(ids, model, max_tokens=1, logprobs=5, echo=True, ignore_eos=True)
        lists = answer["choices"][0]["logprobs"]
        assert all(len(values) == len(ids) + 1 for values in lists.values())
        assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
        for place in prompt["top"]:
            at = place["position"] + 1
            top = lists["top_logprobs"][at]
            wanted = sorted(place["logprobs"][:5], reverse=True)
            got = sorted(top.values(), reverse=True)
            assert 1 <= len(got) <= 6
            actual = lists["token_logprobs"][at]
            if len(top) >= 5:
                assert all(math.isclose(a, b, abs_tol=CLOSE) for a, b in zip(got, wanted))
            assert top[lists["tokens"][at]] >= actual
            if at < len(ids) and ids[at] in place["ids"]:
                assert math.isclose(actual, place["logprobs"][place["ids"].index(ids[at])], abs_tol=CLOSE)


def test_prompt_logprobs_field(server):
    prompt = GOLDEN[BASE]["prompts"][1]
    choice = server.complete(prompt["ids"], max_tokens=1, prompt_logprobs=3)["choices"][0]
    entries = choice["prompt_logprobs"]
    assert len(entries) == len(prompt["ids"]) and entries[0] is None and choice["logprobs"] is None
    for place in prompt["top"]:
        if place["position"] + 1 >= len(prompt["ids"]):
            continue
        entry, actual = entries[place["position"] + 1], prompt["ids"][place["position"] + 1]
        for rank, (number, logprob) in enumerate(zip(place["ids"][:3], place["logprobs"]), 1):
            assert math.isclose(entry[str(number)]["logprob"], logprob, abs_tol=CLOSE) and entry[str(number)]["rank"] == rank
            assert entry[str(number)]["decoded_token"] == decode([number], skip=False)
        if actual not in place["ids"][:3]:
            rank = place["ids"].index(actual) + 1 if actual in place["ids"] else None
            assert entry[str(actual)]["rank"] == rank or rank is None and entry[str(actual)]["rank"] > len(place["ids"])
            assert len(entry) == 4
    assert len(server.complete([BOS], max_tokens=1, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]) == 1


@pytest.mark.parametrize("fields", [{"n": 4}, {"n": 2, "best_of": 5}, {"n": 4, "stream": True}, {"n": 3, "max_tokens": 0},
                                    {"n": 3, "stream": True, "max_tokens": 0}, {"n": 3, "echo": False, "prompt_logprobs": 1}])
@pytest.mark.parametrize("model", [BASE, "zen-mini-coder"])
def test_choices_share_what_is_told_of_their_prompt(server, model, fields):
    """Computed by the first choice, told by all: a prompt is computed once for n choices, but for what is behind its last full block
    of 16 tokens. The numbers are those of a request for one choice, which are the goldens' (above)."""
    dice = random.Random()
    prompts = [[BOS, *(dice.randrange(4000) for _ in range(more))] for more in (0, dice.randrange(1, 40), dice.randrange(100, 400))]
    tell = {"echo": True, "logprobs": 5, "prompt_logprobs": 2, "return_token_ids": True, "ignore_eos": True} | fields
    if tell.get("stream"):
        del tell["prompt_logprobs"]
    body = {"max_tokens": 3, "temperature": 1, "seed": dice.randrange(2**40)} | tell
    n, new = body["n"], body["max_tokens"]

    def computed():
        return server.metric("vllm:prefix_cache_queries_total") - server.metric("vllm:prefix_cache_hits_total")

    before = computed()
    if tell.get("stream"):
        events = server.stream(prompts, model, **body)
        choices = [merge(events, i) for i in range(3 * n)]
    else:
        choices = server.complete(prompts, model, **body)["choices"]
    rows = [len(p) - (new == 0) for p in prompts]
    behind = [(r - (r - 1) // 16 * 16) * (new > 0) for r in rows]
    assert computed() - before == sum(rows) + (body.get("best_of", n) - 1) * sum(behind)
    for i, prompt in enumerate(prompts):
        one = server.complete(prompt, model, **{k: v for k, v in tell.items() if k not in ("n", "best_of", "stream")} | {"max_tokens": 1})["choices"][0]
        first, *others = mine = choices[i * n:(i + 1) * n]
        count = len(prompt) if body["echo"] else 0
        for choice in mine:
            assert choice["prompt_token_ids"] == prompt and len(choice["token_ids"]) == new
            assert all(len(values) == count + new for values in choice["logprobs"].values())
        for other in others:
            assert other.get("prompt_logprobs") == first.get("prompt_logprobs")
            assert all(values[:count] == first["logprobs"][name][:count] for name, values in other["logprobs"].items())
        assert [first["logprobs"][name][:count] for name in ("tokens", "text_offset")] == [one["logprobs"][name][:count] for name in ("tokens", "text_offset")]
        for got, wanted in zip(first["logprobs"]["token_logprobs"][1:count], one["logprobs"]["token_logprobs"][1:]):
            assert math.isclose(got, wanted, abs_tol=CLOSE)
        for got, wanted in zip((first.get("prompt_logprobs") or [])[1:], (one.get("prompt_logprobs") or [])[1:]):
            assert all(math.isclose(got[number]["logprob"], told["logprob"], abs_tol=CLOSE) for number, told in wanted.items() if number in got)


def test_what_is_shared_counts_as_often_as_it_is_told(launch):
    """The limit of an answer is that of its bytes, though the prompt's part of it is kept once."""
    server = launch("--max-response-bytes", "100000", deltas=None)
    body = {"prompt": [BOS, *range(300, 500)], "max_tokens": 0, "echo": True, "logprobs": 5}
    size = len(server.post("/v1/completions", body).content)
    most = 100_000 // size
    assert 2 < most < 20
    assert server.post("/v1/completions", body | {"n": most}).status_code == 200
    assert "too large" in error_of(server.post("/v1/completions", body | {"n": most + 2}), 400, "invalid_value")


# ---- prompts ----

def test_four_prompt_forms_agree(server):
    text, other = "The sea was", "def main():"
    ids = {t: TOKENIZER.encode(t).ids for t in (text, other)}
    single = server.complete(text, max_tokens=8)
    for form in ([text], ids[text], [ids[text]]):
        again = server.complete(form, max_tokens=8)
        assert again["choices"] == single["choices"] and again["usage"] == single["usage"]
    two = server.complete([text, other], max_tokens=8)
    assert two["choices"] == server.complete([ids[text], ids[other]], max_tokens=8)["choices"]
    assert [c["index"] for c in two["choices"]] == [0, 1] and two["choices"][0] == single["choices"][0]
    assert two["usage"]["prompt_tokens"] == len(ids[text]) + len(ids[other])
    assert server.complete(text, max_tokens=8, add_special_tokens=False)["usage"]["prompt_tokens"] == len(ids[text]) - 1


def test_special_prompts(server):
    assert server.complete("", max_tokens=1)["usage"]["prompt_tokens"] == 1
    error_of(server.post("/v1/completions", {"prompt": "", "add_special_tokens": False}), 400, "invalid_value", "prompt")
    error_of(server.post("/v1/completions", {"prompt": ["x", ""], "add_special_tokens": False}), 400, "invalid_value", "prompt")
    nul = server.complete("a\0b", max_tokens=1, echo=True)["choices"][0]["text"]
    assert nul.startswith("a\0b")
    for prompt in ([VOCAB], [[1], [VOCAB]], [2**31 - 1]):
        message = error_of(server.post("/v1/completions", {"prompt": prompt}), 400, "invalid_value", "prompt")
        assert str(VOCAB) in message
    many = server.complete([[5]] * 300, max_tokens=1)
    assert [c["index"] for c in many["choices"]] == list(range(300)) and many["usage"]["completion_tokens"] == 300
    error_of(server.post("/v1/completions", {"prompt": ["x"] * 1025}), 400, "array_above_max_length", "prompt")
    error_of(server.post("/v1/completions", {"prompt": ["x"] * 600, "n": 2}), 400, "invalid_value", "n")


def test_choices_are_ordered(server):
    answer = server.complete(["a", "b"], n=3, temperature=1, seed=5, max_tokens=6)
    assert [c["index"] for c in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == 4
    assert len({c["text"] for c in answer["choices"]}) > 2
    same = server.complete("a", n=4, best_of=4, max_tokens=4)["choices"]
    assert len({c["text"] for c in same}) == 1


def test_context_limit(server):
    def ask(count, **fields):
        return server.post("/v1/completions", {"prompt": [5] * count, "temperature": 0, "ignore_eos": True, **fields})
    assert ask(CONTEXT - 3, max_tokens=3).json()["usage"]["completion_tokens"] == 3
    assert ask(CONTEXT, max_tokens=0).json()["usage"]["completion_tokens"] == 0
    assert ask(CONTEXT - 4).json()["usage"]["completion_tokens"] == 4  # the default of 16 is shortened
    for count, fields, param in [(CONTEXT - 3, {"max_tokens": 4}, "max_tokens"), (CONTEXT, {"max_tokens": 1}, "max_tokens"),
                                 (CONTEXT, {}, "prompt"), (CONTEXT + 1, {}, "prompt"), (CONTEXT + 1, {"max_tokens": 0}, "prompt"),
                                 (1, {"max_tokens": 2**31 - 1}, "max_tokens")]:
        message = error_of(ask(count, **fields), 400, "context_length_exceeded", param)
        assert f"This model's maximum context length is {CONTEXT} tokens" in message and str(count) in message
        assert count != 1 or "but 1 prompt token and" in message
        assert fields != {"max_tokens": 1} or message.endswith(f" {CONTEXT} prompt tokens and 1 new token were requested.")
    long = server.post("/v1/completions", {"prompt": "word " * 30_000})
    assert f"maximum context length is {CONTEXT} tokens" in error_of(long, 400, "context_length_exceeded", "prompt")
    error_of(server.post("/v1/completions", {"prompt": [[5], [5] * (CONTEXT + 1)]}), 400, "context_length_exceeded", "prompt")


# ---- echo and logprobs ----

@pytest.mark.parametrize("text", ["Hello, world", "naïve 😀 日本語", "  two  spaces ", "line\nbreak\ttab"])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_echo(server, text, tokens):
    ids = TOKENIZER.encode(text).ids
    answer = server.complete(text, echo=True, logprobs=2, max_tokens=tokens, ignore_eos=True, return_token_ids=True)
    choice, plain = answer["choices"][0], server.complete(text, max_tokens=tokens, ignore_eos=True)["choices"][0]
    assert choice["text"] == text + plain["text"] and (tokens > 0 or plain["text"] == "")
    assert choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == tokens
    lists = choice["logprobs"]
    assert all(len(v) == len(ids) + tokens for v in lists.values()) and lists["tokens"][0] == "<|begin_of_text|>"
    everything = ids + choice["token_ids"]
    for i, offset in enumerate(lists["text_offset"]):
        assert offset <= len(choice["text"]) and (i == 0 or offset >= lists["text_offset"][i - 1])
        before = decode(everything[:i])
        if "\ufffd" not in before:
            assert offset == len(before), (i, offset, before)
        assert lists["tokens"][i] == decode([everything[i]], skip=False)
    assert server.complete(ids, echo=True, logprobs=2, max_tokens=tokens, ignore_eos=True)["choices"][0]["text"] == choice["text"]
    shown = server.complete(text, echo=True, max_tokens=0, skip_special_tokens=False)["choices"][0]["text"]
    assert shown == "<|begin_of_text|>" + text


def test_logprobs_do_not_depend_on_sampling(server):
    plain = server.complete("The", max_tokens=1, logprobs=5)["choices"][0]["logprobs"]["top_logprobs"][0]
    hot = server.complete("The", max_tokens=1, logprobs=5, temperature=1.7, top_p=0.5, top_k=3, presence_penalty=2, seed=1,
                          logit_bias={"5": 3})["choices"][0]["logprobs"]["top_logprobs"][0]
    assert {k: v for k, v in hot.items() if k in plain} == plain
    for k in (0, 1, 20):
        for top in server.complete("The", max_tokens=4, logprobs=k, ignore_eos=True)["choices"][0]["logprobs"]["top_logprobs"]:
            assert max(k, 1) - 3 <= len(top) <= k + 1 and all(v > -10000 for v in top.values())


def test_token_ids_as_strings(server):
    choice = server.complete("The", max_tokens=3, logprobs=2, return_tokens_as_token_ids=True, return_token_ids=True, ignore_eos=True)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert all(key.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for key in top)


def test_broken_characters(server):
    """Ids whose bytes end inside a character: replacement characters, never invalid UTF-8; offsets stay put."""
    emoji = TOKENIZER.encode("😀", add_special_tokens=False).ids
    assert len(emoji) >= 2
    for prompt in (emoji[:-1], [5, emoji[0]], emoji[:1] * 3, emoji + emoji[:1]):
        choice = server.complete(prompt, echo=True, max_tokens=0, logprobs=1)["choices"][0]
        assert choice["text"] == decode(prompt)
        assert all(token for token in choice["logprobs"]["tokens"])
    # Force the emoji's own tokens out of the model, one by one.
    first = server.complete("x", max_tokens=1, logit_bias={str(emoji[0]): 100}, return_token_ids=True)["choices"][0]
    assert first["token_ids"] == [emoji[0]] and first["text"] == "\ufffd"
    events = server.stream("x", max_tokens=3, logit_bias={str(emoji[0]): 100}, logprobs=0)
    assert merge(events)["text"] == server.complete("x", max_tokens=3, logit_bias={str(emoji[0]): 100})["choices"][0]["text"]


# ---- stopping ----

def stop_oracle(pieces, stops):
    """The text up to the first piece after which some stop string is in the text, cut at the earliest, longest match."""
    text = ""
    for piece in pieces:
        text += piece
        if found := sorted((text.index(s), -len(s), s) for s in stops if s in text):
            return text[:found[0][0]], found[0][2]
    return text, None


def test_stop_strings(server):
    """Random stop strings taken from the model's own text, against the oracle; streamed text is the same."""
    seed = time.time_ns()
    print("seed", seed)
    rng = random.Random(seed)
    for model in (BASE, "zen-mini-german", "zen-mini-russian"):
        prompt = {"zen-mini-russian": "Это", "zen-mini-german": "Die Stadt"}.get(model, "The city")
        free = server.complete(prompt, model, max_tokens=60, ignore_eos=True, return_token_ids=True)["choices"][0]
        # Pieces as a streaming decoder has them: an unfinished character waits for its end.
        texts = [decode(free["token_ids"][:i]).rstrip("\ufffd") for i in range(len(free["token_ids"]) + 1)]
        pieces = [b[len(a):] for a, b in zip(texts, texts[1:])]
        for _ in range(12):
            stops = []
            for _ in range(rng.randrange(1, 6)):
                at = rng.randrange(len(free["text"]))
                stops.append(free["text"][at:at + rng.randrange(1, 9)] + rng.choice(["", "", "\u0416"]))
            wanted, reason = stop_oracle(pieces, stops)
            fields = {"max_tokens": 60, "ignore_eos": True, "stop": stops, "return_token_ids": True, "logprobs": 1}
            choice = server.complete(prompt, model, **fields)["choices"][0]
            if reason is None:
                wanted = free["text"]
            assert choice["text"] == wanted, (stops, free["text"])
            assert choice["finish_reason"] == ("stop" if reason else "length") and choice["stop_reason"] == reason
            assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
            events = server.stream(prompt, model, **fields)
            assert merge(events) == choice
            # What is withheld is at most one character shorter than the longest stop string.
            shown = ""
            for event, before in zip(events, texts[1:]):
                shown += event["choices"][0]["text"]
                assert len(before) - len(shown) < max(map(len, stops)) or event["choices"][0]["finish_reason"]
            if reason:
                kept = server.complete(prompt, model, **fields, include_stop_str_in_output=True)["choices"][0]
                assert kept["text"] == wanted + reason


def test_stop_edge_cases(server):
    free = server.complete("The city", max_tokens=30, ignore_eos=True, return_token_ids=True)["choices"][0]
    text, ids = free["text"], free["token_ids"]
    def ask(**fields):
        return server.complete("The city", ignore_eos=True, return_token_ids=True, **fields)["choices"][0]
    assert ask(max_tokens=30, stop=[])["text"] == text and ask(max_tokens=30, stop=None)["text"] == text
    assert ask(max_tokens=30, stop="The city")["text"] == stop_oracle(list(text), ["The city"])[0]  # the prompt is not searched
    last = ask(max_tokens=3, stop=decode(ids[:3])[-1:])
    assert last["finish_reason"] == "stop"
    pending = text[:6] + "\u0416"
    assert ask(max_tokens=30, stop=pending)["text"] == text
    assert ask(max_tokens=2, stop=decode(ids[:2]) + "\u0416")["text"] == decode(ids[:2])
    late = ask(max_tokens=30, stop=text[:2], min_tokens=5)
    assert len(late["token_ids"]) > 5
    # Two that begin at one place and are both there with one token: the longer is the reason, wherever it stands in the list.
    texts = [decode(ids[:i]) for i in range(len(ids) + 1)]
    both = [(b[at:at + 1], b[at:at + 2]) for a, b in zip(texts, texts[1:]) for at in range(len(a), len(b) - 1) if b[at] not in b[:at] and "\ufffd" not in b]
    assert both
    for pair in both:
        assert {ask(max_tokens=30, stop=stops)["stop_reason"] for stops in (list(pair), list(reversed(pair)))} == {pair[1]}
    by_id = ask(max_tokens=30, stop_token_ids=[ids[4]])
    at = ids.index(ids[4])
    assert by_id["token_ids"] == ids[:at + 1] and by_id["stop_reason"] == ids[4] and by_id["finish_reason"] == "stop"
    assert by_id["text"] == decode(ids[:at])
    kept = ask(max_tokens=30, stop_token_ids=[ids[4]], include_stop_str_in_output=True)
    assert kept["text"] == decode(ids[:at + 1])
    for bad in ({"stop_token_ids": [VOCAB]}, {"stop_token_ids": [-1]}):
        answer = server.post("/v1/completions", {"prompt": "x", **bad})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "stop_token_ids"


def test_end_of_text(server):
    forced = {"logit_bias": {str(EOS): 100}, "return_token_ids": True, "logprobs": 1}
    answer = server.complete("x", max_tokens=9, **forced)
    choice = answer["choices"][0]
    assert choice["token_ids"] == [EOS] and choice["text"] == "" and answer["usage"]["completion_tokens"] == 1
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] is None and choice["logprobs"]["tokens"] == ["<|end_of_text|>"]
    later = server.complete("x", max_tokens=9, min_tokens=4, **forced)["choices"][0]
    assert len(later["token_ids"]) == 5 and later["token_ids"][4] == EOS and EOS not in later["token_ids"][:4]
    through = server.complete("x", max_tokens=4, ignore_eos=True, **forced)["choices"][0]
    assert through["token_ids"] == [EOS] * 4 and through["finish_reason"] == "length" and through["text"] == ""
    shown = server.complete("x", max_tokens=2, ignore_eos=True, skip_special_tokens=False, **forced)["choices"][0]
    assert shown["text"] == "<|end_of_text|>" * 2


# ---- sampling ----

def test_seeds(server):
    def ask(**fields):
        return [c["text"] for c in server.complete("Once", temperature=1, max_tokens=12, n=3, **fields)["choices"]]
    first = ask(seed=7)
    assert ask(seed=7) == first and ask(seed=8) != first and len(set(first)) > 1
    for seed in (-2**63, 2**63 - 1, 2**53 + 1, 0, -1):
        assert ask(seed=seed) == ask(seed=seed)
    assert ask(seed=2**53) != ask(seed=2**53 + 1)
    assert ask() != ask()


def test_sampling_fields(server):
    greedy = server.complete("Once upon", max_tokens=12)["choices"][0]["text"]
    for fields in ({"temperature": 1e-9}, {"temperature": 1, "top_k": 1}, {"temperature": 1, "top_p": 0}, {"temperature": 2, "top_p": 1e-9},
                   {"temperature": 1, "min_p": 1}, {"temperature": 1e-4}, {"temperature": 1e-38}, {"temperature": 1e-42}, {"temperature": 5e-324}):
        assert server.complete("Once upon", max_tokens=12, seed=1, **fields)["choices"][0]["text"] == greedy, fields
    ids = server.complete("Once upon", max_tokens=12, return_token_ids=True)["choices"][0]["token_ids"]
    banned = server.complete("Once upon", max_tokens=12, return_token_ids=True, logit_bias={str(ids[0]): -100, str(ids[1]): -1000})["choices"][0]
    assert ids[0] not in banned["token_ids"] and ids[1] not in banned["token_ids"]
    # Of a repeated key the last counts, as everywhere in the body.
    for values, forced in (("-100,\"9\":100", True), ("100,\"9\":-100", False)):
        body = '{"prompt":"x","max_tokens":3,"n":1,"return_token_ids":true,"ignore_eos":true,"logit_bias":{"9":%s}}' % values
        ids = requests.post(server.url + "/v1/completions", data=body).json()["choices"][0]["token_ids"]
        assert ids == [9] * 3 if forced else 9 not in ids
    message = error_of(server.post("/v1/completions", {"prompt": "x", "logit_bias": {str(VOCAB): 1}}), 400, "invalid_value", "logit_bias")
    assert str(VOCAB) in message
    apart = server.complete("a a a a", max_tokens=20, frequency_penalty=2, presence_penalty=2, ignore_eos=True, return_token_ids=True)
    loose = server.complete("a a a a", max_tokens=20, ignore_eos=True, return_token_ids=True)
    assert len(set(apart["choices"][0]["token_ids"])) > len(set(loose["choices"][0]["token_ids"]))
    assert server.complete("a a a a", max_tokens=8, repetition_penalty=1.0)["choices"] == server.complete("a a a a", max_tokens=8)["choices"]


def test_penalties_and_biases_add_up(server):
    """Log-probabilities are those before penalties and biases, so that the choice can be followed: of the 20 most likely tokens and the biased ones
    the greedy one has the greatest sum, counting what was generated, not the prompt."""
    seed = time.time_ns()
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(6):
        presence, frequency = (rng.choice([-2, -0.7, 0, 0.3, 1, 2]) for _ in range(2))
        bias = {i: rng.uniform(-3, 3) for i in rng.sample(range(200, VOCAB - 200), 5)}
        choice = server.complete("a a a a b a a b", max_tokens=40, logprobs=20, ignore_eos=True, return_token_ids=True, return_tokens_as_token_ids=True,
                                 presence_penalty=presence, frequency_penalty=frequency, logit_bias={str(k): v for k, v in bias.items()})["choices"][0]
        counts = {}
        for token, top in zip(choice["token_ids"], choice["logprobs"]["top_logprobs"], strict=True):
            value = {int(key.split(":")[1]): v for key, v in top.items()}
            total = {i: v + bias.get(i, 0) - (presence if i in counts else 0) - frequency * counts.get(i, 0) for i, v in value.items()}
            assert total[token] >= max(total.values()) - 1e-3, (presence, frequency, counts, token, total)
            counts[token] = counts.get(token, 0) + 1
    # Beyond 100 is 100: of two tokens with that bias the likelier one is chosen.
    first, second = sorted(server.complete("Once", max_tokens=1, logprobs=2, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]["top_logprobs"][0].items(),
                           key=lambda item: -item[1])[:2]
    assert first[1] > second[1] + 1e-3
    numbers = [one[0].split(":")[1] for one in (first, second)]
    answer = server.complete("Once", max_tokens=1, return_token_ids=True, logit_bias={numbers[0]: 100, numbers[1]: 1e9})
    assert answer["choices"][0]["token_ids"] == [int(numbers[0])]


# ---- streams ----

FLAGS = [
    {}, {"n": 3, "temperature": 1, "seed": 3}, {"echo": True}, {"logprobs": 3}, {"echo": True, "logprobs": 2, "n": 2},
    {"echo": True, "max_tokens": 0}, {"echo": True, "max_tokens": 0, "logprobs": 1}, {"max_tokens": 0}, {"max_tokens": 1},
    {"return_token_ids": True, "echo": True}, {"skip_special_tokens": False, "ignore_eos": True, "logit_bias": {str(EOS): 100}},
    {"stop": ["e", "th"], "logprobs": 0}, {"prompt": ["a", "b"], "n": 2, "logprobs": 1}, {"prompt_logprobs": 0, "echo": True},
    {"prompt": [[5, 6], [7]], "echo": True, "logprobs": 1},
]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("usage", [None, {}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True},
                                   {"continuous_usage_stats": True}])
def test_streams_equal_the_whole(server, flags, usage):
    fields = {"max_tokens": 6, **flags}
    prompt = fields.pop("prompt", "The old")
    whole = server.complete(prompt, "zen-mini-writer", **fields)
    events = server.stream(prompt, "zen-mini-writer", stream_options=usage, **fields)
    include = bool(usage and usage.get("include_usage"))
    running = include and usage.get("continuous_usage_stats", False)
    if include:
        final = events.pop()
        assert final["choices"] == [] and final["usage"] == whole["usage"]
    for key in ("id", "created", "model", "object"):
        assert len({json.dumps(event[key]) for event in events}) == 1
    assert events[0]["object"] == "text_completion" and events[0]["model"] == "zen-mini-writer"
    tokens, prompts = {}, {}
    for event in events:
        assert len(event["choices"]) == 1 and ("usage" in event) == include
        index = event["choices"][0]["index"]
        tokens[index] = tokens.get(index, 0) + 1
        for name in ("prompt_token_ids", "prompt_logprobs"):
            assert (name in event["choices"][0]) == (name in whole["choices"][index] and tokens[index] == 1)
        if include and not running:
            assert event["usage"] is None
        if running:
            assert event["usage"]["completion_tokens"] == (tokens[index] if fields["max_tokens"] else 0)
            assert event["usage"]["total_tokens"] == event["usage"]["prompt_tokens"] + event["usage"]["completion_tokens"]
            prompts[index // fields.get("n", 1)] = event["usage"]["prompt_tokens"]  # those of the choice's own prompt
    assert not running or sum(prompts.values()) == whole["usage"]["prompt_tokens"]
    assert [merge(events, i) for i in range(len(whole["choices"]))] == whole["choices"]
    if fields["max_tokens"]:
        assert sum(tokens.values()) == whole["usage"]["completion_tokens"]  # one chunk per token
    else:
        assert set(tokens.values()) == {1}


def test_worked_example(server):
    """Stop string END over pieces, by forcing the tokens: the withheld part is exactly a prefix."""
    events = server.stream("The city", max_tokens=20, ignore_eos=True)
    text = merge(events)["text"]
    stop = text[5:9]
    shown = "".join(e["choices"][0]["text"] for e in server.stream("The city", max_tokens=20, ignore_eos=True, stop=stop))
    assert shown == text[:text.index(stop)]


def test_stream_errors_are_plain_json(server):
    for body, status, code, param in [({"prompt": 5}, 400, "invalid_type", "prompt"), ({"prompt": "x", "model": "no"}, 404, "model_not_found", "model"),
                                      ({"prompt": [VOCAB]}, 400, "invalid_value", "prompt"),
                                      ({"prompt": "x", "max_tokens": 5000}, 400, "context_length_exceeded", "max_tokens")]:
        error_of(server.post("/v1/completions", body | {"stream": True}), status, code, param)
    answer = server.post("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}})
    error_of(answer, 400, "invalid_value", "stream_options")


# ---- model names, answer members ----

def test_models(server):
    texts = {}
    for model in MODELS:
        answer = server.complete("The", model, max_tokens=12)
        assert answer["model"] == model
        texts[model] = answer["choices"][0]["text"]
    assert len(set(texts.values())) > 8
    default = server.post("/v1/completions", {"prompt": "The", "temperature": 0, "max_tokens": 12}).json()
    assert default["model"] == BASE and default["choices"][0]["text"] == texts[BASE]
    assert server.complete("The", max_tokens=12, model=None)["model"] == BASE
    for name in ("nope", "", BASE + " ", BASE.upper(), "x" * 5000, "é" * 90, "a\0b"):
        message = error_of(server.post("/v1/completions", {"prompt": "x", "model": name}), 404, "model_not_found", "model")
        assert len(message.encode()) < 200


def test_answer_members(server):
    answer = server.complete("x", max_tokens=2)
    assert sorted(answer) == ["choices", "created", "id", "model", "object", "system_fingerprint", "usage"]
    assert answer["object"] == "text_completion" and abs(answer["created"] - time.time()) < 60
    assert sorted(answer["choices"][0]) == ["finish_reason", "index", "logprobs", "stop_reason", "text"]
    assert answer["choices"][0]["logprobs"] is None
    prints = {model: server.complete("x", model, max_tokens=1)["system_fingerprint"] for model in MODELS}
    again = {model: server.complete("x", model, max_tokens=1)["system_fingerprint"] for model in MODELS[::-1]}
    assert len(set(prints.values())) == len(MODELS) and again == prints and prints[BASE] == answer["system_fingerprint"] and answer["system_fingerprint"].startswith("fp_")


def test_order_of_checks(server):
    """A request with several faults gets the first one's answer."""
    post = lambda body, **headers: requests.post(server.url + "/v1/completions", data=body, headers=headers)
    error_of(post(b"not json", **{"Content-Type": "text/plain"}), 415, "unsupported_content_type")
    error_of(post(b"not json"), 400, "invalid_json")
    error_of(post(b'{"prompt":5,"model":"no"}'), 400, "invalid_type", "prompt")
    error_of(post(b'{"prompt":[99999],"model":"no"}'), 404, "model_not_found", "model")
    error_of(post(b'{"prompt":[99999],"max_tokens":99999}'), 400, "invalid_value", "prompt")


def test_queue_full(launch):
    server = launch("--max-queue", "4", "--max-seqs", "1")
    import concurrent.futures
    def ask(_):
        return requests.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 300, "ignore_eos": True})
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(ask, range(24)))
    refused = [a for a in answers if a.status_code == 429]
    assert refused and len(refused) < 24 and all(a.status_code in (200, 429) for a in answers)
    for answer in refused:
        error_of(answer, 429, "rate_limit_exceeded")
        assert 1 <= int(answer.headers["retry-after"]) <= 60


def test_nothing_to_generate(server, launch):
    """Choices that ask nothing of the model, more of them than sequences at once: no step runs that would wake anybody."""
    def ask(one, count, **fields):
        answer = one.session.post(one.url + "/v1/completions", json={"max_tokens": 0, **fields}, timeout=20)
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        assert [c["index"] for c in choices] == list(range(count)) and all(c["text"] == "" and c["finish_reason"] == "length" for c in choices)
    small = launch("--max-seqs", "2")
    for model in (BASE, VARIANTS[0]):
        ask(small, 3, model=model, prompt="a", n=3, temperature=1)
        ask(small, 14, model=model, prompt=["a", "b"], n=7, temperature=1)
        ask(server, 700, model=model, prompt=[[5]] * 700)
    assert small.complete("a", max_tokens=1)["usage"]["completion_tokens"] == 1
