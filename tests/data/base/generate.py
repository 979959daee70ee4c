#!/usr/bin/env python3
"""Expectations of the base unit tests, made with Python's own json, repr and UTF-8 decoder.

Writes beside itself, each also as the .xz that is kept (`../unpack.sh` unpacks them):
  json_cases.txt    "<nodes, or -1 when refused> <document in hex>"
  json_strings.txt  "<bytes in hex> <their JSON string in hex>"
  numbers.txt       "d|f <bits in hex> <shortest decimal>"
Run it again after a change; the seed is fixed, so the files change only with the script.
"""
import json
import lzma
import math
import pathlib
import random
import struct
from fractions import Fraction

HERE = pathlib.Path(__file__).parent
RNG = random.Random(20402)


def nodes(value):
    """Values and keys, as the scanner counts them; objects arrive as ('object', pairs)."""
    if isinstance(value, tuple):
        return 1 + sum(1 + nodes(item) for _, item in value[1])
    if isinstance(value, list):
        return 1 + sum(nodes(item) for item in value)
    return 1


def refuse(text):
    raise ValueError(text)


def strings(value):
    if isinstance(value, tuple):
        for key, item in value[1]:
            yield key, True
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, str):
        yield value, False


def finite(text):
    number = float(text)
    return number if math.isfinite(number) else refuse("overflow")


def strict(data):
    """Node count of the document, or -1: Python's parser with what it lets through refused as well."""
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
    try:
        value = json.loads(
            data.decode("utf-8"),
            parse_constant=refuse,
            parse_float=finite,
            parse_int=finite,
            object_pairs_hook=lambda pairs: ("object", pairs),
        )
        for text, is_key in strings(value):
            text.encode("utf-8")  # lone surrogates fail here
            if "\0" in text:
                raise ValueError("NUL")
        return nodes(value)
    except (ValueError, RecursionError):
        return -1


def random_value(depth):
    kind = RNG.randrange(9 if depth > 0 else 6)
    if kind == 0:
        return RNG.choice(["true", "false", "null"])
    if kind == 1:
        return str(RNG.randint(-(10**6), 10**6))
    if kind == 2:
        return RNG.choice(["0.5", "-0", "1e5", "1E-7", "2.50e+3", "-0.0", "1e308", "123456789012345678901234567890"])
    if kind in (3, 4):
        pieces = ["a", "é", "漢", "😀", "\\n", "\\\"", "\\\\", "\\/", "\\u00e9", "\\ud83d\\ude00", " ", "\x7f"]
        return '"' + "".join(RNG.choice(pieces) for _ in range(RNG.randrange(6))) + '"'
    if kind == 5:
        return RNG.choice(["[]", "{}", '""', "[ ]", "{\n}"])
    if kind in (6, 7):
        return "[" + RNG.choice([",", " , ", "\t,\r\n"]).join(random_value(depth - 1) for _ in range(RNG.randrange(1, 5))) + "]"
    members = [f'"k{RNG.randrange(4)}" {RNG.choice(["", " "])}: {random_value(depth - 1)}' for _ in range(RNG.randrange(1, 4))]
    return "{" + ",".join(members) + "}"


def mutate(data):
    data = bytearray(data)
    for _ in range(RNG.randrange(1, 3)):
        at = RNG.randrange(len(data) + 1)
        action = RNG.randrange(3)
        junk = RNG.choice(list(b'{}[],:"\\u0019.eE+- \t\n\x00\x01\x1f\x80\xbf\xc0\xe0\xed\xa0\xf4\xff/tfnNI'))
        if action == 0 and at < len(data):
            del data[at]
        elif action == 1:
            data.insert(at, junk)
        elif at < len(data):
            data[at] = junk
    return bytes(data)


def random_bytes():
    pieces = [b"a", b"\"", b"\\", b"\n", b"\x00", b"\x1f", b"\x7f", "é".encode(), "漢".encode(), "😀".encode(),
              b"\x80", b"\xc0", b"\xc2", b"\xe0\x80", b"\xe2\x82", b"\xed\xa0\x80", b"\xf0\x90", b"\xf0\x9f\x98",
              b"\xf4\x90\x80\x80", b"\xf5", b"\xff", "\u2028".encode()]
    return b"".join(RNG.choice(pieces) for _ in range(RNG.randrange(1, 12)))


def shortest_float(bits):
    """Fewest digits inside the rounding interval of a float32, nearest to it among those, ties to even; exact arithmetic."""
    exact = lambda b: Fraction(struct.unpack("<f", struct.pack("<I", b))[0]) if b < 0x7F800000 else Fraction(2) ** 128
    value, below, above = exact(bits), exact(bits - 1), exact(bits + 1)
    low, high, closed = (below + value) / 2, (value + above) / 2, bits % 2 == 0
    for count in range(1, 10):
        exponent = math.floor(math.log10(value)) - count + 1
        for shift in (-1, 0, 1):  # the logarithm may be off by one
            unit = Fraction(10) ** (exponent + shift)
            near = [k for k in (value // unit, value // unit + 1) if 10 ** (count - 1) <= k <= 10**count]
            fits = [k for k in near if low < k * unit < high or (closed and k * unit in (low, high))]
            if fits:
                return f"{min(fits, key=lambda k: (abs(k * unit - value), k % 2))}e{exponent + shift}"
    raise AssertionError(bits)


def write(name, text):
    (HERE / name).write_text(text)
    (HERE / f"{name}.xz").write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def main():
    cases = []
    for _ in range(250):
        document = (RNG.choice(["", " ", "\n\t"]) + random_value(4) + RNG.choice(["", " ", "\r\n"])).encode("utf-8")
        cases.append(document if RNG.random() < 0.97 else b"\xef\xbb\xbf" + document)
    cases += [mutate(RNG.choice(cases)) for _ in range(900)]
    cases = [case for case in cases if len(case) < 300]
    write("json_cases.txt", "".join(f"{strict(case)} {case.hex()}\n" for case in cases if case))

    lines = []
    for _ in range(400):
        data = random_bytes()
        text = json.dumps(data.decode("utf-8", "replace"), ensure_ascii=False)
        lines.append(f"{data.hex()} {text.encode('utf-8').hex()}\n")
    write("json_strings.txt", "".join(lines))

    lines = []
    doubles = [struct.unpack("<d", RNG.randbytes(8))[0] for _ in range(300)]
    doubles += [2.0**e for e in range(-1074, 1024, 7)] + [RNG.random() for _ in range(100)]
    doubles += [round(RNG.uniform(-1000, 1000), RNG.randrange(6)) for _ in range(100)]
    doubles += [5e-324, 2.2250738585072014e-308, 2.225073858507201e-308, 1.7976931348623157e308, 2.0**53, 1e22, 1e23,
                9.5, 99999999999999990.0, 123456789012345680.0, 0.1 + 0.2, 2.0**-44]
    for value in doubles:
        if math.isfinite(value) and value != 0:
            lines.append(f"d {struct.pack('>d', value).hex()} {value!r}\n")
    patterns = [RNG.getrandbits(31) for _ in range(300)] + list(range(1, 40)) + [e << 23 for e in range(1, 255)]
    patterns += [struct.unpack("<I", struct.pack("<f", RNG.expovariate(0.3)))[0] for _ in range(200)]
    for bits in patterns:
        if 0 < bits < 0x7F800000:
            lines.append(f"f {bits:08x} {shortest_float(bits)}\n")
    write("numbers.txt", "".join(lines))


if __name__ == "__main__":
    main()
