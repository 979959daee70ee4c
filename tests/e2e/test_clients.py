"""What clients send and read: LangChain itself, and the requests of evaluation harnesses and load generators as their sources make them."""

import json

import pytest
import requests
from conftest import BASE, BOS, CONTEXT, EOS, VARIANTS, error_of
from test_http_completions import TOKENIZER, merge

MODEL = VARIANTS[0]


def test_langchain(server):
    """Batches of 20, nulls for unset fields, slices of n, usage, streams."""
    langchain = pytest.importorskip("langchain_openai")
    fields = dict(model=MODEL, base_url=server.url + "/v1", api_key="none", max_retries=0)
    model = langchain.OpenAI(**fields, max_tokens=8, temperature=0)
    prompts = [f"The {word}" for word in "sea old city man sun star house day way end law king life war book child".split()] * 2
    whole = {text: server.complete(text, MODEL, max_tokens=8)["choices"][0]["text"] for text in set(prompts)}
    answer = model.generate(prompts)
    assert [one[0].text for one in answer.generations] == [whole[text] for text in prompts]
    usage = answer.llm_output["token_usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0
    assert model.invoke(prompts[0], stop=[whole[prompts[0]][3:5]]) == whole[prompts[0]][:whole[prompts[0]].index(whole[prompts[0]][3:5])]
    assert "".join(model.stream(prompts[1])) == whole[prompts[1]]
    several = langchain.OpenAI(**fields, max_tokens=4, temperature=1, n=3, best_of=5, seed=1).generate(prompts[:2])
    assert [len(one) for one in several.generations] == [3, 3]


def test_harness_scoring(server):
    """lm-evaluation-harness: unequal id lists with echo; the slices it takes hold numbers only, of the scored tokens."""
    texts = ["The sea was calm.", "def f(x): return x", "é😀 SELECT", "a"]
    prompts = [TOKENIZER.encode(text).ids for text in texts] + [[5] * (CONTEXT - 1)]
    body = {"model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    choices = sorted(server.post("/v1/completions", body).json()["choices"], key=lambda c: c["index"])
    for choice, ids in zip(choices, prompts, strict=True):
        lists = choice["logprobs"]
        assert len(lists["token_logprobs"]) == len(ids) + 1
        for start in range(1, min(len(ids), 5)):
            values, tops = lists["token_logprobs"][start:-1], lists["top_logprobs"][start:-1]
            assert len(values) == len(ids) - start and sum(values) <= 0
            assert all(value <= max(top.values()) for value, top in zip(values, tops))
    old = server.post("/v1/completions", {"model": MODEL, "prompt": prompts[:3], "max_tokens": 0, "logprobs": 10, "temperature": 0, "echo": True}).json()
    for choice, new in zip(old["choices"], choices):
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(new["logprobs"]["token_logprobs"][1:-1], abs=1e-4)
    string = server.post("/v1/completions", body | {"prompt": texts[:2]}).json()["choices"]
    assert [c["logprobs"]["tokens"] for c in string] == [c["logprobs"]["tokens"] for c in choices[:2]]
    # A forced end of text is in the lists, so that cutting one entry off loses no scored token.
    end = server.post("/v1/completions", body | {"prompt": prompts[:1], "logit_bias": {str(EOS): 100}}).json()["choices"][0]
    assert end["finish_reason"] == "stop" and len(end["logprobs"]["tokens"]) == len(prompts[0]) + 1


def test_harness_generation(server):
    """Stop lists that are long or empty, task options nobody knows."""
    body = {"prompt": ["Q: 1\nA:", "def f():"], "model": MODEL, "max_tokens": 24, "temperature": 0, "seed": 1234, "do_sample": False, "top_k": 0, "num_beams": 1}
    free = server.post("/v1/completions", body | {"stop": []}).json()["choices"]
    assert [c["index"] for c in free] == [0, 1]
    stops = ["Question:", "</s>", "<|im_end|>", "\n\n\n", free[0]["text"][4:7], "<|end_of_text|>", "<|eot_id|>"]
    cut = server.post("/v1/completions", body | {"stop": stops}).json()["choices"][0]
    assert cut["text"] == free[0]["text"][:free[0]["text"].index(free[0]["text"][4:7])] and cut["stop_reason"] == free[0]["text"][4:7]


def test_harness_tokenizer(server):
    """Its remote tokenizer: information, encoding, decoding, no model named, an empty key."""
    with requests.Session() as session:
        session.headers.update({"Content-Type": "application/json", "Authorization": "Bearer "})
        info = session.get(server.url + "/tokenizer_info", timeout=20).json()
        assert isinstance(info["eos_token"], str) and isinstance(info["bos_token"], str)

        def encode(text):
            return session.post(server.url + "/tokenize", json={"prompt": text, "add_special_tokens": False}, timeout=20).json()["tokens"]

        assert encode(info["eos_token"])[0] == EOS and encode(info["bos_token"])[0] == BOS
        for text in ("The sea", "é😀\n", "  a"):
            assert session.post(server.url + "/detokenize", json={"tokens": encode(text)}, timeout=20).json()["prompt"] == text


def test_bench_bodies(server):
    """vLLM's bench: usage from the chunk without choices, latency from those with; the model from the list."""
    model = server.get("/v1/models").json()["data"][0]["id"]
    assert model == BASE
    body = {"model": model, "prompt": "The sea", "repetition_penalty": 1.0, "max_tokens": 12, "logprobs": None, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.0}
    with requests.post(server.url + "/v1/completions", json=body, headers={"x-request-id": "benchmark-7"}, stream=True, timeout=60) as answer:
        assert answer.headers["x-request-id"] == "benchmark-7" and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in b"".join(answer.iter_content(None)).decode().split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert [bool(chunk["choices"]) for chunk in chunks] == [True] * 12 + [False]
    assert chunks[-1]["usage"]["completion_tokens"] == 12 and all(chunk["usage"] is None for chunk in chunks[:-1])


def test_guidellm_bodies(server):
    assert server.get("/health").status_code == 200
    body = {"prompt": "The sea was", "max_tokens": 9, "ignore_eos": True, "stream": True, "model": BASE, "temperature": 0,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = server.stream(**{k: v for k, v in body.items() if k not in ("stream", "temperature")})
    usages = [event["usage"]["completion_tokens"] for event in events]
    assert usages == [*range(1, 10), 9] and events[-1]["choices"] == []
    assert merge(events)["text"]


def test_perf_bodies(server):
    """genai-perf and aiperf: a list of one prompt; every chunk has a choice, unless usage is asked for."""
    for prompt in (["The sea was"], "The sea was"):
        events = server.stream(prompt, BASE, max_tokens=6, ignore_eos=True)
        assert all(len(event["choices"]) == 1 and event["object"] == "text_completion" for event in events)
        assert merge(events)["text"] == server.complete(prompt, BASE, max_tokens=6, ignore_eos=True)["choices"][0]["text"]


def test_reported_breaks(server):
    """What broke other servers and has no better place."""
    choice = server.complete("The sea was", max_tokens=2, echo=True, logprobs=5, top_k=1, temperature=1)["choices"][0]
    numbers = [v for top in choice["logprobs"]["top_logprobs"][1:] for v in top.values()]
    assert all(-9999.0 < value <= 0 for value in numbers)
    message = error_of(server.post("/v1/completions", {"prompt": [5] * (CONTEXT + 50), "max_tokens": 7}), 400, "context_length_exceeded", "prompt")
    assert "-" not in message.split("tokens", 1)[1] and str(CONTEXT + 50) in message and "7 new" in message
    for stream in (False, True):
        answer = server.post("/v1/completions", {"prompt": "x", "stream": stream, "n": 2, "echo": True, "logprobs": 0, "max_tokens": 3})
        assert answer.status_code == 200
    assert "usage" not in server.stream("x", max_tokens=2, stream_options={})[0]
