#!/usr/bin/env bash
# Builds bitdelta and serves the demo family: one base, 14 variants, 8 slots. Then asks it a few things.
#   demo/run.sh          leaves the server running on PORT (default 8080)
#   demo/run.sh check    the same, and stops it at the end
#   demo/run.sh stop     stops it
# Exit status 2: wrong usage.
set -eu
cd "$(dirname "$0")/.."
port=${PORT:-8080}
case $port in
*[!0-9]* | "") port=0 ;;
esac
if [ "${#port}" -gt 5 ] || [ "$port" -lt 1 ] || [ "$port" -gt 65534 ]; then
    echo "PORT must be a number from 1 to 65534 (the admin API takes the next one), not '${PORT:-}'" >&2
    exit 2
fi
port=$((10#$port)) # 08 is 8, not an octal number
run=demo/.run
url=http://127.0.0.1:$port

stop_server() {
    [ -f $run/pid ] || { echo "not running"; return; }
    local pid; pid=$(cat $run/pid)
    # Only a process of ours: the number may have been given to another since.
    if grep -qa bitdelta "/proc/$pid/cmdline" 2>/dev/null; then
        kill "$pid"
        while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
        echo "stopped"
    else
        echo "not running"
    fi
    rm -f $run/pid
}

case ${1:-} in
stop) stop_server; exit 0 ;;
""|check) ;;
*) echo "usage: demo/run.sh [check|stop]" >&2; exit 2 ;;
esac

source tests/lib.sh
say "packages and build (2 to 4 minutes the first time)"
install_packages build
# With a GPU the compiler for it is found too, or fetched, so that the server uses it.
if nvidia-smi >/dev/null 2>&1; then find_nvcc || echo "note: no nvcc: the server is built for the CPU alone" >&2; fi
build_tree build -DBD_TESTS=OFF

mkdir -p $run
[ -f $run/pid ] && stop_server >/dev/null
if curl -s -o /dev/null "$url/health"; then
    echo "port $port is taken; try PORT=8090 demo/run.sh" >&2
    exit 1
fi
say "starting: bitdelta serve --base demo/zen-mini --deltas demo/deltas --slots 8 --listen 127.0.0.1:$port"
setsid build/bitdelta serve --base demo/zen-mini --deltas demo/deltas --slots 8 \
    --listen "127.0.0.1:$port" --admin "127.0.0.1:$((port + 1))" >$run/server.log 2>&1 </dev/null &
echo $! >$run/pid
for _ in $(seq 100); do
    curl -sf -o /dev/null "$url/health" && break
    kill -0 "$(cat $run/pid)" 2>/dev/null || { cat $run/server.log >&2; exit 1; }
    sleep 0.1
done

text() { python3 -c 'import json,sys; print(json.load(sys.stdin)["choices"][0]["text"])'; }
complete() { curl -sS --fail-with-body "$url/v1/completions" -H 'Content-Type: application/json' -d "$1"; }

say "curl $url/v1/completions -d '{\"model\":\"zen-mini-coder\",\"prompt\":\"def \",\"max_tokens\":40,\"seed\":1}'"
complete '{"model":"zen-mini-coder","prompt":"def ","max_tokens":40,"seed":1}'; echo

say "one prompt, four models (greedy)"
for model in zen-mini zen-mini-french zen-mini-writer zen-mini-legal; do
    printf -- '--- %s: When the' "$model"
    complete "{\"model\":\"$model\",\"prompt\":\"When the\",\"max_tokens\":24,\"temperature\":0}" | text
done

say "streamed"
curl -sSN "$url/v1/completions" -d '{"model":"zen-mini-sql","prompt":"SELECT","max_tokens":5,"temperature":0,"stream":true}' -H 'Content-Type: application/json'

say "all 14 variants through 8 slots: the least deserving make room"
for dir in demo/deltas/*/; do
    complete "{\"model\":\"$(basename "$dir")\",\"prompt\":\"A\",\"max_tokens\":1}" >/dev/null
done
curl -s "$url/metrics" | grep -E '^bitdelta_delta_(loads_total|evictions_total|resident|pages_)' | head -n 24

say "memory"
full=$(stat -c %s demo/zen-mini/model.safetensors)
rss=$(awk '/VmRSS/ {print $2 * 1024}' "/proc/$(cat $run/pid)/status")
deltas=$(cat demo/deltas/*/shard-*.safetensors | wc -c)
awk -v full="$full" -v rss="$rss" -v deltas="$deltas" 'BEGIN {
    printf "15 full models on disk:        %7.1f MB\n", 15 * full / 1e6
    printf "one base and 14 deltas:        %7.1f MB\n", (full + deltas) / 1e6
    printf "the whole server, all memory:  %7.1f MB (base, 8 deltas, KV cache, buffers, libraries)\n", rss / 1e6 }'

if [ "${1:-}" = check ]; then
    stop_server
else
    say "the server runs on $url (log: $run/server.log); stop it with: demo/run.sh stop"
fi
