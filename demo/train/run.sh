#!/bin/sh
# Makes the demo family again: WORK is a scratch folder, OUT gets the family. Two steps need no GPU (1, 5), the others one.
# Training on a GPU is not deterministic to the bit, and package versions move: a rerun gives another family of the same kind.
set -e
WORK=${1:?scratch folder} OUT=${2:?family folder}
cd "$(dirname "$0")"
VARIANTS="coder c shell sql math writer legal astro french german spanish russian config lexicon"

# 1. text
python3 corpus.py fetch "$WORK"
python3 corpus.py build "$WORK" "$WORK/corpus"
python3 exercises.py "$WORK/corpus" 12000000 120000
python3 split_heldout.py "$WORK/corpus/heldout" "$WORK"             # -> $WORK/heldout, $WORK/dev

# 2. tokenizer and token ids
python3 make_tokenizer.py "$WORK/corpus" "$OUT/zen-mini"
python3 tokenise.py "$WORK/corpus" "$OUT/zen-mini" "$WORK/ids"

# 3. base: 480 seconds of one H200
python3 train_base.py "$WORK/ids" "$WORK/heldout" "$OUT/zen-mini" "$OUT/zen-mini" 480 12922

# 4. fine-tunes of all parameters
python3 finetune.py "$OUT/zen-mini" "$WORK/ids" "$WORK/heldout" "$WORK/dev" "$WORK/tuned"

# 5. deltas; three fine-tunes are kept whole
for v in $VARIANTS; do
    python3 ../../tests/data/reference_encoder.py encode "$OUT/zen-mini" "$WORK/tuned/zen-mini-$v" "$OUT/deltas/zen-mini-$v" \
        --base-name zen-mini --variant "zen-mini-$v"
done
for v in coder math french; do
    mkdir -p "$OUT/finetuned" && cp -r "$WORK/tuned/zen-mini-$v" "$OUT/finetuned/" && cp "$OUT"/zen-mini/*token* "$OUT/finetuned/zen-mini-$v/"
done
cp -r "$WORK/heldout" "$OUT/"

# 6. golden outputs
python3 goldens.py "$OUT" "$WORK/heldout" "$OUT/golden"
cp "$WORK/tuned/losses.json" "$OUT/golden/"
