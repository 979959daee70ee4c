#!/usr/bin/env bash
# Unpacks every *.xz under tests/data next to itself, keeping the .xz. Run again it does only what is missing
# or older than its .xz.
set -euo pipefail
cd "$(dirname "$0")"
find . -name '*.xz' -print0 | while IFS= read -r -d '' packed; do
    plain=${packed%.xz}
    [ -e "$plain" ] && [ ! "$packed" -nt "$plain" ] && continue
    # A temporary name first: an interrupted run leaves no half file that looks done.
    xz -dc "$packed" >"$plain.part"
    mv "$plain.part" "$plain"
done
