"""HTTP/1.1 by hand on a socket, for what well-behaved clients never send."""

import json


class Answer:
    def __init__(self, status, headers, body, whole):
        self.status, self.headers, self.body, self.whole = status, headers, body, whole

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def code(self):
        return self.json["error"]["code"]


class Reader:
    """Answers off one connection, in order."""

    def __init__(self, raw):
        self.raw, self.rest = raw, b""

    def more(self):
        piece = self.raw.recv(65536)
        self.rest += piece
        return bool(piece)

    def until(self, mark):
        while mark not in self.rest:
            if not self.more():
                raise EOFError(self.rest)
        text, self.rest = self.rest.split(mark, 1)
        return text

    def exactly(self, count):
        while len(self.rest) < count:
            if not self.more():
                raise EOFError(self.rest)
        text, self.rest = self.rest[:count], self.rest[count:]
        return text

    def head(self):
        first, *lines = self.until(b"\r\n\r\n").decode().split("\r\n")
        headers = {}
        for line in lines:
            name, value = line.split(":", 1)
            assert name.lower() not in headers, f"{name} twice"
            headers[name.lower()] = value.strip()
        return int(first.split()[1]), headers

    def chunk(self):
        """One chunk's bytes; b"" at the end."""
        size = int(self.until(b"\r\n"), 16)
        data = self.exactly(size)
        assert self.exactly(2) == b"\r\n"
        return data

    def answer(self, head_only=False):
        status, headers = self.head()
        if head_only or status in (100, 204):
            return Answer(status, headers, b"", True)
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while piece := self.chunk():
                body += piece
            return Answer(status, headers, body, True)
        if "content-length" in headers:
            return Answer(status, headers, self.exactly(int(headers["content-length"])), True)
        while self.more():
            pass
        body, self.rest = self.rest, b""
        return Answer(status, headers, body, True)

    def at_end(self):
        """The peer closed, with nothing more to say. A reset counts: it comes where unread bytes are dropped."""
        try:
            while self.more():
                pass
        except ConnectionResetError:
            pass
        return self.rest == b""


def request(method="POST", path="/v1/completions", body=None, headers=(), host="x", version="1.1"):
    """A whole request as bytes. headers: lines as they should stand."""
    lines = [f"{method} {path} HTTP/{version}"]
    if host is not None:
        lines.append(f"Host: {host}")
    lines += headers
    payload = b""
    if body is not None:
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines.append(f"Content-Length: {len(payload)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + payload


def chunked(*pieces):
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
