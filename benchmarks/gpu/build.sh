#!/usr/bin/env bash
# Builds the sources that benchmarks/gpu/sources.py packed, without a network.
#
#   build.sh SOURCES.tar.xz BUILD_FOLDER {cuda|rpc} [JOBS]
#
# BUILD_FOLDER/bin then holds libllama.so, libggml*.so, llama-bench and llama-speculative-simple.
# "cuda" compiles for the GPU that nvidia-smi names, or for CUDA_ARCH (90 is Hopper); "rpc" gives
# devices that any processor can play. Both hold the CPU backend. A rerun goes on where the last
# run stopped. CUDA_HOME names the toolkit, else it is found beside nvcc or in the usual place.
set -euo pipefail
shopt -s inherit_errexit

fail() { echo "build.sh: $*" >&2; exit 1; }
[[ $# -ge 3 ]] || fail "usage: build.sh SOURCES.tar.xz BUILD_FOLDER {cuda|rpc} [JOBS]"
archive=$(realpath "$1") kind=$3 jobs=${4:-$(nproc)}
[[ $kind == cuda || $kind == rpc ]] || fail "$kind: neither cuda nor rpc"
mkdir -p "$2"
build=$(realpath "$2")
source=$build/llama.cpp

# phase NAME COMMAND...: one line with the seconds; after a failure the log's end and no more
phase() {
    local name=$1 log=$build/$1.log begun=$SECONDS status
    shift
    set +e  # not in a condition, where bash would ignore the -e inside
    (set -e; "$@") >"$log" 2>&1
    status=$?
    set -e
    if ((status == 0)); then
        echo "$name: $((SECONDS - begun)) s"
    else
        echo "$name: failed after $((SECONDS - begun)) s, the end of $log:"
        tail -n 60 "$log"
        exit 1
    fi
}

# Files whose content stays keep their age: a changed archive rebuilds what changed and no more.
unpack() {
    local sum fresh=$source.fresh path
    sum=$(sha256sum <"$archive")
    [[ ! -f $build/unpacked || $(<"$build/unpacked") != "$sum" ]] || return 0
    rm -rf "$fresh"
    mkdir -p "$fresh"
    tar -xJf "$archive" -C "$fresh" || python3 -m tarfile -e "$archive" "$fresh"
    if [[ -d $source ]]; then
        while IFS= read -r -d '' path; do
            if cmp -s "$source/$path" "$fresh/$path"; then
                touch -r "$source/$path" "$fresh/$path"
            else
                touch "$fresh/$path"
            fi
        done < <(cd "$fresh" && find . -type f -print0)
        rm -rf "$source"
    fi
    mv "$fresh" "$source"
    echo "$sum" >"$build/unpacked"
}

find_toolkit() {
    local nvcc home
    for home in "${CUDA_HOME:-}" /usr/local/cuda; do
        [[ -n $home && -x $home/bin/nvcc ]] && { echo "$home"; return; }
    done
    nvcc=$(command -v nvcc) || fail "no nvcc: set CUDA_HOME"
    dirname "$(dirname "$(realpath "$nvcc")")"
}

# The folders of NVIDIA's wheels in the environment of python3, below which lib and include lie.
wheels() {
    python3 - <<'PY' || true
import importlib.util, pathlib
spec = importlib.util.find_spec("nvidia")
for root in (spec.submodule_search_locations or ()) if spec else ():
    for lib in sorted(pathlib.Path(root).glob("*/lib"), reverse=True):
        print(lib.parent)
PY
}

link_all() {  # link_all FOLDER FILE...: what is there already stays
    local folder=$1 file
    shift
    for file in "$@"; do
        [[ ! -e $file || -e $folder/${file##*/} ]] || ln -sfn "$file" "$folder/${file##*/}"
    done
}

# A toolkit made of wheels lacks cublas, which lies in a wheel of its own: CMake gets one folder of
# links to both. lib64 and include are folders, since links to folders would write into the toolkit.
toolkit() {
    local home farm=$build/toolkit wheel name file version
    home=$(find_toolkit)
    rm -rf "$farm"
    mkdir -p "$farm/include" "$farm/lib64" "$farm/targets/x86_64-linux"
    ln -s ../../include ../../lib64 "$farm/targets/x86_64-linux"
    ln -s lib64 "$farm/targets/x86_64-linux/lib"
    ln -s lib64 "$farm/lib"
    ln -s "$home/bin" "$farm/bin"
    [[ ! -d $home/nvvm ]] || ln -s "$home/nvvm" "$farm/nvvm"
    link_all "$farm/include" "$home"/include/* "$home"/targets/x86_64-linux/include/*
    link_all "$farm/lib64" "$home"/lib64/* "$home"/lib/* "$home"/targets/x86_64-linux/lib/*
    version=$("$farm/bin/nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
    echo "toolkit $home, CUDA $version"
    while IFS= read -r wheel; do
        # only libraries of the compiler's own generation
        [[ $wheel == */cu"$version" || ! ${wheel##*/} =~ ^cu[0-9] ]] || continue
        link_all "$farm/include" "$wheel"/include/cublas*.h
        for name in cublas cublasLt cudart; do
            file=$wheel/lib/lib$name.so.$version
            [[ ! -e $file || -e $farm/lib64/lib$name.so ]] || ln -s "$file" "$farm/lib64/lib$name.so"
        done
    done < <(wheels)
    for file in lib64/libcublas.so lib64/libcudart.so include/cublas_v2.h; do
        [[ -e $farm/$file ]] || fail "no $file in $home nor in the nvidia wheels of python3"
    done
}

architecture() {
    local found=${CUDA_ARCH:-}
    if [[ -z $found ]]; then
        found=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | sort -u | head -n 1)
        found=${found//./}
    fi
    [[ $found =~ ^[0-9]+$ ]] || fail "no compute capability from nvidia-smi: set CUDA_ARCH"
    [[ $found -ge 80 ]] || fail "compute capability $found: kernels before 80 were left out"
    echo "$found"
}

configure() {
    local options=() rpath='$ORIGIN' arch file folder runtime
    runtime=$(cxx_runtime)
    [[ -z $runtime ]] || options+=("-DCMAKE_SHARED_LINKER_FLAGS=$runtime"
        "-DCMAKE_EXE_LINKER_FLAGS=$runtime")
    if [[ $kind == cuda ]]; then
        arch=$(architecture)
        for file in cublas cublasLt cudart; do  # where they really lie, the loader may not look
            [[ -e $build/toolkit/lib64/lib$file.so ]] || continue
            folder=$(dirname "$(realpath "$build/toolkit/lib64/lib$file.so")")
            [[ ";$rpath;" == *";$folder;"* ]] || rpath+=";$folder"
        done
        options+=(-DGGML_CUDA=ON -DGGML_CUDA_NO_VMM=ON -DGGML_CUDA_NCCL=OFF -DGGML_CUDA_FA=ON
            -DGGML_CUDA_COMPRESSION_MODE=none "-DCMAKE_CUDA_ARCHITECTURES=$arch-real"
            "-DCMAKE_CUDA_COMPILER=$build/toolkit/bin/nvcc" "-DCUDAToolkit_ROOT=$build/toolkit")
    else
        options+=(-DGGML_RPC=ON -DGGML_RPC_RDMA=OFF)
    fi
    if grep -qw amx_int8 /proc/cpuinfo; then  # llama.cpp crashes on weights laid out anew for AMX
        for file in C CXX; do
            options+=("-DCMAKE_${file}_FLAGS=-mno-amx-tile -mno-amx-int8 -mno-amx-bf16")
        done
    fi
    ! command -v ninja >/dev/null || options+=(-G Ninja)
    # the version is not to be asked of a repository that the build lies in
    GIT_CEILING_DIRECTORIES=$build cmake -S "$source" -B "$build" -DCMAKE_BUILD_TYPE=Release \
        -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON -DGGML_CCACHE=OFF -DLLAMA_ALL_WARNINGS=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF \
        -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON "-DCMAKE_INSTALL_RPATH=$rpath" "${options[@]}"
}

# The libraries exchange strings, streams and exceptions. Where the compiler has its C++ runtime as an
# archive only, each library would get a part of one of its own, and a process that does not come
# with one, as Python, crashes in the first of them: the system's shared runtime is named instead.
cxx_runtime() {
    local probe=$build/probe.so shared
    echo '#include <string>
std::string f(int n) { return std::to_string(n) + "x"; }' \
        | c++ -shared -fPIC -O0 -x c++ - -o "$probe" || return 1
    if readelf -d "$probe" | grep -q 'NEEDED.*libstdc++'; then return; fi
    shared=$(/sbin/ldconfig -p | sed -n 's/.*libstdc++\.so\.6 (.*x86-64.*) => //p' | head -n 1)
    [[ -n $shared ]] || fail "the C++ compiler has no shared runtime, nor has the system"
    echo "-Wl,--push-state,--no-as-needed $shared -Wl,--pop-state"
}

compile() {
    cmake --build "$build" -j "$jobs" \
        --target ggml llama llama-bench llama-speculative-simple
}

# A kernel that was left out without a stand-in shows here, not in the middle of a measurement.
check() {
    python3 -c 'import ctypes, os, sys; ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW)' \
        "$build/bin/libllama.so"
    readelf -d "$build/bin/libllama.so" | grep 'NEEDED.*libstdc++'
    "$build/bin/llama-bench" --list-devices
}

# bash reads a script as it runs it: from here on it has read all of this one
main() {
    phase unpack unpack
    [[ $kind == rpc ]] || phase toolkit toolkit
    phase configure configure
    phase compile compile
    phase check check
    tail -n 3 "$build/check.log"
    exit
}
main
