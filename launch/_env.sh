# shellcheck shell=bash
# Sourced by the other scripts: makes .venv once, finds mpirun, loads mpi.env.
# setup EXTRAS...   install pipeinfer with these extras unless that was done already
# MPIRUN            the launcher: PIPEINFER_MPIRUN, one on PATH, or the one in .venv

set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV="$ROOT/.venv"

say() { printf 'pipeinfer: %s\n' "$*" >&2; }

find_python() {
    local candidate
    for candidate in "${PIPEINFER_PYTHON:-}" python3.13 python3.12 python3.11 python3; do
        if [ -z "$candidate" ] || ! command -v "$candidate" >/dev/null; then continue; fi
        if "$candidate" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))'; then
            echo "$candidate"
            return
        fi
    done
    say "Python 3.11 or newer is needed (set PIPEINFER_PYTHON to name one)"
    exit 2
}

system_mpirun() {
    # A launcher that was there before our own environment.
    local found=${PIPEINFER_MPIRUN:-}
    [ -n "$found" ] || found=$(command -v mpirun || true)
    case "$found" in "$VENV"/*) found= ;; esac
    echo "$found"
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
    SYSTEM_MPIRUN=$(system_mpirun)
    [ -n "$SYSTEM_MPIRUN" ] || extras="mpi,$extras"
    wanted=$(cat "$ROOT/setup.cfg" "$ROOT/constraints.txt"; echo "$ROOT")
    stamp="$VENV/.installed-${extras//,/-}"
    if ! is_installed "$extras" "$wanted"; then
        if [ ! -x "$VENV/bin/pip" ]; then
            python=$(find_python)
            "$python" -m venv "$VENV" || {
                rm -rf "$VENV"
                say "can not make a virtual environment (Debian and Ubuntu: apt install python3-venv)"
                exit 2
            }
        fi
        if ! command -v c++ >/dev/null && ! command -v g++ >/dev/null; then
            say "a C++ compiler is needed to build llama.cpp (Debian and Ubuntu: apt install g++)"
            exit 2
        fi
        say "installing into .venv; llama.cpp is compiled once, which takes some minutes"
        "$VENV/bin/python" -m pip install --quiet --upgrade pip
        "$VENV/bin/python" -m pip install --quiet --constraint "$ROOT/constraints.txt" \
            --editable "${ROOT}[$extras]" 2>"$VENV/install.log" || {
            cat "$VENV/install.log" >&2
            exit 1
        }
        printf '%s\n' "$wanted" >"$stamp"
    fi
    export PATH="$VENV/bin:$PATH"
    MPIRUN=${SYSTEM_MPIRUN:-$VENV/bin/mpirun}
    [ -z "$SYSTEM_MPIRUN" ] || use_system_library
    load_mpi_env
}

use_system_library() {
    # mpi4py must load the library that belongs to the launcher, not one that pip installed.
    local prefix library
    prefix=$(dirname "$(dirname "$(readlink -f "$SYSTEM_MPIRUN")")")
    for library in "$prefix"/lib/libmpi.so.[0-9]* "$prefix"/lib64/libmpi.so.[0-9]* \
        "$prefix"/lib/*/libmpich.so.[0-9]* "$prefix"/lib/*/libmpi.so.[0-9]*; do
        if [ -e "$library" ] && [ -z "${MPI4PY_LIBMPI:-}" ]; then
            export MPI4PY_LIBMPI=$library
        fi
    done
}

load_mpi_env() {
    # Values that are already set win.
    local line name
    while IFS= read -r line; do
        case "$line" in ''|\#*) continue ;; esac
        name=${line%%=*}
        [ -n "${!name+x}" ] || export "${line?}"
    done <"$ROOT/launch/mpi.env"
}

spool_stdin() {
    # mpirun of Open MPI 5.0 does not return after forwarding a pipe, and damages input over 64 KB:
    # for `-f -` standard input goes into a file first. Sets ARGS.
    local last=
    ARGS=()
    for argument in "$@"; do
        case "$last $argument" in
            "-f -" | "--file -" | *" --file=-" | *" -f-")
                SPOOL=$(mktemp)
                trap 'rm -f "$SPOOL"' EXIT
                cat >"$SPOOL"
                argument=${argument%-}$SPOOL
                ;;
        esac
        ARGS+=("$argument")
        last=$argument
    done
}

run_mpi() {
    # mpirun that survives Ctrl-C long enough for a goodbye: it runs in a session of its own, the
    # first Ctrl-C or SIGTERM asks rank 0 to finish its token, or to take no more requests and let
    # the running ones end (SIGUSR1); the second ends the job.
    local job status count=0
    if [ -t 2 ]; then
        PIPEINFER_TERMINAL="$(uname -n):$(readlink -f /proc/self/fd/2)"
        export PIPEINFER_TERMINAL
    fi
    setsid "$MPIRUN" "$@" </dev/null &
    job=$!
    trap 'count=$((count + 1)); if [ $count -eq 1 ]; then kill -USR1 $job; else kill -TERM $job; fi' INT TERM
    trap 'kill -TERM $job' HUP
    while true; do
        wait "$job" && status=0 || status=$?
        kill -0 "$job" 2>/dev/null || break
    done
    trap - INT TERM HUP
    return "$status"
}

need_launcher() {
    # Whether $MPIRUN is of the kind named $1; $2 is the script for the other kind.
    case "$("$MPIRUN" --version 2>&1 || true)" in
        *"$1"*) ;;
        *)
            say "$MPIRUN is not of the kind that this script drives ($1): use $2, or name the" \
                "launcher with PIPEINFER_MPIRUN"
            exit 2
            ;;
    esac
}

prepare_hosts() {
    # Ask the hosts of hostfile $1 for $2 ranks; HOSTS becomes a hostfile for launcher kind $3,
    # NETWORK the one network of this host that leads to all of them.
    local found beside
    HOSTS=$(mktemp)
    trap 'rm -f "$HOSTS"' EXIT
    found=$(python -m pipeinfer.reach "$1" "$2" "$3" "$HOSTS") || exit $?
    # shellcheck disable=SC2034  # NETWORK is for launch/ssh
    { read -r beside || true; read -r NETWORK || true; } <<<"$found"
    if [ -n "$beside" ] && [ -z "${PIPEINFER_NODES:-}" ]; then
        export PIPEINFER_NODES=$beside
    fi
}

names_to_pass() {
    # Variables that every rank needs: PATH, ours, and the settings of the MPI library.
    local name
    for name in $(compgen -e); do
        case "$name" in
            PIPEINFER_SSH_ARGS | PIPEINFER_MPIRUN*) ;;
            PATH | PYTHONPATH | LD_LIBRARY_PATH | MPI4PY_* | OMP_NUM_THREADS | PIPEINFER_* | OMPI_MCA_*)
                echo "$name" ;;
        esac
    done
}
