"""The official Python client, unmodified."""

import openai
import pytest
from conftest import BASE, MODELS, VARIANTS


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_models(client):
    assert [m.id for m in client.models.list()] == MODELS
    for name in (BASE, VARIANTS[-1]):
        card = client.models.retrieve(name)
        assert card.id == name and card.object == "model" and card.owned_by == "bitdelta"
    with pytest.raises(openai.NotFoundError) as fault:
        client.models.retrieve("org/none")
    assert fault.value.code == "model_not_found" and fault.value.param == "model" and "org/none" in fault.value.message


def test_completion(client):
    answer = client.completions.create(model=VARIANTS[0], prompt="The star", max_tokens=8, temperature=0, logprobs=2, n=2)
    assert answer.object == "text_completion" and answer.model == VARIANTS[0] and answer.id.startswith("cmpl-")
    assert len(answer.choices) == 2 and answer.choices[0].text == answer.choices[1].text != ""
    lists = answer.choices[0].logprobs
    assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) == len(lists.text_offset)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id.startswith("req-")
    text = answer.choices[0].text
    for stop in (text[2], [text[2], "\u0416"]):
        cut = client.completions.create(model=VARIANTS[0], prompt="The star", max_tokens=8, temperature=0, stop=stop).choices[0]
        assert cut.text == text[:text.index(text[2])] and cut.finish_reason == "stop"


def test_stream(client):
    whole = client.completions.create(model=BASE, prompt=["Once", "Twice"], max_tokens=12, temperature=0)
    texts, usage = {0: "", 1: ""}, None
    for chunk in client.completions.create(model=BASE, prompt=["Once", "Twice"], max_tokens=12, temperature=0, stream=True,
                                           stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        usage = chunk.usage or usage
    assert [texts[0], texts[1]] == [c.text for c in whole.choices] and usage == whole.usage


def test_extra_fields(client):
    answer = client.completions.create(model=BASE, prompt=[[5, 6, 7]], max_tokens=4, extra_body={"return_token_ids": True, "ignore_eos": True, "top_k": 1})
    assert len(answer.choices[0].token_ids) == 4 and answer.choices[0].prompt_token_ids == [5, 6, 7]


@pytest.mark.parametrize("fields,kind,code,param", [
    ({"model": "gpt-9"}, openai.NotFoundError, "model_not_found", "model"),
    ({"temperature": 3}, openai.BadRequestError, "decimal_above_max_value", "temperature"),
    ({"max_tokens": 99999}, openai.BadRequestError, "context_length_exceeded", "max_tokens"),
    ({"suffix": "x"}, openai.BadRequestError, "unsupported_parameter", "suffix"),
    ({"logit_bias": {"99999": 1}}, openai.BadRequestError, "invalid_value", "logit_bias"),
    ({"stream": True, "n": 0}, openai.BadRequestError, "integer_below_min_value", "n"),
])
def test_errors(client, fields, kind, code, param):
    with pytest.raises(kind) as fault:
        client.completions.create(**({"model": BASE, "prompt": "x"} | fields))
    assert fault.value.code == code and fault.value.param == param and fault.value.type == "invalid_request_error"


def test_chat_says_what_to_use(client):
    with pytest.raises(openai.BadRequestError) as fault:
        client.chat.completions.create(model=BASE, messages=[{"role": "user", "content": "Hi"}])
    assert fault.value.code == "unsupported_parameter"


def test_key(launch):
    server = launch("--api-key", "sk-right", deltas=None)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="sk-right", max_retries=0) as good:
        assert good.completions.create(model=BASE, prompt="x", max_tokens=1).choices
    with openai.OpenAI(base_url=server.url + "/v1", api_key="sk-wrong", max_retries=0) as bad, pytest.raises(openai.AuthenticationError) as fault:
        bad.models.list()
    assert fault.value.code == "invalid_api_key"


def test_breaking_off_a_stream(client, server):
    for chunk in client.completions.create(model=BASE, prompt="x", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}):
        break
    chunk_id = chunk.id
    stream = client.completions.create(model=BASE, prompt="x", max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    assert next(iter(stream)).id != chunk_id
    stream.close()
    assert client.completions.create(model=BASE, prompt="x", max_tokens=1).choices
