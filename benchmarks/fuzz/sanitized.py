"""The fuzzers against llama.cpp and pipeinfer's own C built with AddressSanitizer and
UndefinedBehaviorSanitizer: reads and writes past an array that hit mapped memory end a case, too.

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36
    python -m benchmarks.fuzz.sanitized build llama_cpp_python-0.3.36.tar.gz FOLDER
    python -m benchmarks.fuzz.sanitized run FOLDER -- --kind gguf --kind frames --cases 5000
    python -m benchmarks.fuzz.sanitized test FOLDER

`build` takes about half an hour on two cores, and a gigabyte. `run` hands what follows -- to
`python -m benchmarks.fuzz`; `test` runs the tests of the own C part, or those that are named. Both
work on a copy of this checkout in FOLDER, print what the sanitizers said, by place, and end with 1
if they said anything. Linux with gcc, cmake, ninja and git; not in CI.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g")
_OPTIONS = ("LLAMA_SANITIZE_ADDRESS", "LLAMA_SANITIZE_UNDEFINED", "GGML_SANITIZE_ADDRESS",
            "GGML_SANITIZE_UNDEFINED", "BUILD_SHARED_LIBS")
#: libgomp is not built with a sanitizer, and nothing but the libraries is wanted
_WITHOUT = ("GGML_OPENMP", "LLAMA_BUILD_COMMON", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_TOOLS",
            "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_SERVER", "LLAMA_BUILD_APP", "LLAMA_OPENSSL")
_CORPUS = Path("benchmarks/fuzz/corpus")
_OWN_C = Path("pipeinfer/llama/kernels")
#: library -> its sources
_PARTS = {"_layer_filter": ("layer_filter.c", "sums.c", "spin.c"),
          "_short_runs": ("short_*.c", "products_*.c", "floats_*.c", "repacked_*.c",
                          "huge_pages.c")}
_OWN_TESTS = ("tests/backends/test_team.py", "tests/backends/test_eval_callback.py")
_SECONDS = "60"  #: that one case may take; a build like this is many times slower


@click.group()
def main() -> None:
    """Fuzz builds with sanitizers."""


@main.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--jobs", default=2, show_default=True)
def build(source: Path, folder: Path, jobs: int) -> None:
    """Build llama.cpp from llama-cpp-python's source package (or its folder) into FOLDER."""
    folder.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
        source = next(folder.glob("llama_cpp_python-*/"))
    made = folder / "llama"
    settings = [f"-D{name}=ON" for name in _OPTIONS] + [f"-D{name}=OFF" for name in _WITHOUT]
    settings += [f"-DCMAKE_{one}_FLAGS_RELWITHDEBINFO=-O1 -g1 -DNDEBUG" for one in ("C", "CXX")]
    subprocess.run(["cmake", "-G", "Ninja", "-S", source / "vendor" / "llama.cpp", "-B", made,
                    "-DCMAKE_BUILD_TYPE=RelWithDebInfo", *settings], check=True)
    subprocess.run(["nice", "ninja", "-C", made, "-j", str(jobs), "llama"], check=True)


@main.command()
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def run(folder: Path, words: tuple[str, ...]) -> None:
    """Run the fuzzers; what failed is kept in FOLDER/failing, of earlier runs as well."""
    code = _watched(folder, ["-m", "benchmarks.fuzz", "--seconds", _SECONDS, *words])
    for path in keep_failing(folder / "tree" / _CORPUS, ROOT / _CORPUS, folder / "failing"):
        click.echo(f"failed: {path}")
    sys.exit(code)


def keep_failing(corpus: Path, known: Path, folder: Path) -> list[Path]:
    """Copy what the corpus has beyond the known one: the tree that it lies in is made anew by the
    next run."""
    kept = []
    for path in sorted(corpus.rglob("*")):
        name = path.relative_to(corpus)
        if path.is_file() and not (known / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            kept.append(Path(shutil.copy(path, folder / name)))
    return kept


@main.command("test")
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def tests(folder: Path, words: tuple[str, ...]) -> None:
    """Run the tests of the own C part, or others."""
    sys.exit(_watched(folder, ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--capture=no",
                               *(words or _OWN_TESTS)]))


def _watched(folder: Path, words: list[str]) -> int:
    """Run Python in the copy; print what the sanitizers said; its exit code, or 1."""
    folder = folder.resolve()
    tree, logs = _copy(folder), folder / "reports"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir()
    with (logs / "stderr").open("wb") as said:  # where UndefinedBehaviorSanitizer speaks
        code = subprocess.run([sys.executable, *words], cwd=tree, check=False, stderr=said,
                              env=environment(folder, tree, logs)).returncode
    found = Counter(place for path in logs.iterdir()
                    for place in places(path.read_text(errors="replace")))
    click.echo(f"the sanitizers said something at {len(found)} places; whole reports: {logs}")
    for place, count in found.most_common():
        click.echo(f"{count:6}  {place}")
    return code or int(bool(found))


def _copy(folder: Path) -> Path:
    """This checkout as git knows it, with the C part compiled beside its Python."""
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    for name in filter(None, names.stdout.decode().split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    own = tree / _OWN_C
    for name, sources in _PARTS.items():
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", *FLAGS,
                        *(file for source in sources for file in own.glob(source)),
                        "-o", own / f"{name}.abi3.so"], check=True)
    return tree


def environment(folder: Path, tree: Path, logs: Path) -> dict[str, str]:
    """For a Python in which both libraries can be loaded. Leaks are not looked for: Python keeps
    much until its end. An allocation without bound fails as without a sanitizer."""
    # libstdc++ as well: exceptions are looked up when the sanitizer starts
    preload = [subprocess.run(["gcc", f"-print-file-name={name}"], check=True, capture_output=True,
                              text=True).stdout.strip() for name in ("libasan.so", "libstdc++.so")]
    built = next((folder / "llama").rglob("libllama.so"), None)
    if built is None:
        raise click.UsageError(f"{folder} has no library: run build first")
    return {**os.environ, "LD_PRELOAD": " ".join(preload),
            "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'benchmarks' / 'lab'}",
            "FUZZ_STDERR": "1", "GGML_NO_BACKTRACE": "1",  # which would wait for a debugger
            "PIPEINFER_LLAMA_LIBRARY": str(built.resolve()),
            "ASAN_OPTIONS": f"log_path={logs}/report:detect_leaks=0:allocator_may_return_null=1"}


def places(report: str) -> list[str]:
    """What a report says, each in a line that is the same for the same defect."""
    found = re.findall(r"^(\S+?:\d+):\d+: runtime error: (.+)$", report, re.MULTILINE)
    said = [f"{_short(place)}: {_same(what)}" for place, what in found]
    for part in report.split("ERROR: AddressSanitizer: ")[1:]:
        kind = part.split(maxsplit=1)[0]
        frames = re.findall(r"#\d+ 0x[0-9a-f]+ in (.+?) (/\S+?:\d+)", part)
        where = next((f"{_short(place)} {name}" for name, place in frames
                      if "/gcc/" not in place and "libsanitizer" not in place), "unknown place")
        said.append(f"{where}: {kind}")
    return said


def _short(place: str) -> str:
    return "/".join(place.rsplit("/", 2)[-2:])


def _same(what: str) -> str:
    return re.sub(r"0x[0-9a-f]+|-?\d[\d.e+]*", "N", what)


if __name__ == "__main__":
    main()
