#!/usr/bin/env bash
# Unpacks every *.xz under tests/data next to itself, keeping the .xz, and the fine-tune of the demo family.
# Run again it does only what is missing or older than its .xz.
set -euo pipefail
cd "$(dirname "$0")"
find . -name '*.xz' -print0 | while IFS= read -r -d '' packed; do
    plain=${packed%.xz}
    [ -e "$plain" ] && [ ! "$packed" -nt "$plain" ] && continue
    # A temporary name first: an interrupted run leaves no half file that looks done.
    xz -dc "$packed" >"$plain.part"
    mv "$plain.part" "$plain"
done

# Models whose weights are hashes of their names; the base is written last.
for model in arch/tp-llama arch/tp-qwen2; do
    if [ ! -e $model/model.safetensors ] || [ arch/tp_models.py -nt $model/model.safetensors ]; then python3 arch/tp_models.py; break; fi
done

# A whole fine-tune is stored as its exclusive or with the base: low bytes of all 16-bit words, then the high bytes, in xz.
base=../../demo/zen-mini tuned=../../demo/finetuned/zen-mini-coder
if [ ! -e $tuned/model.safetensors ] || [ $tuned/model.safetensors.xor.xz -nt $tuned/model.safetensors ]; then
    cp $base/tokenizer.json $base/tokenizer_config.json $base/special_tokens_map.json $tuned/
    python3 - $base/model.safetensors $tuned/model.safetensors.xor.xz $tuned/model.safetensors.part <<'PYTHON'
import lzma
import sys

base = open(sys.argv[1], "rb").read()
packed = lzma.open(sys.argv[2]).read()
words = bytearray(len(packed))
words[0::2], words[1::2] = packed[: len(packed) // 2], packed[len(packed) // 2 :]
tuned = int.from_bytes(base, "little") ^ int.from_bytes(words, "little")
open(sys.argv[3], "wb").write(tuned.to_bytes(len(base), "little"))
PYTHON
    mv $tuned/model.safetensors.part $tuned/model.safetensors
fi
