# Shared by tests/run.sh and demo/run.sh: packages, Python environment, builds. Sourced with the cwd at the top.
jobs=$(nproc)

say() { printf '\n== %s\n' "$*" >&2; }

build_packages="build-essential cmake ninja-build pkg-config libmicrohttpd-dev libcjson-dev liburing-dev libpcre2-dev
 libutf8proc-dev libxxhash-dev nettle-dev xz-utils curl python3 python3-venv"
test_packages="clang clang-format libcmocka-dev ccache git libclang-rt-14-dev"

# install_packages build [test]: apt-get for what is missing; needs root or sudo only then.
install_packages() {
    local wanted=$build_packages missing=""
    [ "${2:-}" = test ] && wanted="$wanted $test_packages"
    for package in $wanted; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
    done
    # Distributions number clang's runtime differently; the package is only wanted where it exists.
    [ -z "$missing" ] && return 0
    local root=""
    [ "$(id -u)" = 0 ] || root="sudo"
    $root apt-get update -qq
    local present=""
    for package in $missing; do
        if apt-cache show "$package" >/dev/null 2>&1; then present="$present $package"
        elif [ "$package" = libclang-rt-14-dev ]; then present="$present $(apt-cache depends clang | sed -n 's/.*Depends: clang-\([0-9]*\)$/libclang-rt-\1-dev/p' | head -1)"
        else echo "no package $package in this distribution" >&2; return 1; fi
    done
    echo "installing:$present" >&2
    DEBIAN_FRONTEND=noninteractive $root apt-get install -y -qq --no-install-recommends $present >/dev/null
}

# What the arm64 stage needs beside the other packages: a cross compiler and an emulator, installed; and
# Debian's arm64 libraries, unpacked into .cache/arm64 by an apt that knows no other architecture, so that
# the machine's own packages and architectures stay as they are. Says what is missing when it fails.
arm64_packages="gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static"
arm64_libraries="libc6-dev libgcc-12-dev libmicrohttpd-dev libcjson-dev liburing-dev libpcre2-dev libutf8proc-dev
 libxxhash-dev nettle-dev libcmocka-dev"
arm64_ready() {
    local dir=$PWD/.cache/arm64 missing="" package wanted options
    for package in $arm64_packages; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
    done
    if [ -n "$missing" ]; then
        local root=""; [ "$(id -u)" = 0 ] || root="sudo"
        $root apt-get update -qq
        DEBIAN_FRONTEND=noninteractive $root apt-get install -y -qq --no-install-recommends $missing >/dev/null ||
            { echo "cannot install$missing" >&2; return 1; }
    fi
    wanted=$(echo "$arm64_libraries" | sha256sum)
    [ "$(cat "$dir/wanted" 2>/dev/null)" = "$wanted" ] && return 0
    rm -rf "$dir" && mkdir -p "$dir/lists/partial" "$dir/archives/partial" && : >"$dir/status"
    options="-o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o APT::Sandbox::User= -o Debug::NoLocking=1
 -o Dir::State::lists=$dir/lists -o Dir::State::status=$dir/status -o Dir::Cache=$dir -o Dir::Cache::archives=$dir/archives"
    apt-get $options update -qq
    apt-get $options install -y -qq --no-install-recommends --download-only $arm64_libraries >/dev/null ||
        { echo "cannot download arm64 packages:" $arm64_libraries >&2; return 1; }
    for package in "$dir"/archives/*.deb; do dpkg-deb -x "$package" "$dir/root" || return 1; done
    rm -rf "$dir/lists" "$dir/archives" && echo "$wanted" >"$dir/wanted"
}

# build_arm64 DIR: the server and the unit tests that compute or read bytes, less those that would take
# minutes under emulation; what those cover the kernels' and the models' tests do too.
arm64_rooms='base|hf|tokenizer|delta|backend_cpu_(kernels|rows|step)|model_(arch|overlay|rope|vocab|weights)'
build_arm64() {
    local dir=$1 launcher="" targets
    command -v ccache >/dev/null && launcher="-DCMAKE_C_COMPILER_LAUNCHER=ccache"
    targets=$(ls tests/unit/test_*.c | sed -nE "s,.*/(test_($arm64_rooms)(_.*)?)\.c,\1,p")
    cmake -G Ninja -S . -B "$dir" --toolchain tests/arm64.cmake $launcher -DBD_WERROR=ON -DBD_CUDA=off -DCMAKE_C_FLAGS_RELWITHDEBINFO=-O1 >/dev/null &&
        ninja -C "$dir" -j "$jobs" --quiet bitdelta $targets
}

# A private environment with pinned versions, made anew when the pins change.
python_env() {
    local pins; pins=$(cat tests/requirements.txt | sha256sum)
    if [ ! -x .venv/bin/python ] || [ "$(cat .venv/pins 2>/dev/null)" != "$pins" ]; then
        rm -rf .venv && python3 -m venv .venv && .venv/bin/pip install -q --disable-pip-version-check -r tests/requirements.txt || return 1
        echo "$pins" >.venv/pins
    fi
}

# The CUDA compiler: on PATH, in the usual place, or from PyPI into .cache/cuda (about 300 MB, once).
find_nvcc() {
    if command -v nvcc >/dev/null; then export CUDACXX; CUDACXX=$(command -v nvcc); return 0; fi
    if [ -x /usr/local/cuda/bin/nvcc ]; then export CUDACXX=/usr/local/cuda/bin/nvcc; return 0; fi
    if [ ! -x .cache/cuda/bin/nvcc ]; then
        python3 -m venv .cache/cuda-venv && .cache/cuda-venv/bin/pip install -q --disable-pip-version-check --no-deps \
            nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 || return 1
        ln -sfn "$(echo "$PWD"/.cache/cuda-venv/lib/python3*/site-packages/nvidia/cu13)" .cache/cuda
        # The wheels have no lib64, which nvcc's own search path names.
        ln -sfn lib .cache/cuda/lib64
    fi
    export CUDACXX=$PWD/.cache/cuda/bin/nvcc
}

# build_tree DIR cmake-options...
build_tree() {
    local dir=$1 launcher=""; shift
    command -v ccache >/dev/null && launcher="-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache"
    cmake -G Ninja -S . -B "$dir" $launcher -DBD_WERROR=ON "$@" >/dev/null && ninja -C "$dir" -j "$jobs" --quiet
}

# check NAME command...: one test of its own, recorded as a JUnit file.
check() {
    local name=$1 start=$SECONDS; shift
    if "$@" >"$results/$name.log" 2>&1; then
        echo "ok    $name ($((SECONDS - start)) s)"
        echo "<testsuite name='$name' tests='1' failures='0' errors='0' skipped='0'/>" >"$results/$name.xml"
    else
        echo "FAIL  $name"; tail -n 30 "$results/$name.log"
        echo "<testsuite name='$name' tests='1' failures='1' errors='0' skipped='0'/>" >"$results/$name.xml"
    fi
}

# skip NAME reason...: one test that could not be tried here.
skip() {
    local name=$1; shift
    echo "skip  $name: $*"
    echo "<testsuite name='$name' tests='1' failures='0' errors='0' skipped='1'/>" >"$results/$name.xml"
}

# run_ctest DIR NAME [regex]
run_ctest() {
    local filter=(); [ -n "${3:-}" ] && filter=(-R "$3")
    ctest --test-dir "$1" -j "$jobs" --output-on-failure --no-tests=error "${filter[@]}" --output-junit "$PWD/$results/$2.xml" 2>&1 | grep -vE '^ +Start|Passed' || true
    [ -s "$results/$2.xml" ] || echo "<testsuite name='$2' tests='1' failures='1' errors='0' skipped='0'/>" >"$results/$2.xml"
}

sources_formatted() {
    local tool; tool=$(command -v clang-format-14 || command -v clang-format)
    git ls-files 'src/*.[ch]' 'include/*.h' 'tests/unit/*.[ch]' 'bench/*.c' | xargs "$tool" --dry-run -Werror
}

checkout_small() {
    local bytes; bytes=$(git ls-files -z | xargs -0 stat -c %s | awk '{s += $1} END {print s}')
    echo "$bytes bytes tracked"
    [ "$bytes" -lt $((48 << 20)) ]
}
