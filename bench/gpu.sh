#!/usr/bin/env bash
# Everything that needs a GPU, on a machine that has one, in stages that each run alone.
#
#   bench/gpu.sh [STAGE...]       no stage: all of them, in this order
#   bench/gpu.sh pack FILE        strips what the stages run and packs it with its libraries, for a machine that builds nothing
#   bench/gpu.sh unpack FILE      there: into $BUILD; of the libraries those that it lacks
#
#   stage       minutes  what
#   tests          4     every tests/gpu program: kernels against float64, models, attention, sampling
#   sanitizers     5     memcheck and racecheck over the small cases of the same
#   choices        6     every choice of kernel for the linears of Llama-3.1-8B, beside what is chosen now and cuBLASLt
#   linear         5     the linears as they are chosen, all shapes and rows
#   model          4     whole steps of a model of 8B size, bf16 and fp16
#   serving        8     a server over the demo's models and over files of the 8B shape: time to first token and between tokens, of the base
#                        and of variants in turn, and of a cold variant
#   goldens        3     the goldens of transformers, bf16 and fp16
#   attention      3     attention beside PyTorch's
#   torch          3     the base in PyTorch (transformers, torch.compile) beside whole steps of ours, bf16
#   ncu            2     bytes a kernel moves, where the profiler may read the counters
#   loads          2     deltas into the GPU from host memory, page cache and disk, beside plain copies and reads; what loads cost others
#   ranks          5     ranks on several GPUs: their sums, and models split over them; with one GPU the ranks share it and NCCL is left out
#   comm           2     how fast the ranks' sums of a decode step are beside NCCL's; with one GPU it is skipped
#   model_ranks    3     whole steps of models of 8B size, on one GPU and on two, and of 70B size on two: what the sums of the ranks
#                        take of a step, by NCCL too, and the memory beside the plan's; with one GPU the first alone
#   split          2     8B shape from files on two GPUs, on one and in float32 on the CPU: how far apart the logits are
#   split_files    4     16 layers of the 70B shape from files on two GPUs: memory beside the plan's, cold loads beside raw reads of
#                        the same files, what loads cost others, logits beside one GPU's; with one GPU it and split are skipped
#   serving_ranks  2     a server split over two GPUs beside one GPU and the goldens: tokens of all variants, shards that are missing, ends
#
# Environment: BUILD (default build; a build with BD_CUDA=on and BD_BENCH=on), OUT (default bench/results/gpu-<name>), COMMIT
# (default: what was packed, else git's). A stage writes OUT/<stage>.txt, or .csv with the full figures, and prints a summary when it ends, short enough for
# a terminal that keeps little. Files name the command, the GPU, the driver and the commit. Exit status 1 if anything failed.
#
# On a machine with prebuilt binaries, where a command may take ten minutes:
#   where it is built:  cmake -G Ninja -S . -B build -DBD_CUDA=on -DBD_BENCH=ON -DCMAKE_CUDA_ARCHITECTURES=90a-real
#                       ninja -C build && bench/gpu.sh pack build/gpu.tar.xz
#   1.  bench/gpu.sh unpack gpu.tar.xz && bench/gpu.sh tests choices
#   2.  bench/gpu.sh sanitizers ncu
#   3.  bench/gpu.sh model serving
#   4.  tests/data/unpack.sh && bench/gpu.sh linear goldens, for tables to be kept
#   5.  bench/gpu.sh attention torch loads, the first two with PyTorch
# and with two GPUs or more (tests/gpu/test_gpu_tp.c says what is looked at):
#   1.  tests/data/unpack.sh && bench/gpu.sh unpack gpu.tar.xz && bench/gpu.sh ranks comm
#   2.  bench/gpu.sh model_ranks split
#   3.  bench/gpu.sh split_files serving_ranks
set -u
cd "$(dirname "$0")/.." || exit 1
build=${BUILD:-build}
stages=(tests sanitizers choices linear model serving goldens attention torch ncu loads ranks comm model_ranks split split_files serving_ranks)
programs=(bitdelta bench_gpu_linear bench_gpu_model bench_gpu_attention bench_gpu_comm bench_gpu_loads bench_gpu_split)

if [[ ${1:-} == pack ]]; then
    folder=$(mktemp -d) && mkdir "$folder/tests" || exit 1
    for program in "${programs[@]}" $(cd "$build" && ls tests/test_gpu_* | grep -v '\.'); do
        strip -o "$folder/$program" "$build/$program" || exit 1
    done
    mkdir "$folder/lib"
    (cd "$build" && ldd bitdelta tests/test_gpu_tp) | awk '/=> \// { print $3 }' | sort -u |
        grep -vE '/(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s)\.so' | xargs cp -Lt "$folder/lib"
    git rev-parse --short HEAD >"$folder/commit"
    XZ_OPT='-6 --lzma2=dict=64MiB' tar -C "$folder" -cJf "${2:?FILE}" . && ls -l "$2"
    rm -r "$folder"
    exit
elif [[ ${1:-} == unpack ]]; then
    mkdir -p "$build" && tar -C "$build" -xJf "${2:?FILE}" || exit 1
    there=$(ldconfig -p)
    for library in "$build"/lib/*; do [[ $there != *"${library##*/} "* ]] || rm "$library"; done
    exit
fi

# cuBLAS, where the loader does not find it by itself
if [[ $(ldd "$build/bench_gpu_linear" 2>/dev/null) == *"libcublasLt"*"not found"* ]]; then
    cublas=$(find /usr/local /opt /usr/lib -name 'libcublasLt.so.1[3-9]' 2>/dev/null | head -n 1)
    export LD_LIBRARY_PATH=$(dirname "$cublas")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
[[ -d $build/lib ]] && export LD_LIBRARY_PATH=$(realpath "$build/lib")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1)
[[ $gpu ]] || { echo "no GPU answers" >&2; exit 1; }
name=${gpu%%,*}
out=${OUT:-bench/results/gpu-${name// /-}}
mkdir -p "$out" || exit 1
commit=${COMMIT:-$(cat "$build/commit" 2>/dev/null || git rev-parse --short HEAD 2>/dev/null || echo unknown)}
failed=0
summary=()

say() { summary+=("$1"); }
head_lines() { printf '# %s\n# one %s, commit %s, %s\n' "$*" "$gpu" "$commit" "$(date -u +%F)"; }
# keep FILE SECONDS COMMAND...: its output, with a head, at the end of OUT/FILE; of a .csv without what goes to stderr, which goes to
# OUT/FILE's .log. Says how it ended.
keep() {
    local file=$out/$1 limit=$2 log=/dev/stdout begin=$SECONDS status
    shift 2
    [[ $file == *.csv ]] && log=${file%.csv}.log
    { head_lines "$@"; timeout "$limit" "$@" 2>>"$log"; } >>"$file"
    status=$?
    if ((status == 0)); then
        say "  ok      $((SECONDS - begin)) s  $(short "$@")"
    elif ((status == 77)); then
        say "  skipped $(short "$@")"
    else
        failed=1
        say "  FAILED  ($status) $((SECONDS - begin)) s  $(short "$@")"
        while read -r line; do say "      $line"; done < <(tail -n 400 "$file" | grep -aE 'ERROR|error|FAILED|fault' | cut -c1-300 | tail -n 12)
    fi
    return $status
}
short() { local text=$*; text=${text//$build\//}; echo "${text:0:140}"; }
find_sanitizer() { command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null; }

stage_tests() {
    local test kernels
    for test in "$build"/tests/test_gpu_*; do
        [[ -x $test && $test != *.* && $test != *_ranks && $test != *_tp && $test != *_fast ]] && keep tests.txt 150 "$test"
    done
    for kernels in gemm decode lean rows; do # each by itself, so that one that hangs hides no other
        keep tests.txt 60 env BD_GPU_KERNELS=$kernels "$build/tests/test_gpu_fast"
    done
}
stage_sanitizers() {
    local tool what sanitizer
    sanitizer=$(find_sanitizer) || { say "  skipped: compute-sanitizer is not here"; return; }
    export BD_GPU_SMALL=1
    # racecheck knows no copies by the async engine: of the kernels that wait on those, memcheck alone.
    for what in gemm,decode lean rows; do
        keep sanitizers.txt 60 env BD_GPU_KERNELS=$what "$sanitizer" --tool memcheck --error-exitcode 9 "$build/tests/test_gpu_fast" 1
    done
    for what in sampling attention lora; do
        for tool in memcheck racecheck; do
            keep sanitizers.txt 50 "$sanitizer" --tool $tool --error-exitcode 9 "$build/tests/test_gpu_$what" 1
        done
    done
    unset BD_GPU_SMALL
}
stage_choices() {
    BENCH_CHOICES=1 keep choices.csv 300 "$build/bench_gpu_linear" 3 8B 1,8,12,16,24,32,64,128,256,512,1024 1,2,8,14
    while read -r line; do say "    $line"; done < <(grep -a ': base' "$out/choices.log" | cut -c1-200)
}
stage_linear() { keep linear.csv 300 "$build/bench_gpu_linear" 5 && layers linear.csv; }
layers() { # CSV: its lines "layer", shortened
    while read -r line; do say "    $line"; done < <(awk -F, '$2 == "layer" { printf "%s rows %s variants %s: %s us, ratio %s (bound %s)\n", $1, $3, $4, $6, $7, $8 }' "$out/$1" | head -n 60)
}
stage_model() {
    local dtype
    for dtype in bf16 fp16; do keep model.csv 100 "$build/bench_gpu_model" 8b $dtype; done
    steps model.csv
}
# steps CSV: a line a step: model/GPUs, what, batch, context, variants: us, tokens/s; of several GPUs how much faster than one, all
# sums by NCCL, what the sums take of a step
steps() {
    while read -r line; do say "    $line"; done < <(awk -F, '$1 == "decode" || $1 == "sampled" || $1 == "prefill" || $1 == "mixed" {
        key = $1 FS $2 FS $3 FS $5 FS $6 FS $7
        if ($4 == 1 && !(key in one)) one[key] = $8
        printf "%s/%s %s %s b%s c%s v%s: %s us %d/s", $2, $4, $3, substr($1, 1, 3), $5, $6, $7, $8, $9
        if ($4 > 1 && key in one) printf " x%.2f", one[key] / $8
        if ($12 > 0) printf " nccl %s sums %.1f%%", $11, 100 * $13
        printf " host %s\n", $14 }' "$out/$1" | cut -c1-110 | head -n 72)
}
stage_serving() { # 26 GB on a disk, of which $TMPDIR says where
    local disk
    find_nccl
    keep serving.txt 120 env ROUNDS=3 python3 bench/gpu_serving.py "$build/bitdelta"
    disk=$(mktemp -d)
    keep serving.8b.txt 60 "$build/bench_gpu_split" 8b 32 files "$disk" --deltas 10
    cp demo/zen-mini/tokenizer*.json demo/zen-mini/generation_config.json "$disk/base/"
    keep serving.8b.txt 150 env ROUNDS=3 python3 bench/gpu_serving.py "$build/bitdelta" "$disk/base" "$disk/deltas"
    keep serving.8b.txt 120 env ROUNDS=2 SERVE="--max-batch-tokens 2048" python3 bench/gpu_serving.py "$build/bitdelta" "$disk/base" "$disk/deltas"
    rm -rf "$disk"
    while read -r line; do say "    $line"; done < <(grep -ahv '^#' "$out/serving.txt" "$out/serving.8b.txt" | cut -c1-240 | tail -n 64)
}
stage_goldens() {
    local dtype
    for dtype in bf16 fp16; do
        keep goldens.txt 180 python3 tests/gpu/check_goldens.py "$build/bitdelta" --dtype $dtype
        say "    $(tail -n 1 "$out/goldens.txt")"
    done
}
stage_attention() {
    if python3 -c 'import torch' 2>/dev/null; then
        keep attention.txt 180 python3 bench/gpu_attention.py "$build/bench_gpu_attention" "$out/attention.csv"
    else
        keep attention.txt 180 "$build/bench_gpu_attention"
    fi
}
stage_torch() { # what PyTorch does not get to within its time is named in torch.log
    keep torch.csv 60 "$build/bench_gpu_model" 8b bf16
    python3 -c 'import torch' 2>/dev/null || { say "  skipped: no PyTorch"; return; }
    keep torch.csv 95 python3 bench/gpu_torch.py --seconds 78
    while read -r line; do say "    $line"; done < <(grep -aE '^(decode|prefill),' "$out/torch.csv" | cut -c1-90 | head -n 48
        grep -aE 'skipped|not done|Error|relative L2|^torch|^transformers [0-9]' "$out/torch.log" | cut -c1-200 | head -n 12)
}
stage_ncu() {
    local ncu
    ncu=$(command -v ncu || ls /usr/local/cuda/bin/ncu 2>/dev/null) || { say "  skipped: ncu is not here"; return; }
    keep ncu.txt 110 "$ncu" --clock-control none --csv --kernel-name-base mangled --kernel-id '::regex:decode_k|lean_k|prefill_k|rows_k:2' \
        --metrics dram__bytes_read.sum,dram__bytes_write.sum,gpu__time_duration.sum,sm__throughput.avg.pct_of_peak_sustained_elapsed \
        env BENCH_CHOICES=1 "$build/bench_gpu_linear" 1 8B 16,64,512 1,8
    while read -r line; do say "    $line"; done < <(grep -a dram__bytes_read "$out/ncu.txt" | grep -oE '(decode|lean|prefill|rows)_kernel[A-Za-z0-9_]*|"[a-zA-Z]*byte","[0-9.,]*"' | paste - - | head -n 30)
}
stage_loads() { # about 5 GB on a disk, of which $TMPDIR says where, and 5 GB of memory
    local disk memory
    disk=$(mktemp -d) memory=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
    keep loads.txt 60 "$build/tests/test_gpu_loads"
    keep loads.csv 145 "$build/bench_gpu_loads" 8b cuda "$disk" "$memory"
    rm -rf "$disk" "$memory"
    while read -r line; do say "    $line"; done < <(grep -av '^t=' "$out/loads.log" | cut -c1-230 | tail -n 24)
}

# NCCL is taken from where the loader looks, else from PyTorch's packages.
find_nccl() {
    local folder
    ldconfig -p | grep -q 'libnccl\.so\.2' && return
    folder=$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0] + "/lib")' 2>/dev/null) &&
        export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
}
stage_ranks() {
    local what
    find_nccl
    say "    $(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l) GPUs"
    for what in repack ranks tp; do keep ranks.txt 250 "$build/tests/test_gpu_$what"; done
    while read -r line; do say "    $line"; done < <(grep -aE 'skipped|logits L2|over after|gave up|ended after' "$out/ranks.txt" | cut -c1-120 | head -n 60)
}
stage_comm() {
    find_nccl
    keep comm.csv 150 "$build/bench_gpu_comm"
    while read -r line; do say "    $line"; done < <(grep -av '^# one' "$out/comm.csv" | tail -n 50 | cut -c1-120)
}
stage_model_ranks() {
    find_nccl
    keep model_ranks.csv 45 "$build/bench_gpu_model" 8b bf16 1
    keep model_ranks.csv 45 "$build/bench_gpu_model" 8b bf16 2
    keep model_ranks.csv 85 "$build/bench_gpu_model" 70b bf16 2
    steps model_ranks.csv
    while read -r line; do say "    $line"; done < <(grep -a '^# rank 0' "$out/model_ranks.csv" | sed 's/, of which.*//' | cut -c1-200)
}
# About 18 GB and 44 GB on a disk, of which $TMPDIR says where; SPLIT="--cached 0": the base past the page cache.
run_split() { # FILE SECONDS ARGUMENTS...
    local disk file=$1 limit=$2
    shift 2
    find_nccl
    disk=$(mktemp -d)
    keep "$file.csv" "$limit" "$build/bench_gpu_split" "${@:1:2}" cuda "$disk" "${@:3}" ${SPLIT:---cached 1}
    rm -rf "$disk"
    while read -r line; do say "    $line"; done < <(grep -avE '^(# one|load,|ends,|hot,|same,pair)' "$out/$file.csv" | cut -c1-230 | tail -n 30
        grep -av '^t=' "$out/$file.log" | cut -c1-160 | tail -n 12)
}
stage_split() { run_split split 120 8b 32 --deltas 2 --float32 1; }
stage_split_files() { run_split split_files 240 70b 16 --loads 1 --rounds 15 --float32 1; }
stage_serving_ranks() {
    find_nccl
    if (($(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l) < 2)); then say "  skipped: one GPU"; return; fi
    keep serving_ranks.txt 150 python3 tests/gpu/check_ranks.py "$build/bitdelta"
    while read -r line; do say "    $line"; done < <(grep -av '^#' "$out/serving_ranks.txt" | cut -c1-300 | tail -n 40)
}

(($#)) || set -- "${stages[@]}"
for stage; do
    declare -F "stage_$stage" >/dev/null || { echo "no such stage: $stage (there are: ${stages[*]})" >&2; exit 2; }
done
for stage; do
    say "$stage"
    rm -f "$out/$stage."*
    "stage_$stage"
    printf '%s\n' "${summary[@]}" | head -c 5500 # at once: a command that is stopped at its limit has said what it knows
    summary=()
done
exit $failed
