"""Variants that come, go, change, break and are loaded by order while the server runs."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time

import pytest
import requests
from conftest import BASE, BINARY, ROOT, error_of, events_of, eventually, start_server
from raw_http import Reader, request
from variants_support import SHARD, copy_variant, golden_body, goldens, listing, rename_variant, replace_variant, rescan, variants

C, SQL, MATH, CODER = "zen-mini-c", "zen-mini-sql", "zen-mini-math", "zen-mini-coder"


@pytest.fixture
def deltas(tmp_path):
    folder = tmp_path / "deltas"
    folder.mkdir()
    copy_variant(C, folder / "c")
    copy_variant(SQL, folder / "sql")
    return folder


def start(launch, deltas, *extra, **options):
    return launch(*extra, deltas=str(deltas), **options)


def answers_as(server, model, golden, tokens=12):
    """The model's greedy answers are those of the golden's variant."""
    for ids, want in goldens(golden)[:2]:
        answer = server.post("/v1/completions", golden_body(model, ids, tokens))
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == want[:tokens], (model, golden)


def models(server):
    return [m["id"] for m in server.get("/v1/models").json()["data"]]


def adapter(url, verb, name, path=None, **options):
    body = {"lora_name": name} | ({"lora_path": str(path)} if path else {}) | options.pop("more", {})
    return requests.post(f"{url}/v1/{verb}_lora_adapter", json=body, timeout=60, **options)


# ---- Rescan ----


def test_rescan_adds_removes_and_is_idempotent(launch, deltas):
    server = start(launch, deltas)
    unchanged = {"ok": True, "complete": True, "added": [], "replaced": [], "removed": [], "refused": [], "unchanged": 2}
    assert rescan(server) == unchanged
    error_of(server.post("/v1/completions", {"model": MATH, "prompt": "x"}), 404, "model_not_found", "model")
    copy_variant(MATH, deltas / "math")
    assert rescan(server) == unchanged | {"added": [MATH]}
    assert models(server) == [BASE, C, MATH, SQL]
    answers_as(server, MATH, MATH)
    shutil.rmtree(deltas / "sql")
    assert rescan(server) == unchanged | {"removed": [SQL]}
    assert models(server) == [BASE, C, MATH] and rescan(server) == unchanged
    error_of(server.post("/v1/completions", {"model": SQL, "prompt": "x"}), 404, "model_not_found", "model")
    answers_as(server, C, C)
    # Touched, or written again with the same contents: nothing to do.
    text = (deltas / "c" / "delta.json").read_text()
    (deltas / "c" / "delta.json").write_text(text)
    loads = variants(server)[C]["loads"]
    assert rescan(server) == unchanged
    answers_as(server, C, C)
    assert variants(server)[C]["loads"] == loads == 1
    error_of(requests.get(server.admin_url + "/admin/rescan"), 405, "method_not_allowed")
    error_of(requests.post(server.url + "/admin/rescan"), 404, "unknown_url")


def test_sighup_rescans(launch, deltas):
    server = start(launch, deltas)
    copy_variant(MATH, deltas / "math")
    server.process.send_signal(signal.SIGHUP)
    server.find(r"mod=router rescan added=1 replaced=0 removed=0 refused=0 unchanged=2")
    answers_as(server, MATH, MATH)


def test_replaced_during_use(launch, deltas, tmp_path):
    """What runs goes on with the old weights, what comes afterwards gets the new ones, the old ones leave memory."""
    server = start(launch, deltas)
    ids, old = goldens(C)[4]  # 150 tokens: whole blocks of KV are kept
    answers_as(server, C, C)
    alone = server.post("/v1/completions", golden_body(C, ids, 1500)).json()["choices"][0]["token_ids"]
    assert alone[:32] == old
    raw = server.connect(seconds=60)
    raw.sendall(request(body=golden_body(C, ids, 1500, stream=True)))
    reader = Reader(raw)
    reader.head()
    data = reader.chunk()
    first = variants(server)[C]["digest"]
    replace_variant(deltas / "c", CODER, C, tmp_path)
    assert rescan(server)["replaced"] == [C]
    retired = [v for v in listing(server)["variants"] if v["retired"]]
    assert [v["name"] for v in retired] == [C] and retired[0]["digest"] == first != variants(server)[C]["digest"]
    answers_as(server, C, CODER)
    while piece := reader.chunk():
        data += piece
    tokens = [t for event in events_of(data) for t in event["choices"][0]["token_ids"]]
    assert tokens == alone
    eventually(lambda: not [v for v in listing(server)["variants"] if v["retired"]], what="forgotten old weights")
    answers_as(server, C, CODER)
    # The KV of the old weights, of the very same prompt, is not taken for that of the new ones.
    copy_variant(CODER, deltas / "coder")
    rescan(server)
    fresh = start(launch, deltas)  # which has no KV of the old weights
    new = [s.post("/v1/completions", golden_body(name, ids, 32)).json()["choices"][0]["token_ids"] for s in (fresh, server) for name in (C, CODER)]
    assert new == [new[0]] * 4 and new[0] != old


def test_removed_during_use(launch, deltas):
    server = start(launch, deltas)
    ids, _ = goldens(C)[0]
    alone = server.post("/v1/completions", golden_body(C, ids, 1500)).json()["choices"][0]["token_ids"]
    raw = server.connect(seconds=60)
    raw.sendall(request(body=golden_body(C, ids, 1500, stream=True)))
    reader = Reader(raw)
    reader.head()
    data = reader.chunk()
    shutil.rmtree(deltas / "c")
    assert rescan(server)["removed"] == [C]
    error_of(server.post("/v1/completions", {"model": C, "prompt": "x"}), 404, "model_not_found", "model")
    while piece := reader.chunk():
        data += piece
    assert [t for event in events_of(data) for t in event["choices"][0]["token_ids"]] == alone
    eventually(lambda: len(listing(server)["variants"]) == 1, what="forgotten variant")


def test_the_fingerprint_follows_the_weights(launch, deltas, tmp_path):
    """And whatever else changes answers, but no name."""

    def fingerprint(server, model):
        return server.complete("x", model, max_tokens=1)["system_fingerprint"]

    server = start(launch, deltas)
    base, sql, first = (fingerprint(server, name) for name in (BASE, SQL, C))
    assert len({base, sql, first}) == 3
    copy_variant(CODER, tmp_path / "deltas" / "coder")
    replace_variant(deltas / "c", CODER, C, tmp_path)
    assert rescan(server)["replaced"] == [C]
    second = fingerprint(server, C)
    assert second != first and (fingerprint(server, BASE), fingerprint(server, SQL)) == (base, sql)
    (deltas / "c" / "generation_config.json").write_text('{"eos_token_id": [4081, 4084]}')
    assert rescan(server)["replaced"] == [C]
    assert fingerprint(server, C) not in (first, second)
    assert adapter(server.admin_url, "load", "mine", "c").status_code == 200
    assert fingerprint(server, "mine") == fingerprint(server, C)
    assert adapter(server.admin_url, "load", "mine", "sql", more={"load_inplace": True}).status_code == 200
    assert fingerprint(server, "mine") == sql
    again = start(launch, deltas)
    assert (fingerprint(again, BASE), fingerprint(again, SQL), fingerprint(again, C)) == (base, sql, fingerprint(server, C))
    other = start(launch, deltas, "--cpu-kernels", "plain")
    assert fingerprint(other, BASE) != base and fingerprint(other, SQL) != sql


def test_of_two_with_one_name_the_first_wins(launch, deltas):
    """In the order of directory names at start, whatever the file system lists first; a rescan takes the name from nobody."""
    for copy in ("c-old", "b-backup", "z"):
        copy_variant(CODER if copy == "b-backup" else C, deltas / copy, C)
    server = start(launch, deltas)
    answers_as(server, C, CODER, 4)
    refused = {r["path"]: r["failure"] for r in listing(server)["refused"]}
    assert refused == {str(deltas / n): f"the name is taken by {deltas / 'b-backup'}; {deltas / n} is refused" for n in ("c", "c-old", "z")}
    for name in ("c", "c-old", "z"):
        server.find(rf"level=error.*variant refused.*taken by {deltas / 'b-backup'}; {deltas / name} is refused")
    copy_variant(MATH, deltas / "a-first", C)
    assert len(rescan(server)["refused"]) == 4
    answers_as(server, C, CODER, 4)


def test_bad_variants_block_nobody(launch, deltas):
    """At start and at a rescan: each is named in the log, the reply and the list, and the good ones serve."""
    bad = {}

    def plant(name, change, words):
        folder = copy_variant(MATH, deltas / name, name)
        change(folder)
        bad[str(folder)] = words

    def edit(folder, **fields):
        manifest = json.loads((folder / "delta.json").read_text()) | fields
        (folder / "delta.json").write_text(json.dumps(manifest))

    def loop(folder):  # what root cannot read either
        (folder / "delta.json").unlink()
        (folder / "delta.json").symlink_to("delta.json")

    def fifo(folder):
        (folder / "delta.json").unlink()
        os.mkfifo(folder / "delta.json")

    plant("cut", lambda f: (f / "delta.json").write_text((f / "delta.json").read_text()[:500]), "delta.json")
    plant("wrong-base", lambda f: edit(f, base_fingerprint="0" * 64), "fingerprint 00000000")
    def nowhere(folder):
        (folder / "delta.json").unlink()
        (folder / "delta.json").symlink_to("nothing.json")

    plant("circle", loop, "cannot be reached")
    plant("nowhere", nowhere, "cannot be reached")
    plant("pipe", fifo, "not a regular file")
    plant("number", lambda f: edit(f, bits=9), "bits")
    server = start(launch, deltas)

    def check(refused):
        assert {r["path"] for r in refused} == set(bad)
        for one in refused:
            assert bad[one["path"]] in one["failure"] and one["path"].rsplit("/", 1)[1] in one["failure"], one

    check(listing(server)["refused"])
    for path in bad:
        server.find(rf'level=error mod=router what="variant refused".*{path}')
    assert models(server) == [BASE, C, SQL]
    copy_variant(CODER, deltas / "coder")
    reply = rescan(server)
    check(reply["refused"])
    assert reply["added"] == [CODER]
    check(listing(server)["refused"])
    answers_as(server, CODER, CODER)
    for path in bad:
        shutil.rmtree(path)
    reply = rescan(server)
    assert reply["refused"] == [] and reply["unchanged"] == 3 and listing(server)["refused"] == []
    # One that is served and becomes unreadable stays; the directory itself gone changes nothing.
    loop(deltas / "c")
    reply = rescan(server)
    assert [r["path"] for r in reply["refused"]] == [str(deltas / "c")] and reply["unchanged"] == 3
    answers_as(server, C, C)
    deltas.rename(deltas.parent / "away")
    answer = requests.post(server.admin_url + "/admin/rescan")
    assert str(deltas) in error_of(answer, 409, "conflict")
    assert models(server) == [BASE, C, CODER, SQL]


def test_faults_of_shards(launch, deltas):
    """Cut, flipped, missing, a pipe, a directory: 503 for its own requests, the fault for the operator."""
    places = {}

    def plant(name, change, words):
        folder = copy_variant(MATH, deltas / name, name)
        change(folder / SHARD)
        places[name] = (str(folder / SHARD), words)

    def flip(path):
        data = bytearray(path.read_bytes())
        data[-5] ^= 0x10
        path.write_bytes(data)

    def swap(make):
        def change(path):
            path.unlink()
            make(path)
        return change

    whole = (ROOT / "demo/deltas" / MATH / SHARD).stat().st_size
    plant("cut", lambda p: os.truncate(p, 500_000), "500000")
    plant("flipped", flip, "chunk 0")
    plant("missing", lambda p: p.unlink(), "No such file")
    plant("pipe", swap(os.mkfifo), "not a regular file")
    plant("folder", swap(os.mkdir), "not a regular file")
    plant("circle", swap(lambda p: p.symlink_to(p.name)), "symbolic links")
    server = start(launch, deltas)
    for name, (path, words) in places.items():
        answer = server.post("/v1/completions", {"model": name, "prompt": "x", "max_tokens": 1})
        message = error_of(answer, 503, "variant_unavailable")
        assert name in message and str(deltas) not in message and SHARD not in message
        if name == "cut":  # a length is no secret, and tells more than any sum
            assert message.endswith(f": the shard has 500000 bytes, delta.json records {whole}."), message
        else:
            assert words not in message
        if name == "missing":
            assert message.endswith(f"'{name}' is unavailable: a file of its delta was not found."), message
        failure = variants(server)[name]["failure"]
        assert words in failure and path in failure, (name, failure)
        line = server.find(rf'level=error mod=cache what="load of variant {name} failed.*').group(0)
        assert path in line and words in line, line
    answers_as(server, C, C)
    # Repaired in place: the next try succeeds, without a rescan.
    shutil.copyfile(ROOT / "demo/deltas" / MATH / SHARD, deltas / "flipped" / SHARD)
    eventually(lambda: server.post("/v1/completions", {"model": "flipped", "prompt": "x", "max_tokens": 1}).status_code == 200, 30)
    answers_as(server, "flipped", MATH)


# ---- vLLM's load and unload ----


def test_adapters_by_order(launch, deltas, tmp_path):
    server = start(launch, deltas)
    copy_variant(MATH, deltas / "math")
    copy_variant(CODER, tmp_path / "outside")
    url = server.admin_url
    answer = adapter(url, "load", "mine", "math")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'mine' added successfully.")
    assert variants(server)["mine"]["state"] == "ready"
    answers_as(server, "mine", MATH)
    for _ in range(30):  # a load that is said to have ended has ended
        assert adapter(url, "unload", "mine").status_code == 200
        assert adapter(url, "load", "mine", "math").status_code == 200
        assert variants(server)["mine"]["state"] == "ready"
    assert adapter(url, "load", "mine", deltas / "math").status_code == 200  # the same again
    assert variants(server)["mine"]["loads"] == 1
    message = error_of(adapter(url, "load", "mine", "c"), 400, "invalid_value", "lora_name")
    assert message.startswith("The lora adapter 'mine' has already been loaded.")
    assert adapter(url, "load", "mine", "c", more={"load_inplace": True}).status_code == 200
    answers_as(server, "mine", C)
    # Nothing outside the directory of deltas, however it is spelled, unless an entry of it is a link there: a rescan serves that too.
    (deltas / "door").symlink_to(tmp_path / "outside")
    (deltas / "c" / "door").symlink_to(tmp_path / "outside")
    (deltas / ".hidden").symlink_to(tmp_path / "outside")
    for path in ("../outside", tmp_path / "outside", "c/door", ".hidden", "c/../../outside", "door/../outside", "..", "/", "nowhere", "."):
        error_of(adapter(url, "load", "x", path), 404, "model_not_found", "lora_path")
    for name, path in (("linked", "door"), ("linked-too", deltas / "door")):
        assert adapter(url, "load", name, path).status_code == 200
        answers_as(server, name, CODER, 4)
        assert adapter(url, "unload", name).status_code == 200
    assert rescan(server)["added"] == [CODER, MATH]
    (deltas / "door").unlink()
    (deltas / "math").rename(tmp_path / "math")
    assert rescan(server)["removed"] == [CODER, MATH]
    (tmp_path / "math").rename(deltas / "math")
    error_of(adapter(url, "load", "a\0b", "c"), 400, "invalid_value", "lora_name")
    error_of(adapter(url, "load", "n" * 129, "c"), 400, "string_above_max_length", "lora_name")
    for unfit in (BASE, "a\nb", "..", " "):
        error_of(adapter(url, "load", unfit, "c"), 400, "invalid_value", "lora_name")
    assert error_of(adapter(url, "load", "x"), 400, "missing_required_parameter", "lora_path") == "Both 'lora_name' and 'lora_path' must be provided."
    error_of(requests.post(url + "/v1/load_lora_adapter", json={"lora_name": 5, "lora_path": "c"}), 400, "invalid_type", "lora_name")
    error_of(requests.post(url + "/v1/load_lora_adapter", data="{", headers={"Content-Type": "application/json"}), 400, "invalid_json")
    answer = adapter(url, "unload", "mine")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'mine' removed successfully.")
    assert error_of(adapter(url, "unload", "mine"), 404, "model_not_found", "lora_name") == "The lora adapter 'mine' cannot be found."
    error_of(adapter(url, "unload", BASE), 400, "invalid_value", "lora_name")
    error_of(requests.post(url + "/v1/unload_lora_adapter", json={}), 400, "missing_required_parameter", "lora_name")
    assert "mine" not in models(server)
    # Not on the API's own address unless asked for.
    for verb in ("load", "unload"):
        error_of(adapter(server.url, verb, "mine", "c"), 404, "unknown_url")


def test_a_failed_order_leaves_nothing(launch, deltas):
    server = start(launch, deltas)
    bad = copy_variant(MATH, deltas / "math")
    data = bytearray((bad / SHARD).read_bytes())
    data[-5] ^= 1
    (bad / SHARD).write_bytes(data)
    message = error_of(adapter(server.admin_url, "load", "mine", "math"), 400, "invalid_value", "lora_path")
    assert "chunk 0" in message and str(bad) in message
    assert models(server) == [BASE, C, SQL]
    shutil.copyfile(ROOT / "demo/deltas" / MATH / SHARD, bad / SHARD)
    assert adapter(server.admin_url, "load", "mine", "math").status_code == 200
    answers_as(server, "mine", MATH)


def test_unload_during_use_and_load(launch, deltas):
    server = start(launch, deltas)
    ids, _ = goldens(C)[0]
    alone = server.post("/v1/completions", golden_body(C, ids, 1500)).json()["choices"][0]["token_ids"]
    raw = server.connect(seconds=60)
    raw.sendall(request(body=golden_body(C, ids, 1500, stream=True)))
    reader = Reader(raw)
    reader.head()
    data = reader.chunk()
    assert adapter(server.admin_url, "unload", C).status_code == 200
    assert models(server) == [BASE, SQL]
    while piece := reader.chunk():
        data += piece
    assert [t for event in events_of(data) for t in event["choices"][0]["token_ids"]] == alone
    assert rescan(server)["added"] == [C]  # its directory is still there
    answers_as(server, C, C)
    # Orders and requests all at once: nothing hangs, every answer is one of those allowed.
    stop = time.monotonic() + 4
    seen = set()

    def orders(verbs):
        while time.monotonic() < stop:
            for verb in verbs:
                path = "sql" if verb == "load" else None
                seen.add((verb, adapter(server.admin_url, verb, "mine", path).status_code))

    def asks():
        while time.monotonic() < stop:
            answer = requests.post(server.url + "/v1/completions", json=golden_body("mine", goldens(SQL)[0][0], 4))
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["token_ids"] == goldens(SQL)[0][1][:4]
            seen.add(("ask", answer.status_code))

    def wrapped(function, *arguments):
        def run():
            try:
                function(*arguments)
            except Exception as fault:
                faults.append(fault)
        return threading.Thread(target=run)

    faults = []
    threads = [wrapped(orders, ["load", "unload"]), wrapped(orders, ["unload", "load"]), *[wrapped(asks) for _ in range(4)]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not faults, faults
    assert seen <= {("load", 200), ("load", 400), ("unload", 200), ("unload", 404), ("ask", 200), ("ask", 404), ("ask", 503)}
    assert {("load", 200), ("unload", 200), ("ask", 200), ("ask", 404)} <= seen
    adapter(server.admin_url, "unload", "mine")
    eventually(lambda: len(listing(server)["variants"]) == 2, what="forgotten variants")


@pytest.mark.parametrize("replace", [False, True], ids=["removed", "replaced"])
@pytest.mark.parametrize("wait", [0.3, 2.6], ids=["before", "during"])
def test_retired_while_a_cold_variant_waits(launch, deltas, tmp_path, wait, replace):
    """The only slot's variant goes, before or after it was told to give way: everybody is answered, and the cold one need not
    wait for the backlog."""
    server = start(launch, deltas, "--slots", "1", "--max-seqs", "2")
    statuses, refusals = [], []

    def ask(model, tokens):
        body = {"model": model, "prompt": "def ", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = requests.post(server.url + "/v1/completions", json=body, timeout=180)
        if answer.status_code != 200:
            refusals.append((error_of(answer, 503, "variant_unavailable"), int(answer.headers["retry-after"])))
        statuses.append((model, answer.status_code))

    threads = [threading.Thread(target=ask, args=(C, 1800 if replace or running else 900)) for running in [True] * 2 + [False] * 10]
    for thread in threads[:2]:
        thread.start()
    eventually(lambda: server.metric("vllm:num_requests_running") == 2, what="running requests")
    for thread in threads[2:]:
        thread.start()
    eventually(lambda: server.metric("vllm:num_requests_waiting") == 10, what="queue")
    threads.append(threading.Thread(target=ask, args=(SQL, 2)))
    asked = time.monotonic()
    threads[-1].start()
    time.sleep(wait)
    if replace:
        replace_variant(deltas / "c", MATH, C, tmp_path)
        assert rescan(server)["replaced"] == [C]
    else:
        assert adapter(server.admin_url, "unload", C).status_code == 200
    first = time.monotonic() - asked < 2  # so it went before the cold one had waited long enough for anybody to give way
    for thread in threads:
        thread.join(200)
    assert statuses.count((SQL, 200)) == 1
    done, dismissed = statuses.count((C, 200)), statuses.count((C, 503))
    if replace:  # the old weights cannot be read again: who waits for them is told to ask again, who runs on them goes on
        assert done >= 2 and done + dismissed == 12
        assert all(seconds >= 1 for _, seconds in refusals)
        if first:  # later a quick one may be past it all
            assert dismissed >= 1 and all("no room now" in message for message, _ in refusals), refusals
    else:
        assert done == 12 and statuses[-1] != (SQL, 200)
    eventually(lambda: not any(v["retired"] for v in listing(server)["variants"]), what="end of the old one")


def test_keys_of_orders(launch, deltas, tmp_path):
    copy_variant(MATH, tmp_path / "outside")
    admin, client = {"Authorization": "Bearer op"}, {"Authorization": "Bearer sk"}
    server = start(launch, deltas, "--runtime-loading", "--admin-key", "op", "--api-key", "sk")
    for url in (server.url, server.admin_url):
        for headers in ({}, client):
            error_of(adapter(url, "load", "mine", "c", headers=headers), 401, "invalid_api_key")
            error_of(adapter(url, "unload", C, headers=headers), 401, "invalid_api_key")
    error_of(requests.post(server.admin_url + "/admin/rescan"), 401, "invalid_api_key")
    assert adapter(server.url, "load", "mine", "c", headers=admin).status_code == 200
    # Any place for who has the operator's key on the operator's address; not on the API's.
    error_of(adapter(server.url, "load", "far", tmp_path / "outside", headers=admin), 404, "model_not_found", "lora_path")
    assert adapter(server.admin_url, "load", "far", tmp_path / "outside", headers=admin).status_code == 200
    assert adapter(server.url, "unload", "far", headers=admin).status_code == 200
    assert requests.post(server.admin_url + "/admin/rescan", headers=admin).json()["unchanged"] == 3
    without = start(launch, deltas, "--runtime-loading", "--api-key", "sk")
    error_of(adapter(without.url, "load", "mine", "c"), 401, "invalid_api_key")
    assert adapter(without.url, "load", "mine", "c", headers=client).status_code == 200


def test_orders_of_clients_are_told_no_paths(launch, deltas):
    """The file's name within the variant and the kind of fault on the API's address; all of it on the operator's, and in the log."""
    def flip(folder):
        data = bytearray((folder / SHARD).read_bytes())
        data[-5] ^= 1
        (folder / SHARD).write_bytes(data)

    def another_base(folder):
        text = json.loads((folder / "delta.json").read_text())
        (folder / "delta.json").write_text(json.dumps(text | {"base_fingerprint": secrets.token_hex(32)}))

    short = secrets.randbelow(1000) + 2
    whole = (ROOT / "demo/deltas" / MATH / SHARD).stat().st_size
    faults = {
        "flipped": (flip, 400, f"checksum mismatch ({SHARD})"),
        "cut": (lambda f: os.truncate(f / SHARD, short), 400, f"the shard has {short} bytes, delta.json records {whole} ({SHARD})"),
        "gone": (lambda f: (f / SHARD).unlink(), 400, f"a file of its delta was not found ({SHARD})"),
        "empty": (lambda f: (f / "delta.json").unlink(), 404, "a file of its delta was not found (delta.json)"),
        "torn": (lambda f: (f / "delta.json").write_text("{"), 400, "malformed input (delta.json)"),
        "circle": (lambda f: (f / "config.json").symlink_to("config.json"), 400, "input/output error (config.json)"),
        "other": (another_base, 400, "does not fit the base model"),
    }
    server = start(launch, deltas, "--runtime-loading")
    for place, (plant, status, told) in faults.items():
        plant(copy_variant(MATH, deltas / place))
        name = f"{place}-{secrets.token_hex(3)}"
        code = "invalid_value" if status == 400 else "model_not_found"
        message = error_of(adapter(server.url, "load", name, place), status, code, "lora_path")
        assert message == f"Loading the lora adapter '{name}' failed: {told}."
        eventually(lambda: any("level=error" in line and str(deltas / place) in line for line in server.lines), what="the line of the fault")
        message = error_of(adapter(server.admin_url, "load", name, place), status, code, "lora_path")
        assert str(deltas / place) in message or place == "cut"
    # Nor where the directory of deltas is, by a path that only fits without it.
    long = "/".join(["c" * 200] * 5)
    assert error_of(adapter(server.url, "load", "long", long), 400, "invalid_value", "lora_path") == "the path is too long"
    assert models(server) == [BASE, C, SQL]


# ---- Prefetch ----


def test_pins_and_prefetch(launch, deltas, tmp_path):
    for name in (MATH, CODER, "zen-mini-legal"):
        copy_variant(name, deltas / name)
    config = {"deltas": str(deltas), "variants": [{"name": "kept", "path": str(deltas / "c"), "pin": True}],
              "cache": {"prefetch": [MATH, CODER, "zen-mini-legal", "no-such-name"]}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    server = launch("--config", str(path), "--slots", "3", "--pinned-top", "0", deltas=None)
    eventually(lambda: sum(v["state"] == "ready" for v in variants(server).values()) == 3, what="prefetched variants")
    infos = variants(server)
    assert infos["kept"]["state"] == "ready" and infos["kept"]["pinned"] and infos["kept"]["loads"] == 1
    assert sum(infos[n]["state"] == "ready" for n in (MATH, CODER, "zen-mini-legal")) == 2  # while memory is free
    assert sum(v["evictions"] for v in infos.values()) == 0
    server.find("prefetch: no variant has the name no-such-name")
    for name in (MATH, CODER, "zen-mini-legal", SQL):
        answers_as(server, name, name, 4)
    assert variants(server)["kept"]["evictions"] == 0
    # A pin passes on to what replaces its variant, which is loaded at once.
    replace_variant(deltas / "c", CODER, "any", tmp_path)
    assert rescan(server)["replaced"] == ["kept"]
    eventually(lambda: variants(server)["kept"]["state"] == "ready", what="loaded replacement")
    assert variants(server)["kept"]["pinned"]
    answers_as(server, "kept", CODER)


@pytest.mark.parametrize("slots", [1, 2])
def test_pins_that_do_not_fit(launch, deltas, tmp_path, slots):
    """Served unpinned, with a warning that says why."""
    listed = [{"name": f"pin-{i}", "path": str(deltas / n), "pin": True} for i, n in enumerate(("c", "sql"))]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"deltas": str(deltas), "variants": listed, "cache": {"slots": slots}}))
    server = launch("--config", str(path), "--slots", str(slots), deltas=None)
    for i in range(slots - 1, 2):
        line = server.find(rf"level=warn.*variant=pin-{i} is served unpinned").group(0)
        line = next(one for one in server.lines if line in one)
        assert "cannot be pinned" in line and listed[i]["path"] in line and f"slots={slots} allow {slots - 1} pin{'s' if slots == 1 else ''} of one plane" in line
    assert [variants(server)[f"pin-{i}"]["pinned"] for i in range(2)] == [i < slots - 1 for i in range(2)]
    assert not listing(server)["refused"]
    for name, golden in (("pin-0", C), ("pin-1", SQL), ("pin-0", C)):
        answers_as(server, name, golden, 4)
    # An order to pin is refused, as ever.
    assert requests.post(server.admin_url + "/admin/variants/pin-1/pin", timeout=20).status_code >= 400


# ---- Clients and processes that go away ----


def test_the_first_client_leaves_during_the_load(launch, deltas):
    """Its load goes on for the others, and for nobody."""
    server = start(launch, deltas)
    ids, want = goldens(C)[0]
    server.process.send_signal(signal.SIGSTOP)
    first = server.connect()
    first.sendall(request(body=golden_body(C, ids, 8)))
    time.sleep(0.05)
    others = [server.connect() for _ in range(5)]
    for raw in others:
        raw.sendall(request(body=golden_body(C, ids, 8)))
    first.close()
    server.process.send_signal(signal.SIGCONT)
    for raw in others:
        assert Reader(raw).answer().json["choices"][0]["token_ids"] == want[:8]
    assert variants(server)[C]["loads"] == 1
    alone = server.connect()
    alone.sendall(request(body=golden_body(SQL, ids, 8)))
    alone.close()
    eventually(lambda: variants(server)[SQL]["references"] == variants(server)[SQL]["waiters"] == 0, what="nobody left")
    answers_as(server, SQL, SQL)


def test_killed_during_loads_starts_again(launch, deltas):
    for name in (MATH, CODER):
        copy_variant(name, deltas / name)
    before = {p: p.read_bytes() for p in deltas.rglob("*") if p.is_file()}
    for _ in range(3):
        server = start_server(deltas=str(deltas))
        raws = [server.connect() for _ in range(4)]
        for raw, name in zip(raws, (C, SQL, MATH, CODER)):
            raw.sendall(request(body=golden_body(name, [1, 2, 3], 200, stream=True)))
        time.sleep(0.01)
        server.process.kill()
        server.process.wait()
    assert {p: p.read_bytes() for p in deltas.rglob("*") if p.is_file()} == before
    server = start(launch, deltas)
    for name in (C, SQL, MATH, CODER):
        answers_as(server, name, name)


# ---- Refused flags ----


@pytest.mark.parametrize("flags, words", [(["--dtype", "fp16"], "dtype"), (["--tensor-parallel", "8"], "tensor_parallel")])
def test_refused_values_are_wrong_usage(flags, words, tmp_path):
    command = [BINARY, "serve", "--base", "demo/zen-mini", "--listen", "127.0.0.1:0", "--admin", "none", "--backend", "cpu"]
    run = subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and words in run.stderr, run.stderr
    config = tmp_path / "config.json"
    key = flags[0][2:].replace("-", "_")
    config.write_text(json.dumps({key: int(flags[1]) if flags[1].isdigit() else flags[1]}))
    run = subprocess.run([*command, "--config", config], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and words in run.stderr, run.stderr


@pytest.mark.parametrize("flags, status, words", [
    (["--loads-in-parallel", "100"], 2, ["--loads-in-parallel", "--read-depth (8)", "try: bitdelta help serve"]),
    (["--nosuch"], 2, ["--nosuch", "try: bitdelta help serve"]),
    (["--chat-template", "/no/such/file"], 1, ["/no/such/file"]),
    (["--base", "README.md"], 1, ["README.md is not a directory"]),
    (["--base", "/no/such/dir", "--base-name", "x"], 1, ["/no/such/dir: the base model's directory cannot be opened"]),
    (["--base-name", "a\"b"], 1, ["the base's name"]),
])
def test_told_before_the_base_is_loaded(flags, status, words):
    base = [] if "--base" in flags else ["--base", "demo/zen-mini"]
    command = [BINARY, "serve", *base, "--listen", "127.0.0.1:0", "--admin", "none", "--backend", "cpu", *flags]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == status and all(word in run.stderr for word in words), run.stderr
    assert "mod=model" not in run.stderr and "listening" not in run.stderr, run.stderr


def test_a_directory_without_deltas_is_told(launch, tmp_path):
    server = launch(deltas=str(tmp_path))
    said = f"no variants (no directory in {tmp_path} has a delta.json): the base is served alone"
    eventually(lambda: any(said in line for line in server.lines), what="the line about no variants")
    command = [BINARY, "serve", "--base", "demo/zen-mini", "--listen", "127.0.0.1:0", "--admin", "none", "--backend", "cpu"]
    run = subprocess.run([*command, "--deltas", "demo/deltas/zen-mini-sql"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and "demo/deltas/zen-mini-sql is a delta itself" in run.stderr, run.stderr


def test_a_command_not_known_has_no_help_of_its_own():
    run = subprocess.run([BINARY, "sevre"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and run.stderr.endswith("try: bitdelta help\n"), run.stderr


def test_the_backend_line_has_no_empty_reason(server):
    line = server.find(r"mod=backend using.*").group(0)
    assert "()" not in line and "name=cpu" in line


def test_a_name_with_a_nul_is_not_cut(server):
    message = error_of(server.post("/v1/completions", {"model": "a\0b", "prompt": "x"}), 404, "model_not_found", "model")
    assert message == "The model 'a\ufffdb' does not exist."


def test_compress_onto_a_full_disk(tmp_path):
    """No half a variant where a server would find it: the limit on file sizes stands in for the disk's end."""
    import resource

    unpacked = ROOT / "demo/finetuned/zen-mini-coder/model.safetensors"
    if not unpacked.exists():
        pytest.skip("the fine-tune's weights are not unpacked")
    out = tmp_path / "deltas" / "mine"
    out.parent.mkdir()
    command = [BINARY, "compress", "--base", "demo/zen-mini", "--finetuned", str(unpacked.parent), "--out", out]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120,
                         preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)))
    assert run.returncode == 1 and "File too large" in run.stderr, (run.returncode, run.stderr)
    assert not out.exists() and list(out.parent.iterdir()) == []
