"""HTTPS on the public listener: clients that check the certificate, streams, pipelining, broken handshakes, renewal."""

import os
import signal
import socket
import ssl
import struct
import subprocess

import openai
import pytest
import requests
from conftest import BASE, BINARY, ROOT, eventually, events_of, start_server
from raw_http import Reader, request

LONG = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


def openssl(*arguments):
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def make_authority(folder, name="ca"):
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem", "-days", 30,
            "-subj", f"/CN=Test {name}", "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign")
    return folder / f"{name}.pem"


def make_certificate(folder, name, authority="ca", key="ec", days=30):
    """name.pem (with its issuer behind it) and name.key, for localhost and 127.0.0.1."""
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"] if key == "ec" else ["-newkey", "rsa:2048"]
    openssl("req", *kind, "-nodes", "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.csr", "-subj", f"/CN={name}")
    extensions = folder / f"{name}.ext"
    extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n"
                          "authorityKeyIdentifier=keyid\nsubjectKeyIdentifier=hash\n")
    openssl("x509", "-req", "-in", folder / f"{name}.csr", "-CA", folder / f"{authority}.pem", "-CAkey", folder / f"{authority}.key",
            "-CAcreateserial", "-out", folder / f"{name}.pem", "-days", days, "-extfile", extensions)
    chain = (folder / f"{name}.pem").read_text() + (folder / f"{authority}.pem").read_text()
    (folder / f"{name}.pem").write_text(chain)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    make_authority(folder)
    make_certificate(folder, "server")
    make_certificate(folder, "rsa", key="rsa")
    make_certificate(folder, "other")
    return folder


@pytest.fixture(scope="module")
def secure(files):
    running = start_server("--tls-cert", str(files / "server.pem"), "--tls-key", str(files / "server.key"), "--http-threads", "2")
    yield running
    assert running.stop() == 0, "\n".join(running.lines[-40:])
    assert not [line for line in running.lines if any(fault in line for fault in ("Sanitizer", "runtime error", "level=error"))]


def url(server, host="127.0.0.1"):
    return f"https://{host}:{server.port}"


def wrap(server, files, raw=None, **options):
    """A TLS connection that checks the server's name."""
    context = ssl.create_default_context(cafile=files / "ca.pem")
    for name, value in options.items():
        setattr(context, name, value)
    return context.wrap_socket(raw or server.connect(), server_hostname="localhost")


def admin_metric(server, name):
    """Of the admin listener, which is plain."""
    lines = requests.get(server.admin_url + "/metrics", timeout=20).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def running_requests(server):
    return admin_metric(server, "vllm:num_requests_running") + admin_metric(server, "vllm:num_requests_waiting")


def test_a_broken_head_is_answered_once(secure, files):
    for length, status in (("x", 400), ("9" * 30, 413)):
        raw = wrap(secure, files)
        raw.sendall(request("GET", "/version") + request(headers=[f"Content-Length: {length}"]))
        reader = Reader(raw)
        assert reader.answer().status == 200
        answer = reader.answer()
        assert answer.status == status and answer.json["error"]["type"] == "invalid_request_error"
        assert raw.recv(100) == b"" and reader.rest == b""


def test_requests(secure, files):
    secure.find("listening address=.* tls=on")
    with requests.Session() as session:
        session.verify, session.trust_env = str(files / "ca.pem"), False
        for host in ("127.0.0.1", "localhost"):
            assert session.get(url(secure, host) + "/v1/models", timeout=30).json()["data"][0]["id"] == BASE
        body = {"prompt": "The sea", "max_tokens": 9, "temperature": 0}
        whole = session.post(url(secure) + "/v1/completions", json=body, timeout=60).json()
        with session.post(url(secure) + "/v1/completions", json=body | {"stream": True}, stream=True, timeout=60) as answer:
            events = events_of(b"".join(answer.iter_content(None)))
        assert "".join(e["choices"][0]["text"] for e in events) == whole["choices"][0]["text"]
        large = session.post(url(secure) + "/v1/completions", json=body | {"user": "x" * 3_000_000}, timeout=60)
        assert large.json()["choices"] == whole["choices"]
        many = session.post(url(secure) + "/v1/completions", json={"prompt": ["a"] * 200, "max_tokens": 8, "logprobs": 20, "ignore_eos": True},
                            timeout=120)
        assert len(many.json()["choices"]) == 200 and len(many.content) > 500_000
    with pytest.raises(requests.exceptions.SSLError):
        requests.get(url(secure) + "/health", timeout=20)


def test_openai_sdk(secure, files):
    http = openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=files / "ca.pem"), trust_env=False)
    with http, \
            openai.OpenAI(base_url=url(secure) + "/v1", api_key="unused", max_retries=0, http_client=http) as client:
        fields = dict(model=BASE, prompt=["Once", "Twice"], max_tokens=12, temperature=0)
        whole = client.completions.create(**fields)
        texts = ["", ""]
        for chunk in client.completions.create(**fields, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [choice.text for choice in whole.choices]


def test_one_event_per_chunk_and_pipelining(secure, files):
    """What the library decrypted ahead is not forgotten while a connection waits for the engine."""
    body = {"prompt": "a", "stream": True, "max_tokens": 20, "ignore_eos": True}
    with wrap(secure, files) as tls:
        tls.sendall(request(body=body) + request("GET", "/version") + request(body=b"{}") + request("GET", "/nope") + request(body=body))
        reader = Reader(tls)
        for wanted in (200, 200, 400, 404, 200):
            status, headers = reader.head()
            assert status == wanted
            if headers.get("transfer-encoding") == "chunked":
                count = 0
                while piece := reader.chunk():
                    assert piece.startswith(b"data: ") and piece.endswith(b"\n\n") and piece.count(b"\n") == 2
                    count += 1
                assert count == 21
            else:
                reader.exactly(int(headers["content-length"]))


def test_body_in_small_records(secure, files):
    with wrap(secure, files) as tls:
        data = request(body={"prompt": "a", "max_tokens": 1, "user": "x" * 300})
        for at in range(0, len(data), 7):
            tls.sendall(data[at:at + 7])
        assert Reader(tls).answer().status == 200


def test_versions(secure, files):
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        with wrap(secure, files, minimum_version=version, maximum_version=version) as tls:
            assert tls.version() == {ssl.TLSVersion.TLSv1_2: "TLSv1.2", ssl.TLSVersion.TLSv1_3: "TLSv1.3"}[version]
            tls.sendall(request("GET", "/health"))
            assert Reader(tls).answer().status == 200
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(secure.connect())


@pytest.mark.parametrize("data", [request("GET", "/health"), b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00", b"\x16\x03\x01", os.urandom(200)],
                         ids=["plain HTTP", "broken hello", "part of a hello", "noise"])
def test_what_is_not_tls_is_closed(secure, files, data):
    raw = secure.connect(seconds=3)
    seen = b""
    try:
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        while piece := raw.recv(4096):
            seen += piece
    except OSError as fault:  # closed before we were done
        assert not isinstance(fault, TimeoutError)
    raw.close()
    assert not seen.startswith(b"HTTP/1.1 200")
    assert requests.get(url(secure) + "/health", verify=str(files / "ca.pem"), timeout=20).status_code == 200


def test_a_silent_handshake_is_cut(launch, files):
    server = launch("--tls-cert", str(files / "server.pem"), "--tls-key", str(files / "server.key"), "--request-header-seconds", "1", deltas=None)
    raw = server.connect(seconds=20)
    assert raw.recv(100) == b""
    raw.close()
    assert requests.get(url(server) + "/health", verify=str(files / "ca.pem"), timeout=20).status_code == 200


@pytest.mark.parametrize("how", ["close", "reset", "unwrap"])
def test_a_client_that_leaves_cancels(secure, files, how):
    eventually(lambda: running_requests(secure) == 0, what="idle server")
    for stream in (True, False):
        tls = wrap(secure, files)
        tls.sendall(request(body=LONG | {"stream": stream, "n": 4}))
        if stream:
            Reader(tls).head()
        eventually(lambda: running_requests(secure) > 0, what="running request")
        if how == "reset":
            tls.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how == "unwrap" and not stream:  # an orderly end; with a stream the answers in between make OpenSSL complain
            tls.settimeout(0.2)
            try:
                tls.unwrap()
            except (OSError, ssl.SSLError):
                pass
        tls.close()
        eventually(lambda: running_requests(secure) == 0, what="cancelled request")


def test_many_streams(secure, files):
    """More connections than anyone needs threads for; every stream complete."""
    import concurrent.futures

    def stream(number):
        with wrap(secure, files) as tls:
            tls.settimeout(60)
            tls.sendall(request(body={"prompt": f"a{number % 5}", "stream": True, "max_tokens": 16, "ignore_eos": True, "temperature": 0}))
            return Reader(tls).answer().body

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        bodies = list(pool.map(stream, range(64)))
    for number, body in enumerate(bodies):
        events = events_of(body)
        assert len(events) == 16
        assert [e["choices"][0]["text"] for e in events] == [e["choices"][0]["text"] for e in events_of(bodies[number % 5])]


def test_the_admin_listener_stays_plain(secure):
    assert requests.get(secure.admin_url + "/admin/variants", timeout=20).status_code == 200


def subject(server, files):
    with wrap(server, files) as tls:
        return dict(pair for part in tls.getpeercert()["subject"] for pair in part)["commonName"]


def test_renewal(launch, files, tmp_path):
    """SIGHUP shows the new certificate to new connections; those that are open stay; a bad file changes nothing."""
    certificate, key = tmp_path / "live.pem", tmp_path / "live.key"

    def install(name):
        key.write_bytes((files / f"{name}.key").read_bytes())
        certificate.write_bytes((files / f"{name}.pem").read_bytes())

    install("server")
    server = launch("--tls-cert", str(certificate), "--tls-key", str(key), deltas=None)
    assert subject(server, files) == "server"
    with wrap(server, files) as old:
        old.sendall(request(body=LONG | {"stream": True, "max_tokens": 300}))
        reader = Reader(old)
        assert reader.head()[0] == 200
        install("rsa")
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: subject(server, files) == "rsa", what="new certificate")
        data = b""
        while piece := reader.chunk():
            data += piece
        assert len(events_of(data)) == 300
    key.write_bytes((files / "other.key").read_bytes())
    server.process.send_signal(signal.SIGHUP)
    line = server.find(r"level=error .*certificate not renewed.*").group(0)
    assert str(key) in line and "not the key of the certificate" in line
    assert subject(server, files) == "rsa"
    install("other")
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: subject(server, files) == "other", what="third certificate")


def test_start_errors_name_the_file(files, tmp_path):
    empty, text = tmp_path / "empty.pem", tmp_path / "text.pem"
    empty.write_bytes(b"")
    text.write_text("-----BEGIN CERTIFICATE-----\nnot base64!\n-----END CERTIFICATE-----\n")
    locked = tmp_path / "locked.key"
    openssl("pkey", "-in", files / "server.key", "-aes256", "-passout", "pass:x", "-out", locked)
    good_cert, good_key, missing = files / "server.pem", files / "server.key", tmp_path / "missing.pem"
    cases = [(missing, good_key, [missing, "No such file"]), (good_cert, missing, [missing, "No such file"]),
             (empty, good_key, [empty, "certificates"]), (text, good_key, [text, "certificates"]), (good_key, good_key, [good_key, "certificates"]),
             (good_cert, good_cert, [good_cert, "private key"]), (good_cert, locked, [locked, "unencrypted"]),
             (good_cert, files / "other.key", [files / "other.key", "not the key"]), (tmp_path, good_key, [tmp_path]),
             (good_cert, None, ["--tls-cert needs --tls-key"]), (None, good_key, ["--tls-key needs --tls-cert"])]
    for certificate, key, words in cases:
        command = [BINARY, "serve", "--base", "demo/zen-mini", "--listen", "127.0.0.1:0", "--admin", "none"]
        command += ["--tls-cert", certificate] if certificate else []
        command += ["--tls-key", key] if key else []
        done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode in (1, 2), (certificate, key)
        assert all(str(word) in done.stderr for word in words), done.stderr
        assert "PRIVATE KEY" not in done.stderr


def test_an_expired_certificate_is_said(launch, files):
    make_certificate(files, "old", days=-1)
    server = launch("--tls-cert", str(files / "old.pem"), "--tls-key", str(files / "old.key"), deltas=None)
    server.find(r"level=warn .*old\.pem.*\(expired\)")
    with pytest.raises(ssl.SSLCertVerificationError):
        wrap(server, files)


def test_draining(launch, files):
    server = launch("--tls-cert", str(files / "rsa.pem"), "--tls-key", str(files / "rsa.key"), deltas=None)
    idle = wrap(server, files)
    with wrap(server, files) as tls:
        tls.sendall(request(body=LONG | {"stream": True, "max_tokens": 200}))
        reader = Reader(tls)
        assert reader.head()[0] == 200
        server.process.send_signal(signal.SIGTERM)
        data = b""
        while piece := reader.chunk():
            data += piece
        assert len(events_of(data)) == 200
    assert server.process.wait(20) == 0
    idle.close()
