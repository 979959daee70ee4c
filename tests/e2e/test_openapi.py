"""The server keeps its own description: Schemathesis makes requests from configs/openapi.json, right and wrong ones, and checks what comes
back; so do we with events, which it does not read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BASE, ROOT, events_of, start_server

# Not positive_data_acceptance: names of models, the context's length and rules over two fields are no matter of a schema.
CHECKS = ("not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance,"
          "negative_data_rejection,unsupported_method")


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """A small context, so that no request is long; a template, so that chat answers."""
    template = tmp_path_factory.mktemp("openapi") / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}{{ m.content }};{% endfor %}")
    running = start_server("--chat-template", str(template), "--max-model-len", "48", deltas=None)
    yield running
    assert running.stop() == 0
    assert not [line for line in running.lines if any(fault in line for fault in ("Sanitizer", "runtime error", "level=error"))]


# Names that are made up are nobody's, and such requests would show nothing but a 404: most get the base's. Events are not read here.
HOOKS = """
import schemathesis

@schemathesis.hook
def before_call(context, case, kwargs):
    body = case.body if isinstance(case.body, dict) else {}
    if isinstance(body.get("model"), str) and len(body["model"]) % 3 != 1:
        body["model"] = "zen-mini"
    if body.get("stream") == 1:
        body["stream"] = False
"""


def test_described_api(described, tmp_path):
    """The same requests each time: what fails here can be looked at."""
    program = Path(sys.executable).parent / "schemathesis"
    if not program.exists():
        pytest.skip("no schemathesis here")
    command = [program, "run", described.url + "/openapi.json", "--checks", CHECKS, "--phases", "coverage,fuzzing", "--max-examples", "5", "--seed", "7",
               "--generation-deterministic", "--no-shrink", "--warnings", "off", "--no-color", "--continue-on-failure",
               "--suppress-health-check", "all", "--request-timeout", "300"]  # one asks for 1024 prompts
    (tmp_path / "hooks.py").write_text(HOOKS)
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([str(part) for part in command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-9000:] + done.stderr[-2000:]


@pytest.mark.parametrize("path,name,body", [
    ("/v1/completions", "Completion", {"prompt": ["a", "b"], "echo": True, "logprobs": 2, "n": 2, "return_token_ids": True}),
    ("/v1/completions", "Completion", {"prompt": "a", "stream_options": {"include_usage": True}, "stop": "e", "prompt_logprobs": 0}),
    ("/v1/chat/completions", "ChatChunk", {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2, "n": 2}),
    ("/v1/chat/completions", "ChatChunk", {"messages": [{"role": "user", "content": "a"}], "stream_options": {"include_usage": True, "continuous_usage_stats": True}})])
def test_events_match_their_schema(described, path, name, body):
    jsonschema = pytest.importorskip("jsonschema_rs")
    description = json.loads((ROOT / "configs/openapi.json").read_text())
    validator = jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": description["components"]})
    with described.session.post(described.url + path, json=body | {"max_tokens": 6, "stream": True, "model": BASE}, stream=True, timeout=60) as answer:
        assert answer.status_code == 200
        for event in events_of(b"".join(answer.iter_content(None))):
            validator.validate(event)
