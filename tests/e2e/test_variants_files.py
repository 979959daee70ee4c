"""Files beside a variant's weights that change under a running server, while delta.json stays as it is."""

import json
import os
import secrets
import subprocess

import pytest
import requests
from conftest import BINARY, ROOT, eventually
from variants_support import copy_variant, golden_body, goldens, rename_variant, rescan, variants

C = "zen-mini-c"
BASE_DIR = ROOT / "demo" / "zen-mini"
USER = [{"role": "user", "content": "Say it."}]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "deltas").mkdir()
    return copy_variant(C, tmp_path / "deltas" / "c")


def base_json(name, **fields):
    return json.dumps(json.loads((BASE_DIR / name).read_text()) | fields)


def tokens_of_text(server):
    return server.post("/tokenize", {"model": C, "prompt": "int main"}).json()["tokens"]


def tokens_of_chat(server):
    return server.post("/tokenize", {"model": C, "messages": USER, "add_special_tokens": False}).json().get("tokens")


def length_of_answer(server):
    ids, want = goldens(C)[0]
    body = {"model": C, "prompt": ids, "max_tokens": 6, "temperature": 0}
    return server.post("/v1/completions", body).json()["usage"]["completion_tokens"]


def context(server):
    return [m["max_model_len"] for m in server.get("/v1/models").json()["data"] if m["id"] == C]


def other_tokenizer():
    """The base's, but with a token of its own for the text."""
    tokenizer = json.loads((BASE_DIR / "tokenizer.json").read_text())
    tokenizer["added_tokens"][2]["content"] = "int main"
    return json.dumps(tokenizer)


FILES = {
    "config.json": (lambda: base_json("config.json", max_position_embeddings=1024), context),
    "generation_config.json": (lambda: json.dumps({"eos_token_id": [goldens(C)[0][1][1]]}), length_of_answer),
    "tokenizer.json": (other_tokenizer, tokens_of_text),
    "tokenizer_config.json": (lambda: base_json("tokenizer_config.json", chat_template="second"), tokens_of_chat),
    "chat_template.jinja": (lambda: "third", tokens_of_chat),
    "chat_template.json": (lambda: json.dumps({"chat_template": "fourth"}), tokens_of_chat),
}


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_noticed(launch, folder, name):
    """It comes, is touched, changes back and goes: answers follow each rescan, and nothing is replaced for its time alone."""
    text, look = FILES[name]
    if name in ("tokenizer_config.json", "chat_template.jinja"):  # chat_template.json counts where neither says anything
        (folder / "tokenizer_config.json").write_text(base_json("tokenizer_config.json", chat_template="first"))
    start = {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix != ".safetensors"}
    server = launch(deltas=str(folder.parent))
    before = look(server)
    kept = (folder / name).read_text() if (folder / name).exists() else None
    (folder / name).write_text(text())
    assert rescan(server)["replaced"] == [C]
    after = look(server)
    assert after != before
    os.utime(folder / name, (1e9, 1e9))
    assert rescan(server)["unchanged"] == 1
    (folder / name).write_text(text())
    assert rescan(server)["unchanged"] == 1
    assert look(server) == after
    if kept is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(kept)
    assert rescan(server)["replaced"] == [C]
    assert look(server) == before
    assert start == {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix != ".safetensors"}


UNREADABLE = {
    "fifo": ("chat_template.jinja", os.mkfifo, "is not a regular file"),
    "huge": ("chat_template.jinja", lambda path: path.write_bytes(b"x" * ((256 << 10) + 1)), "is longer than the limit of 262144 bytes"),
    "folder": ("chat_template.json", lambda path: path.mkdir(), "is not a regular file"),
    "empty": ("tokenizer.json", lambda path: path.write_text("{}"), "must be an object"),
    "nowhere": ("tokenizer.json", lambda path: path.symlink_to("nothing.json"), "No such file"),
    "circle": ("config.json", lambda path: path.symlink_to("config.json"), "symbolic links"),
    "gone": ("generation_config.json", lambda path: path.symlink_to("/no/such/file"), "No such file"),
    "lost": ("tokenizer_config.json", lambda path: path.symlink_to("nothing.json"), "No such file"),
    "torn": ("chat_template.jinja", lambda path: path.symlink_to("nothing.jinja"), "No such file"),
}


def test_files_that_cannot_be_read(launch, folder):
    """Whatever they are for, the variant is refused when it is looked at, naming the file."""
    server = launch(deltas=str(folder.parent))
    for name, (file, make, _) in UNREADABLE.items():
        make(copy_variant("zen-mini-sql", folder.parent / name, name) / file)
    reply = rescan(server)
    refused = {one["path"]: one["failure"] for one in reply["refused"]}
    assert reply["added"] == [] and reply["unchanged"] == 1
    assert sorted(refused) == sorted(str(folder.parent / name) for name in UNREADABLE)
    for name, (file, _, told) in UNREADABLE.items():
        path = folder.parent / name / file
        assert str(path) in refused[str(path.parent)] and told in refused[str(path.parent)]
        path.rmdir() if path.is_dir() else path.unlink()
    listed = requests.get(server.admin_url + "/admin/variants", timeout=20).json()["refused"]
    assert {one["path"]: one["failure"] for one in listed} == refused
    assert sorted(rescan(server)["added"]) == sorted(UNREADABLE)


def test_a_refusal_is_logged_once(launch, folder):
    """Whoever rescans each minute does not fill the log with what it has said; what changed, were it only the file's time, is said again."""
    bad = copy_variant("zen-mini-sql", folder.parent / "bad", "bad")
    manifest = (bad / "delta.json").read_text()
    (bad / "delta.json").write_text("{}")
    server = launch(deltas=str(folder.parent))
    rescans = 0

    def logged(refused=(str(bad),)):
        nonlocal rescans
        assert [one["path"] for one in rescan(server)["refused"]] == list(refused)
        rescans += 1
        eventually(lambda: sum("mod=router rescan added=" in line for line in server.lines) == rescans, what="the line after")
        return sum("variant refused" in line and str(bad) in line for line in server.lines)

    assert [logged(), logged()] == [1, 1]  # once at start
    os.utime(bad / "delta.json", (1e9, 1e9))
    assert [logged(), logged()] == [2, 2]
    (bad / "delta.json").write_text(manifest)  # the reason is elsewhere: two want one name
    rename_variant(bad, C)
    assert [logged(), logged()] == [3, 3]
    (folder.parent / "c").rename(folder.parent / "a")
    assert [logged(), logged()] == [4, 4]  # by another now
    (bad / "delta.json").write_text(manifest)
    assert logged(()) == 4
    (bad / "delta.json").write_text("{}")
    assert logged() == 5


def test_a_link_that_leads_nowhere_is_named(launch, folder):
    """Who makes a link means a variant: at start, at a rescan and when the one that is served goes; logged once. What is no variant is not."""
    deltas, store = folder.parent, folder.parent.parent / "store"
    store.mkdir()
    copy_variant("zen-mini-sql", store / "sql")
    (store / "empty").mkdir()
    for name in ("sql", "gone", "empty"):
        (deltas / name).symlink_to(store / name)
    (deltas / ".hidden").symlink_to(store / "gone")
    (deltas / "gone.tmp-12").symlink_to(store / "gone")
    (deltas / "note").write_text("no variant")
    (deltas / "note-too").symlink_to("note")
    server = launch(deltas=str(deltas))

    def check(refused, *names):
        assert {one["path"]: one["failure"] for one in refused} == {
            str(deltas / name): f"the link {deltas / name} leads nowhere: No such file or directory" for name in names}

    def logged(name):
        return sum("level=error mod=router what=\"variant refused\"" in line and f"{deltas / name} leads nowhere" in line for line in server.lines)

    listed = lambda: requests.get(server.admin_url + "/admin/variants", timeout=20).json()["refused"]  # noqa: E731
    check(listed(), "gone")
    server.find(rf"level=error.*variant refused.*{deltas / 'gone'} leads nowhere")
    check(rescan(server)["refused"], "gone")
    assert sorted(variants(server)) == [C, "zen-mini-sql"]
    (store / "sql").rename(store / "away")
    reply = rescan(server)
    check(reply["refused"], "gone", "sql")
    assert reply["removed"] == ["zen-mini-sql"] and list(variants(server)) == [C]
    server.find(rf"level=error.*variant refused.*{deltas / 'sql'} leads nowhere")
    assert (logged("gone"), logged("sql")) == (1, 1)
    (store / "away").rename(store / "sql")
    copy_variant("zen-mini-math", store / "gone")
    reply = rescan(server)
    assert sorted(reply["added"]) == ["zen-mini-math", "zen-mini-sql"] and reply["refused"] == [] == listed()


def test_a_cut_context_is_logged_once(launch, folder):
    """Of one that comes with more positions than the server was started with; not of one like the base, whose limit is for all."""
    copy_variant("zen-mini-sql", folder.parent / "sql")  # like the base
    server = launch("--max-model-len", "700", deltas=str(folder.parent))

    def said():
        return [line for line in server.lines if "max_position_embeddings" in line]

    assert said() == [] and context(server) == [700]
    for positions in (3000 + secrets.randbelow(1000), 701 + secrets.randbelow(1000)):
        before = len(said())
        (folder / "config.json").write_text(base_json("config.json", max_position_embeddings=positions))
        assert rescan(server)["replaced"] == [C] and context(server) == [700]
        server.find(rf"level=warn mod=router variant={C} has max_position_embeddings={positions} and is served with max_model_len=700,")
        os.utime(folder / "config.json", (1e9, 1e9))
        assert rescan(server)["unchanged"] == 2 == rescan(server)["unchanged"]
        eventually(lambda: sum("rescan added=0 replaced=0" in line for line in server.lines) == 2 * (before + 1), what="the lines of the rescans")
        assert len(said()) == before + 1
    (folder / "config.json").write_text(base_json("config.json", max_position_embeddings=600))
    assert rescan(server)["replaced"] == [C] and context(server) == [600]
    eventually(lambda: sum("rescan added=0 replaced=1" in line for line in server.lines) == 3, what="the line of the rescan")
    assert len(said()) == 2


def test_what_needs_more_slots_says_so(launch, tmp_path):
    command = [BINARY, "compress", "--base", "demo/zen-mini", "--finetuned", "demo/finetuned/zen-mini-coder", "--bits", "4",
               "--out", tmp_path / "deltas" / "fine"]
    (tmp_path / "deltas").mkdir()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    server = launch("--slots", "2", deltas=str(tmp_path / "deltas"))
    assert variants(server) == {}
    refused, = rescan(server)["refused"]
    assert refused["path"].endswith("/fine") and "--slots" in refused["failure"]
    assert variants(launch("--slots", "4", deltas=str(tmp_path / "deltas"))).keys() == {"fine"}


@pytest.mark.parametrize("slots", [0, 3])
def test_ropes_of_their_own_come_later(launch, tmp_path, slots):
    """Into a server that started with no variant at all: its slots have rope tables too."""
    deltas = tmp_path / "deltas"
    deltas.mkdir()
    flags = ["--slots", str(slots)] if slots else []
    server = launch(*flags, deltas=str(deltas))
    ids, _ = goldens(C)[4]
    thetas = {f"own-{i}": 3_000.0 * (i + 2) for i in range(slots or 1)}
    for name, theta in thetas.items():
        copy_variant(C, deltas / name, name)
        (deltas / name / "config.json").write_text(base_json("config.json", rope_theta=theta))
    assert sorted(rescan(server)["added"]) == sorted(thetas)

    def answers(one):
        texts = {}
        for name in thetas:
            reply = one.post("/v1/completions", golden_body(name, ids, 16))
            assert reply.status_code == 200, reply.text
            texts[name] = reply.json()["choices"][0]["token_ids"]
        return texts

    assert answers(server) == answers(launch(*flags, deltas=str(deltas)))
    assert all(one["state"] == "ready" for one in variants(server).values())


@pytest.mark.parametrize("how", ["rescan", "order"])
def test_no_kv_of_other_frequencies(launch, folder, how):
    """The same weights under another rope_theta: what the prefix cache holds of the same prompt is of no use."""
    ids, want = goldens(C)[4]  # 150 tokens: whole blocks of KV are kept
    server = launch(deltas=str(folder.parent))

    def answer(one):
        body = one.post("/v1/completions", golden_body(C, ids, 32)).json()
        return body["choices"][0]["token_ids"]

    def kept_tokens():
        return server.metric("vllm:prefix_cache_hits_total")

    def change(theta):
        (folder / "config.json").write_text(base_json("config.json", rope_theta=theta))
        if how == "rescan":
            assert rescan(server)["replaced"] == [C]
        else:
            order = {"lora_name": C, "lora_path": "c", "load_inplace": True}
            assert requests.post(server.admin_url + "/v1/load_lora_adapter", json=order, timeout=60).status_code == 200

    assert answer(server) == want == answer(server)
    assert kept_tokens() > 0
    answers = {}
    for theta in (5_000.0, 20_000.0):  # the second takes the table of the first
        change(theta)
        hits = kept_tokens()
        answers[theta] = answer(server)
        assert kept_tokens() == hits
        assert answer(server) == answers[theta] and kept_tokens() > hits
        fresh = launch(deltas=str(folder.parent))
        assert answer(fresh) == answers[theta]
        assert fresh.stop() == 0
    assert want != answers[5_000.0] != answers[20_000.0] != want
    change(5_000.0)  # these are still there
    hits = kept_tokens()
    assert answer(server) == answers[5_000.0] and kept_tokens() > hits
    assert variants(server)[C]["state"] == "ready"
