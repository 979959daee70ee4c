"""POST /v1/chat/completions: the official SDK and raw requests, on the demo base with a template of this project beside it."""

import json
import random
import shutil
import sys

import openai
import pytest
from conftest import BOS, CONTEXT, ROOT, Server, error_of, events_of, start_server
from tokenizers import Tokenizer

DATA = ROOT / "tests" / "data" / "chat"
sys.path.insert(0, str(DATA))
from reference import environment, render  # noqa: E402

USER = [{"role": "user", "content": "SELECT a"}]


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """The demo base and two of its variants, one with a template of its own."""
    home = tmp_path_factory.mktemp("chat")
    base, deltas = home / "zen-mini", home / "deltas"
    shutil.copytree(ROOT / "demo" / "zen-mini", base)
    shutil.copy(DATA / "demo.jinja", base / "chat_template.jinja")
    for name in ("zen-mini-sql", "zen-mini-coder"):
        shutil.copytree(ROOT / "demo" / "deltas" / name, deltas / name)
    (deltas / "zen-mini-coder" / "chat_template.jinja").write_text("{% for m in messages %}# {{ m.content }}\n{% endfor %}")
    arguments = ["--base", str(base), "--deltas", str(deltas), "--listen", "127.0.0.1:0", "--admin", "none", "--backend", "cpu", "--slots", "2"]
    running = Server(arguments).wait_ready()
    yield running
    assert running.stop() == 0, "\n".join(running.lines[-40:])


@pytest.fixture
def client(chat):
    with openai.OpenAI(base_url=chat.url + "/v1", api_key="unused", max_retries=0) as made:
        yield made


def ask(server, status=200, **fields):
    answer = server.post("/v1/chat/completions", {"messages": USER, "temperature": 0, "max_tokens": 8, **fields})
    assert answer.status_code == status, answer.text
    return answer


def prompt_of(messages, **variables):
    return render(environment(), (DATA / "demo.jinja").read_text(),
                  {"messages": messages, "bos_token": "<|begin_of_text|>", "add_generation_prompt": True, **variables})


def test_same_tokens_as_the_rendered_prompt(chat):
    """A conversation gives what its rendering gives as a completion, whose BOS is written in it."""
    for model in ("zen-mini", "zen-mini-sql"):
        body = ask(chat, model=model, messages=[{"role": "system", "content": " Be brief. "}, *USER], max_tokens=12).json()
        text = prompt_of([{"role": "system", "content": " Be brief. "}, *USER])
        plain = chat.complete(text, model, max_tokens=12, add_special_tokens=False)
        assert body["choices"][0]["message"] == {"role": "assistant", "content": plain["choices"][0]["text"], "refusal": None}
        assert body["usage"] == plain["usage"] and body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
        assert body["model"] == model and body["choices"][0]["finish_reason"] in ("stop", "length")
        assert body["choices"][0]["logprobs"] is None and body["system_fingerprint"].startswith("fp_")


def test_variants_have_their_own_template(chat):
    body = ask(chat, model="zen-mini-coder", return_token_ids=True).json()
    own = chat.post("/tokenize", {"model": "zen-mini-coder", "prompt": "# SELECT a\n", "add_special_tokens": False}).json()
    assert body["choices"][0]["prompt_token_ids"] == own["tokens"]


def test_tokenize_messages(chat):
    tokens = chat.post("/tokenize", {"messages": USER}).json()["tokens"]
    assert tokens == chat.post("/tokenize", {"prompt": prompt_of(USER), "add_special_tokens": False}).json()["tokens"]
    assert tokens[0] == BOS and tokens.count(BOS) == 1
    without = chat.post("/tokenize", {"messages": USER, "add_generation_prompt": False}).json()["tokens"]
    assert without == chat.post("/tokenize", {"prompt": prompt_of(USER, add_generation_prompt=False), "add_special_tokens": False}).json()["tokens"]
    error_of(chat.post("/tokenize", {"messages": USER, "continue_final_message": True, "add_generation_prompt": True}), 400, "invalid_value",
             "continue_final_message")


# As transformers does it: a mark behind the last text, the rendering up to it; without the spaces before it where the template trims.
CONTINUED = [("Sure, a", False), (" spaced ", False), ("ends in a newline\n", False), ("é 😀", False), ("", False),
             ("Sure, a  ", True), ("  twice  twice ", True), ("tail\n\n", True)]


@pytest.mark.parametrize("text,trims", CONTINUED)
@pytest.mark.parametrize("parts", [False, True])
def test_continue_final_message(tmp_path_factory, text, trims, parts):
    """The last message is gone on with: its end is the prompt's."""
    running = continued(tmp_path_factory, trims)
    content = [{"type": "text", "text": text[:2]}, {"type": "text", "text": text[2:]}] if parts else text
    messages = [*USER, {"role": "assistant", "content": content}]
    before = f"<user>{USER[0]['content']}</user><assistant>"
    wanted = before + (text.strip() if trims else text)
    body = {"messages": messages, "continue_final_message": True}
    for fields in ({}, {"add_generation_prompt": False}):
        tokens = running.post("/tokenize", body | fields).json()["tokens"]
        assert tokens == running.post("/tokenize", {"prompt": wanted, "add_special_tokens": False}).json()["tokens"]
    answer = ask(running, messages=messages, continue_final_message=True).json()
    plain = running.complete(wanted, max_tokens=8, add_special_tokens=False)
    assert answer["choices"][0]["message"]["content"] == plain["choices"][0]["text"] and answer["usage"] == plain["usage"]


_continued = {}


def continued(factory, trims):
    """A server whose template wraps every message, one of two; both live as long as the tests of this file."""
    if trims not in _continued:
        template = factory.mktemp("continued") / "t.jinja"
        shown = "m.content | trim" if trims else "m.content"
        template.write_text("{% if add_generation_prompt %}!{% endif %}{% for m in messages %}<{{ m.role }}>{{ " + shown + " }}</{{ m.role }}>{% endfor %}"
                            "{% if add_generation_prompt %}<assistant>{% endif %}")
        _continued[trims] = start_server("--chat-template", str(template), deltas=None)
    return _continued[trims]


@pytest.fixture(scope="module", autouse=True)
def stop_continued():
    yield
    for running in _continued.values():
        assert running.stop() == 0


def test_sdk(client):
    answer = client.chat.completions.create(model="zen-mini-sql", messages=USER, max_completion_tokens=9, temperature=0, n=2, logprobs=True, top_logprobs=3)
    assert [choice.index for choice in answer.choices] == [0, 1] and answer.object == "chat.completion"
    for choice in answer.choices:
        assert choice.message.role == "assistant" and choice.message.content == answer.choices[0].message.content
        assert choice.finish_reason in ("stop", "length")
        assert 0 < len(choice.logprobs.content) <= 9
        for token in choice.logprobs.content:
            assert len(token.top_logprobs) == 3 and token.logprob <= 0
            assert token.top_logprobs[0].token == token.token and token.top_logprobs[0].logprob == token.logprob
        joined = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
        assert choice.message.content.encode() in joined
    assert answer.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in answer.choices)


def test_true_bytes(client):
    """Beyond ASCII, and of a token that is a part of a character."""
    for text in ("é", "\U0001F600"):
        ids = Tokenizer.from_file(str(ROOT / "demo/zen-mini/tokenizer.json")).encode(text, add_special_tokens=False).ids
        answer = client.chat.completions.create(model="zen-mini", messages=USER, max_tokens=3, logit_bias={str(ids[0]): 100}, logprobs=True, top_logprobs=0)
        for token in answer.choices[0].logprobs.content:
            part = bytes(token.bytes)
            assert part == text.encode() if len(ids) == 1 else text.encode().startswith(part) and 0 < len(part) < 4
            assert token.token == part.decode(errors="replace")


def test_sdk_stream(client):
    fields = dict(model="zen-mini-sql", messages=USER, max_tokens=10, temperature=0, logprobs=True, top_logprobs=1)
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    assert deltas[0].delta.role == "assistant" and deltas[0].delta.content == "" and deltas[0].finish_reason is None
    assert all(delta.delta.role is None for delta in deltas[1:])
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [whole.choices[0].finish_reason]
    assert "".join(delta.delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert [token for delta in deltas if delta.logprobs for token in delta.logprobs.content] == whole.choices[0].logprobs.content


def test_stream_events(chat):
    """Each choice begins with its role once; without usage no chunk has any."""
    body = {"messages": USER, "temperature": 0, "max_tokens": 5, "stream": True, "n": 3, "ignore_eos": True}
    with chat.session.post(chat.url + "/v1/chat/completions", json=body, stream=True, timeout=60) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = events_of(b"".join(answer.iter_content(None)))
    assert all("usage" not in event and len(event["choices"]) == 1 for event in events)
    for index in range(3):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""} and len(mine) == 6
        assert [choice["finish_reason"] for choice in mine] == [None] * 5 + ["length"]


def test_forms_of_content(chat):
    parts = [{"role": "user", "content": [{"type": "text", "text": "SEL"}, {"type": "text", "text": "ECT a"}]}]
    wanted = ask(chat, return_token_ids=True).json()["choices"][0]["prompt_token_ids"]
    assert ask(chat, messages=parts, return_token_ids=True).json()["choices"][0]["prompt_token_ids"] == wanted
    newer = ask(chat, messages=[{"role": "developer", "content": "x"}, *USER], return_token_ids=True).json()["choices"][0]["prompt_token_ids"]
    assert newer == ask(chat, messages=[{"role": "system", "content": "x"}, *USER], return_token_ids=True).json()["choices"][0]["prompt_token_ids"]
    text = chat.post("/detokenize", {"tokens": ask(chat, chat_template_kwargs={"suffix": " Yes,"}, return_token_ids=True).json()["choices"][0]["prompt_token_ids"]})
    assert text.json()["prompt"].endswith("assistant: Yes,")
    assert ask(chat, tools=[], tool_choice="none", tool_calls=None, stop=None, response_format={"type": "text"}).status_code == 200


def test_random_conversations(chat):
    """What the server makes of a conversation is what the reference makes of it."""
    seed = random.SystemRandom().getrandbits(32)
    chance = random.Random(seed)
    words = ["a", " b ", "\n", "é", "日本", "{{ x }}", "<|end_of_text|>", "\"", "\\", "\u0001", "\u0000", "😀", ""]
    for _ in range(40):
        messages = [{"role": chance.choice(["system", "user", "assistant"]), "content": "".join(chance.choices(words, k=chance.randint(0, 6)))} for _ in range(chance.randint(1, 5))]
        mine = chat.post("/tokenize", {"messages": messages}).json()["tokens"]
        assert mine == chat.post("/tokenize", {"prompt": prompt_of(messages), "add_special_tokens": False}).json()["tokens"], (seed, messages)


@pytest.mark.parametrize(("fields", "code", "param"), [
    ({"messages": None}, "missing_required_parameter", "messages"),
    ({"messages": []}, "empty_array", "messages"),
    ({"messages": "hi"}, "invalid_type", "messages"),
    ({"messages": ["hi"]}, "invalid_type", "messages"),
    ({"messages": [{"content": "hi"}]}, "missing_required_parameter", "messages"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "invalid_value", "messages"),
    ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "invalid_type", "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "unsupported_parameter", "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "invalid_type", "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "invalid_type", "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "invalid_type", "messages"),
    ({"messages": [{"role": "user", "content": "refuse me"}]}, "invalid_value", "messages"),
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, "context_length_exceeded", "messages"),
    ({"max_completion_tokens": CONTEXT + 1}, "context_length_exceeded", "max_completion_tokens"),
    ({"max_tokens": CONTEXT + 1}, "context_length_exceeded", "max_tokens"),
    ({"logprobs": 3}, "invalid_type", "logprobs"),
    ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "integer_above_max_value", "top_logprobs"),
    ({"echo": True}, "unsupported_parameter", "echo"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "unsupported_parameter", "tools"),
    ({"chat_template_kwargs": {"messages": []}}, "invalid_value", "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "invalid_value", "continue_final_message"),
    ({"continue_final_message": 5}, "invalid_type", "continue_final_message"),
    ({"continue_final_message": True, "messages": [*USER, {"role": "assistant", "content": None}]}, "invalid_value", "messages"),
    ({"continue_final_message": True, "messages": [*USER, {"role": "assistant", "content": []}]}, "invalid_value", "messages"),
])
def test_refusals(chat, fields, code, param):
    for stream in (False, True):
        error_of(chat.post("/v1/chat/completions", {"messages": USER, "max_tokens": 4, "stream": stream, **fields}), 400, code, param)


def test_template_says_why(chat):
    answer = chat.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "refuse me"}]})
    assert "I will not." in answer.json()["error"]["message"]


def test_default_length_is_what_the_context_leaves(chat):
    long = [{"role": "user", "content": "word " * 1000}]
    count = chat.post("/tokenize", {"messages": long}).json()["count"]
    answer = chat.post("/v1/chat/completions", {"messages": long, "temperature": 0, "ignore_eos": True}).json()
    assert answer["usage"]["prompt_tokens"] == count and answer["usage"]["completion_tokens"] == CONTEXT - count
    assert answer["choices"][0]["finish_reason"] == "length"


def test_developer_role(chat, tmp_path):
    """Shown as system, unless the template knows the word."""
    def tokens(server, role):
        return server.post("/tokenize", {"messages": [{"role": role, "content": "x"}, *USER]}).json()["tokens"]
    assert tokens(chat, "developer") == tokens(chat, "system") != tokens(chat, "user")
    knows = tmp_path / "knows.jinja"
    knows.write_text("{% for m in messages %}{{ 'D' if m.role == 'developer' else m.role }}{{ m.content }};{% endfor %}")
    running = start_server("--chat-template", str(knows), deltas=None)
    try:
        shown = running.post("/tokenize", {"prompt": "Dx;userSELECT a;", "add_special_tokens": False}).json()["tokens"]
        assert tokens(running, "developer") == shown
    finally:
        assert running.stop() == 0


def test_further_members(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].name }}{{ messages[0].more.a[1] }}{{ messages[1].tool_calls[0].function.arguments.q }}")
    running = start_server("--chat-template", str(template), deltas=None)
    try:
        call = {"type": "function", "function": {"name": "f", "arguments": "{\"q\":\"Q\"}"}}
        messages = [{"role": "user", "content": "x", "name": "N", "more": {"a": [1, "M"]}}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        tokens = running.post("/tokenize", {"messages": messages}).json()["tokens"]
        assert tokens == running.post("/tokenize", {"prompt": "NMQ", "add_special_tokens": False}).json()["tokens"]
    finally:
        assert running.stop() == 0


def test_no_tools(chat):
    """Whatever asks for no tool passes; what asks for one is refused by name, streamed or not."""
    for fields in ({"tools": None}, {"tools": []}, {"tools": [], "tool_choice": "none"}, {"tool_choice": "auto"}, {"functions": [], "function_call": "none"}):
        assert ask(chat, **fields).json()["choices"]
    for fields in ({"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, {"functions": [{"name": "f"}]},
                   {"response_format": {"type": "json_object"}}, {"audio": {"voice": "x"}}):
        message = error_of(ask(chat, 400, **fields), 400, "unsupported_parameter", next(iter(fields)))
        assert next(iter(fields)) in message


def test_no_template(server):
    error_of(server.post("/v1/chat/completions", {"messages": USER}), 400, "unsupported_parameter")


def test_refused_template_is_named(tmp_path):
    base = tmp_path / "zen-mini"
    shutil.copytree(ROOT / "demo" / "zen-mini", base)
    (base / "chat_template.jinja").write_text("{{ messages | center }}")
    running = Server(["--base", str(base), "--listen", "127.0.0.1:0", "--admin", "none", "--backend", "cpu"]).wait_ready()
    try:
        error_of(running.post("/v1/chat/completions", {"messages": USER}), 400, "unsupported_parameter")
        assert running.complete("a", max_tokens=1)["choices"]
        running.find("filter 'center' is not supported")
    finally:
        assert running.stop() == 0


def test_override_on_the_command_line(tmp_path):
    """--chat-template wins over the models' own; one that cannot be used ends the start."""
    override = tmp_path / "override.jinja"
    override.write_text("{{ messages[0].content }}!")
    running = start_server("--chat-template", str(override))
    try:
        for model in ("zen-mini", "zen-mini-sql"):
            tokens = running.post("/tokenize", {"model": model, "messages": USER}).json()["tokens"]
            assert tokens == running.post("/tokenize", {"prompt": "SELECT a!", "add_special_tokens": False}).json()["tokens"]
        hidden = {"messages": [*USER, {"role": "assistant", "content": "b"}], "continue_final_message": True}
        error_of(running.post("/v1/chat/completions", hidden), 400, "invalid_value", "messages")
    finally:
        assert running.stop() == 0
    override.write_text("{{ x | center }}")
    broken = start_server("--chat-template", str(override), ready=False)
    broken.find("filter 'center' is not supported")
    assert broken.process.wait(30) == 1
    broken.stop()
