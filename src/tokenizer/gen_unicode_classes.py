#!/usr/bin/env python3
"""Writes unicode_classes.inc: a two-stage table of the classes L, N and White_Space of every code point.

usage: gen_unicode_classes.py tests/data/unicode-classes.json > src/tokenizer/unicode_classes.inc

The input holds inclusive code point ranges read off the reference implementation's regex engine
(Unicode 16), so the table does not depend on the Unicode version of any library linked here.
"""
import json
import sys

BLOCK = 128
CLASSES = (("L", 1), ("N", 2), ("White_Space", 4))  # bits as in unicode.h


def rows(values, per_line):
    for at in range(0, len(values), per_line):
        yield "    " + ",".join(str(v) for v in values[at : at + per_line]) + ","


def main():
    with open(sys.argv[1], encoding="ascii") as file:
        ranges = json.load(file)
    table = bytearray(0x110000)
    for name, bit in CLASSES:
        for first, last in ranges[name]:
            for code_point in range(first, last + 1):
                table[code_point] |= bit
    blocks, index = [], []
    seen = {}
    for at in range(0, len(table), BLOCK):
        block = bytes(table[at : at + BLOCK])
        if block not in seen:
            seen[block] = len(blocks)
            blocks.append(block)
        index.append(seen[block])
    assert len(blocks) <= 256
    print("/* Made by gen_unicode_classes.py from tests/data/unicode-classes.json; do not edit. */")
    print(f"static const uint8_t class_block_of[{len(index)}] = {{")
    print("\n".join(rows(index, 40)))
    print("};")
    print(f"static const uint8_t class_blocks[{len(blocks)}][{BLOCK}] = {{")
    for block in blocks:
        print("    {" + ",".join(str(v) for v in block) + "},")
    print("};")


main()
