"""Packs llama.cpp's sources for a machine that has a GPU, no network and little time.

    python -m benchmarks.gpu.sources OUT.tar.xz

The sources are those of the llama-cpp-python that the project pins. Only what `build.sh` builds is
taken: ggml with its CPU, CUDA and RPC parts, libllama, llama-bench and llama-speculative-simple.
Of the CUDA part the kernels that our models never reach are cut, since nvcc takes an hour for all
of them. Our models are llama-like, dense, with heads of 64 or 128 and weights as in `WEIGHTS`.

Whatever was cut aborts with a message that names it; nothing falls back to something slower in
silence, but for weights in F32 and BF16, which take cuBLAS. left-out.txt in the archive lists it.

Each cut is an edit of text that has to find what it expects: other sources than those the edits
were written for raise ValueError.
"""

from __future__ import annotations

import io
import re
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.peers.programs import PACKAGE, fetch

#: types of weights that CUDA's matrix kernels are compiled for, besides F16; Q5_0 stands for Q4_K
#: where rows are no multiple of 256, as in SmolLM2 135M
WEIGHTS = ("Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q6_K")
#: head sizes that flash attention is compiled for
HEADS = (64, 128)
#: K-V types that flash attention's vector kernel is compiled for
CACHES = ("f16-f16", "q8_0-q8_0")

_CUDA = "ggml/src/ggml-cuda"
_KEPT = re.compile(r"""
      (CMakeLists\.txt | LICENSE)
    | (cmake | include | common | src)/.*
    | ggml/(CMakeLists\.txt | cmake/.* | include/.*)
    | ggml/src/[^/]+
    | ggml/src/ggml-cpu/([^/]+ | cmake/.* | amx/.* | llamafile/.* | tiled/.* | arch/(x86|arm)/.*)
    | ggml/src/ggml-rpc/.*
    | ggml/src/ggml-cuda/([^/]+ | template-instances/.*\.cu | vendors/cuda\.h)
    | vendor/(CMakeLists\.txt | (cpp-httplib | nlohmann | sheredom)/.*)
    | tools/llama-bench/.* | examples/speculative-simple/.*
    """, re.VERBOSE)
_LEFT = re.compile(r".*\.(md|py|swift|in\.json)$")

#: CUDA files whose operations no llama-like model has; each function becomes one that aborts
_UNUSED = """
    add-id allreduce col2im-1d conv-transpose-1d conv2d conv2d-dw conv2d-transpose conv3d
    count-equal cross-entropy-loss diag dsv4-hc gated_delta_net gla im2col lightning-indexer mmid
    moe-weighted-reduction opt-step-adamw opt-step-sgd out-prod pad_reflect_1d pool1d pool2d roll
    snake solve_tri ssm-conv ssm-scan topk-moe tri tsembd upscale wkv
""".split()
#: functions among these that only ask: they answer no instead of aborting
_ASKING = {"ggml_cuda_lightning_indexer_supported", "ggml_cuda_should_use_topk_moe"}

#: CUDA units in the order to compile them, those that take longest first; others come after
_HEAVY = """
    binbcast mmq-instance-q5_0 mmq-instance-q4_0 mmq-instance-q4_k getrows argsort top-k cumsum
    ggml-cuda rope mmq-instance-q6_k convert unary mmq-instance-q8_0 cpy norm mmvq
    fattn-mma-f16-instance-ncols1_16-ncols2_1 softmax set-rows fattn mmvf
""".split()

_FUNCTION = r"^(?:static )?[\w:]+ \*?{name}\([^;]*?\) \{{\n.*?^\}}\n"
_CASE = (r"^        case {label}:(?: \{{)?\n(?:(?:            .*)?\n)+?"
         r"(?=        (?:case |default:|\}} break;)|// --|    \}}\n)(?:        \}} break;\n)?")
_DECLARED = re.compile(r"^((?:void|bool|int|ggml_cuda_ar_pipeline \*) ?\w+\([^;{]*\));",
                       re.MULTILINE)


class Tree:
    """The files to pack by their paths, and the list of what was left out of them."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.left_out: list[str] = []

    def edit(self, path: str, change: Callable[[str], str]) -> None:
        """Put one file's changed text in its place. Raises ValueError if nothing changed."""
        if path not in self.files:
            raise ValueError(f"{path}: not in the sources")
        before = self.files[path].decode()
        try:
            after = change(before)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if after == before:
            raise ValueError(f"{path}: nothing to cut")
        self.files[path] = after.encode()

    def drop(self, paths: Iterable[str]) -> None:
        """Take files away. Raises KeyError for one that is not there."""
        for path in paths:
            del self.files[path]


def swapped(text: str, pattern: str, by: str | Callable[[re.Match[str]], str],
            times: int = 1) -> str:
    """The text with each match replaced. Raises ValueError unless there are that many."""
    replace = by if callable(by) else (lambda _: by)
    after, found = re.subn(pattern, replace, text, flags=re.MULTILINE)
    if found != times:
        raise ValueError(f"{found} instead of {times} places match {pattern!r}")
    return after


def within(function: str, change: Callable[[str], str]) -> Callable[[str], str]:
    """Changes one function's definition in a text that holds it once."""
    pattern = re.compile(_FUNCTION.format(name=function), re.MULTILINE | re.DOTALL)

    def changed(text: str) -> str:
        found = pattern.findall(text)
        if len(found) != 1:
            raise ValueError(f"{len(found)} definitions of {function}")
        return text.replace(found[0], change(found[0]))

    return changed


def keep_cases(text: str, label: str, kept: set[str], otherwise: str = "") -> str:
    """A function's text without the cases of a switch that are not kept.

    label: a pattern of the labels, whose group is compared; otherwise: what the default case says.
    Raises ValueError if a kept case is missing.
    """
    seen = set()

    def one(match: re.Match[str]) -> str:
        seen.add(match[1])
        return match[0] if match[1] in kept else ""

    after = re.sub(_CASE.format(label=label), one, text, flags=re.MULTILINE)
    if not kept <= seen or seen == kept:
        raise ValueError(f"cases {sorted(seen)}, to be kept {sorted(kept)}")
    if otherwise:
        after = swapped(after, r'GGML_ABORT\("fatal error"\)',
                        f'GGML_ABORT("left out of this build: {otherwise}")')
    return after


def pack(target: Path) -> None:
    """Write the trimmed sources as a tar.xz. Raises ValueError if they are not as expected."""
    with tempfile.TemporaryDirectory() as folder:
        fetch(PACKAGE, Path(folder), "--no-binary", PACKAGE.split("==")[0])
        archive, = Path(folder).glob("*.tar.gz")
        tree = Tree(read(archive))
    trim(tree)
    write(tree, target)


def read(archive: Path) -> dict[str, bytes]:
    """The files to keep of an sdist of llama-cpp-python."""
    files = {}
    with tarfile.open(archive) as packed:
        for member in packed:
            path = member.name.partition("/vendor/llama.cpp/")[2]
            taken = member.isfile() and _KEPT.fullmatch(path) and not _LEFT.fullmatch(path)
            if taken and (content := packed.extractfile(member)) is not None:
                files[path] = content.read()
    return files


def trim(tree: Tree) -> None:
    """Cut everything that is not needed out of the files."""
    _targets(tree)
    _operations(tree)
    _quantized(tree)
    _floats(tree)
    _attention(tree)
    _additions(tree)
    _units(tree)
    tree.files["left-out.txt"] = ("\n".join(tree.left_out) + "\n").encode()


def write(tree: Tree, target: Path) -> None:
    """Write the files as a tar.xz: the same bytes for the same files."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w:xz", preset=9) as packed:
        for path in sorted(tree.files, key=_likeness):
            entry = tarfile.TarInfo(path)
            entry.size = len(tree.files[path])
            entry.mtime = 1_700_000_000  # older than any object: unpacking again rebuilds nothing
            packed.addfile(entry, io.BytesIO(tree.files[path]))


def _likeness(path: str) -> tuple[str, str]:
    """Like files stand side by side: they share a packer's window."""
    return path.rpartition(".")[2], path


def _targets(tree: Tree) -> None:
    """CMake reads the folders that are there: one tool, one example, three vendors."""
    head = "find_package(Threads REQUIRED)\nllama_add_compile_flags()\n"
    tree.files["tools/CMakeLists.txt"] = f"{head}add_subdirectory(llama-bench)\n".encode()
    tree.files["examples/CMakeLists.txt"] = f"{head}add_subdirectory(speculative-simple)\n".encode()
    tree.edit("CMakeLists.txt", lambda text: swapped(text, r"^    add_subdirectory\(pocs\)\n", ""))
    tree.edit("vendor/CMakeLists.txt", lambda text: swapped(
        text, r"^add_subdirectory\((?:hash|miniaudio|stb)\)\n", "", 3))


def _operations(tree: Tree) -> None:
    """Files of operations that no llama-like model has give way to functions that abort."""
    stubs = ["// Written by pipeinfer: what was left out of this build.", '#include "common.cuh"']
    bodies = []
    for name in (*_UNUSED, "fattn-tile"):
        header = tree.files[f"{_CUDA}/{name}.cuh"].decode()
        declared = (["void ggml_cuda_flash_attn_ext_tile(ggml_backend_cuda_context &, "
                     "ggml_tensor *)"] if name == "fattn-tile" else _DECLARED.findall(header))
        if not declared:
            raise ValueError(f"{name}.cuh declares no function")
        if name != "fattn-tile":  # whose header is full of templates
            stubs.append(f'#include "{name}.cuh"')
        bodies += [_stub(one) for one in declared]
        tree.left_out.append(f"{name}.cu: {', '.join(_name(one) for one in declared)}")
    tree.drop(f"{_CUDA}/{name}.cu" for name in (*_UNUSED, "fattn-tile"))
    tree.files[f"{_CUDA}/left-out.cu"] = "\n".join([*stubs, "", *bodies, ""]).encode()


def _name(declaration: str) -> str:
    return declaration.partition("(")[0].split()[-1]


def _stub(declaration: str) -> str:
    """A definition that aborts, or answers no."""
    plain = re.sub(r" = nullptr", "", declaration)
    name = _name(plain)
    body = ("return false;" if name in _ASKING
            else f'GGML_ABORT("left out of this build: {name}");')
    return f"{plain} {{\n    {body}\n}}"


def _quantized(tree: Tree) -> None:
    """Products with quantized weights: mmq (many rows) and mmvq (1 to 8 rows), without experts."""
    kept, label, said = set(WEIGHTS), r"GGML_TYPE_(\w+)", "products with this type of weights"
    tree.edit(f"{_CUDA}/mmq.cu", within("ggml_cuda_mul_mat_q_switch_type",
                                        lambda text: keep_cases(text, label, kept, said)))
    instances = {f"{_CUDA}/template-instances/mmq-instance-{name.lower()}.cu" for name in kept}
    _only(tree, "mmq-instance-", instances)
    tree.edit(f"{_CUDA}/mmvq.cu", within("mul_mat_vec_q_switch_type",
                                         lambda text: keep_cases(text, label, kept, said)))
    tree.edit(f"{_CUDA}/mmvq.cu", lambda text: swapped(
        text, r"^        mul_mat_vec_q_moe_launch<type>\((?:.*\n){5}?        return;\n",
        '        GGML_ABORT("left out of this build: experts");\n'))
    tree.left_out += [f"mmq.cu, mmvq.cu: all types but {', '.join(WEIGHTS)}",
                      "mmvq.cu, mmvf.cu, mmf.cu: products with experts, of several rows"]


def _only(tree: Tree, prefix: str, kept: set[str]) -> None:
    """Drop the instances with this prefix that are not kept."""
    every = {path for path in tree.files if path.startswith(f"{_CUDA}/template-instances/{prefix}")}
    if not kept < every:
        raise ValueError(f"{prefix}: {sorted(kept - every)} not in the sources")
    tree.drop(every - kept)


def _floats(tree: Tree) -> None:
    """Products with F16: mmf (2 to 16 rows) for F16 alone, mmvf (1 to 3 rows) for F16 and F32.

    The functions that choose send other types to cuBLAS.
    """
    label = r"GGML_TYPE_(\w+)"
    for function in ("ggml_cuda_mul_mat_f", "ggml_cuda_should_use_mmf"):
        tree.edit(f"{_CUDA}/mmf.cu",
                  within(function, lambda text: keep_cases(text, label, {"F16"})))
    tree.edit(f"{_CUDA}/mmf.cuh", _half_alone)
    _pooled(tree)
    for function in ("ggml_cuda_mul_mat_vec_f", "ggml_cuda_op_mul_mat_vec_f",
                     "ggml_cuda_should_use_mmvf"):
        tree.edit(f"{_CUDA}/mmvf.cu",
                  within(function, lambda text: keep_cases(text, label, {"F16", "F32"})))
    tree.edit(f"{_CUDA}/mmvf.cu", within("mul_mat_vec_f_cuda_switch_ncols_dst", _few_rows))
    tree.left_out += ["mmf.cu: F32 and BF16 (cuBLAS serves them)",
                      "mmvf.cu: BF16 (cuBLAS serves it), more than 3 rows"]


def _half_alone(text: str) -> str:
    """mmf.cuh with instances of half2 and NVIDIA's tile alone, without experts."""
    text = swapped(text, r"^    (?:extern )?DECL_MMF_CASE_HELPER\((?:float|nv_bfloat162), MMF_ROWS"
                         r"_PER_BLOCK(?:_CDNA)?, ncols_dst\)(?: \\)?\n", "", 8)
    text = swapped(text, r"(    (?:extern )?DECL_MMF_CASE_HELPER\(half2, MMF_ROWS_PER_BLOCK, "
                         r"ncols_dst\)) \\\n.*_CDNA.*\n", lambda match: match[1] + "\n", 2)
    text = swapped(text, r"^        case MMF_ROWS_PER_BLOCK_CDNA: \{\n(?:            .*\n)+"
                         r"        \} break;\n", "")
    aborts = '        GGML_ABORT("left out of this build: experts");\n    } else '
    return swapped(text, r"^        const int max_tiles = (?:.*\n)+?    \} else if \(ids\) "
                         r"\{\n(?:        .*\n|\n)+    \} else ",
                   aborts.replace("\n    } else ", "\n    } else if (ids) {\n" + aborts, 1))


def _pooled(tree: Tree) -> None:
    """The instances of mmf are short: four at a time share the reading of the headers."""
    folder = f"{_CUDA}/template-instances/mmf-instance-ncols_"
    for first in range(1, 17, 4):
        for rows in range(first + 1, first + 4):
            tree.files[f"{folder}{first}.cu"] += f"DECL_MMF_CASE({rows});\n".encode()
            tree.drop([f"{folder}{rows}.cu"])


def _few_rows(text: str) -> str:
    """mmvf.cu's choice without 4 rows and more, which go elsewhere on all GPUs since Ampere."""
    text = keep_cases(text, r"(\d+)", {"1", "2", "3"}, "products of this many rows")
    return swapped(text, r"^        constexpr int c_ncols_dst = 1;\n        launch_mul_mat_vec_f_"
                         r"cuda<T, type_acc, c_ncols_dst, true>(?:.*\n)+?        return;\n",
                   '        GGML_ABORT("left out of this build: experts");\n')


def _attention(tree: Tree) -> None:
    """Flash attention: the vector kernel (1 or 2 rows) and mma (all else), for `HEADS`.

    The tile kernel is chosen only without tensor cores, or for heads of 40 and 72.
    """
    said = "flash attention with this head size"
    sizes = {str(size) for size in HEADS}
    tree.edit(f"{_CUDA}/fattn.cu", within("ggml_cuda_flash_attn_ext_mma_f16",
                                          lambda text: keep_cases(text, r"(\d+)", sizes, said)))
    tree.edit(f"{_CUDA}/fattn.cu", lambda text: swapped(
        text, r"^    FATTN_VEC_CASE\(256, type_K_case, type_V_case\)  .*\n", ""))
    _without_softcap(tree)
    _instances(tree)
    tree.edit("ggml/CMakeLists.txt", lambda text: swapped(
        text, r'^(set   \(GGML_CUDA_FA_QUANTS) "[^"]*"',
        lambda match: f'{match[1]} "{";".join(CACHES)}"'))
    tree.left_out += [
        f"fattn: all head sizes but {', '.join(map(str, HEADS))}, logits with a soft cap",
        f"fattn-vec: all K-V types but {', '.join(CACHES)} (others are converted to f16 first)"]


def _without_softcap(tree: Tree) -> None:
    """Gemma 2 and Grok cap their logits; the kernels for it are half of all."""
    aborts = 'GGML_ABORT("left out of this build: logits with a soft cap");\n'
    tree.edit(f"{_CUDA}/fattn-mma-f16.cuh", lambda text: swapped(
        text, r"^        constexpr bool use_logit_softcap = true;\n(?:        .*\n|\n)+?    \}\n",
        f"        {aborts}    }}\n"))
    tree.edit(f"{_CUDA}/fattn-vec.cuh", lambda text: swapped(
        text, r"^( +)constexpr bool use_logit_softcap = true;\n.*vec_case_impl.*\n",
        lambda match: match[1] + aborts, 2))


def _instances(tree: Tree) -> None:
    """Cut the instances of other head sizes, and the files that held nothing else."""
    sizes = "|".join(map(str, HEADS))
    folder = f"{_CUDA}/template-instances/"
    for path in [path for path in tree.files if path.startswith(f"{folder}fattn-")]:
        lines = tree.files[path].decode().splitlines(keepends=True)
        taken = [line for line in lines if not line.startswith("DECL_")
                 or re.match(rf"DECL_FATTN_(?:MMA_F16|VEC)_CASE\( *({sizes}), ", line)]
        wanted = "-vec-" not in path or path.endswith(tuple(f"-{pair}.cu" for pair in CACHES))
        if wanted and any(line.startswith("DECL_") for line in taken):
            tree.files[path] = "".join(taken).encode()
        else:
            tree.left_out.append(path)
            del tree.files[path]


def _additions(tree: Tree) -> None:
    """Additions and products of elements of fused nodes: in F32 alone, as llama's graphs are."""
    aborts = '        GGML_ABORT("left out of this build: fused additions in this type");\n'
    tree.edit(f"{_CUDA}/binbcast.cu", lambda text: swapped(
        text, r"^    \} else if \(src0->type == GGML_TYPE_BF16 && src1->type == GGML_TYPE_BF16 .*\n"
              r"        launch_bin_bcast_pack<(?:.*\n)+?    \} else \{\n",
        f"    }} else if (src0->type != GGML_TYPE_F32) {{\n{aborts}    }} else {{\n"))
    tree.left_out.append("binbcast.cu: fused additions and products in other types than F32")


def _units(tree: Tree) -> None:
    """CMake lists the CUDA units that are left, those that take longest first."""
    units = [path.removeprefix(f"{_CUDA}/") for path in tree.files
             if path.startswith(f"{_CUDA}/") and path.endswith(".cu") and "fattn-vec-" not in path]
    names = [Path(unit).stem for unit in units]
    if missing := set(_HEAVY) - set(names):
        raise ValueError(f"no such CUDA units: {sorted(missing)}")
    rank = {name: index for index, name in enumerate(_HEAVY)}
    units.sort(key=lambda unit: (rank.get(Path(unit).stem, len(rank)), "fattn" not in unit, unit))
    listed = "".join(f"        {unit}\n" for unit in units)
    tree.edit(f"{_CUDA}/CMakeLists.txt", lambda text: swapped(
        text, r'^    file\(GLOB   GGML_SOURCES_CUDA "\*\.cu"\)\n(?:    file\(GLOB   SRCS .*\n'
              r"    list\(APPEND GGML_SOURCES_CUDA .*\n){4}",
        f"    set(GGML_SOURCES_CUDA\n{listed}    )\n"))


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
