"""Products of few rows: the bits of llama.cpp's single rows, whatever the shape and the thread."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.llama import binding, short_runs
from pipeinfer.llama.platform_check import cpu_flags
from pipeinfer.loading import c_part
from tests.kit.random_model import RandomSpec, write_random_model
from tests.kit.sample import full

#: ggml's number of a type -> elements and bytes of a block, where halves of its scales are
BLOCKS = {0: (1, 4, ()), 1: (1, 2, ()), 2: (32, 18, (0,)), 3: (32, 20, (0, 2)), 6: (32, 22, (0,)),
          8: (32, 34, (0,)), 12: (256, 144, (0, 2)), 13: (256, 176, (0, 2)),
          14: (256, 210, (208,)), 30: (1, 2, ())}
PARTNERS = {0: (1, 4), 1: (1, 2), 8: (32, 34), 9: (32, 36), 15: (256, 292), 30: (1, 2)}
LLAMAFILES = (0, 1, 30)  #: types of which llamafile's kernels take longer runs
ARM = platform.machine() == "aarch64"


class Team(ctypes.Structure):
    """ggml_compute_params."""

    _fields_ = (("ith", ctypes.c_int), ("nth", ctypes.c_int), ("bytes", ctypes.c_size_t),
                ("work", ctypes.c_void_p), ("pool", ctypes.c_void_p))


def compiled():
    return c_part("_short_runs", short_runs.KERNELS)


@pytest.fixture(scope="module")
def sgemm():
    binding.loaded()
    if not short_runs.used():
        pytest.skip("no kernels here: no C compiler, another processor, or switched off")
    found = ctypes.CDLL(compiled()).llamafile_sgemm
    found.restype = ctypes.c_bool
    return found


def product(sgemm, sizes, arrays, lengths, kinds, thread=0, threads=1):
    """Whether a thread's part of a product was taken. sizes: rows of weights, rows, blocks;
    arrays, lengths: addresses of weights, rows, results, and what their rows are long."""
    team = Team(thread, threads, 0, None, None)
    places = [each for array, length in zip(arrays, lengths, strict=True)
              for each in (array, ctypes.c_int64(length))]
    return sgemm(ctypes.byref(team), *map(ctypes.c_int64, sizes), *places, *kinds, 0)


def address(array):
    return ctypes.c_void_p(array.ctypes.data)


def weights_of(kind, rows, blocks, rng):
    elements, size, halves = BLOCKS[kind]
    if elements == 1:
        values = rng.standard_normal((rows, blocks)).astype(np.float32)
        if kind == 30:
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(np.float16 if kind == 1 else np.float32).view(np.uint8)
    found = rng.integers(0, 256, (rows, blocks, size)).astype(np.uint8)
    for at in halves:
        scale = rng.standard_normal((rows, blocks, 1)).astype(np.float16)
        found[:, :, at : at + 2] = scale.view(np.uint8)
    if kind == 8:
        found[:, :, 2:][found[:, :, 2:] == 128] = 0
    return found.reshape(rows, -1)


def partner_rows(kind, values):
    traits = binding.ggml_get_type_traits_cpu(kind).contents
    if kind == 0:
        return np.ascontiguousarray(values).view(np.uint8)
    elements, size = PARTNERS[kind]
    found = np.zeros((len(values), values.shape[1] // elements * size), np.uint8)
    quantise = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(
        traits.from_float)
    for row, to in zip(values, found, strict=True):
        quantise(row.ctypes.data, to.ctypes.data, len(row))
    return found


@pytest.mark.parametrize("kind", BLOCKS)
@given(weights=st.integers(1, 90),
       rows=st.integers(1, 2 * short_runs.MOST_ROWS + 1) | st.sampled_from([64, 137, 150]),
       blocks=st.integers(1, 9) | st.sampled_from([33, 70]), threads=st.integers(1, 3),
       spare=st.integers(0, 2), seed=st.integers(0, 2**16))
def test_every_row_has_the_bits_that_it_has_alone(
        sgemm, kind, weights, rows, blocks, threads, spare, seed):
    name = short_runs._TYPES[kind]
    if name not in short_runs.used():
        pytest.skip("this build of llama.cpp adds up in another order")
    by_sixteens = "avx512f" in binding.kernels()
    long_ones = f"{name}-512" in short_runs.used() or not by_sixteens
    if kind in LLAMAFILES or not long_ones:  # longer runs are llama.cpp's
        rows = min(rows, short_runs.MOST_ROWS)
    elements = BLOCKS[kind][0]
    blocks *= 1 + (ARM and elements == 32)  # an odd number is llama.cpp's
    count = blocks * (elements if elements > 1 else 64 if by_sixteens else 32)
    rng = np.random.default_rng(seed)
    traits = binding.ggml_get_type_traits_cpu(kind).contents
    partner = traits.vec_dot_type
    left = weights_of(kind, weights, count // elements, rng)
    values = (rng.standard_normal((rows, count)) * np.exp(rng.standard_normal((rows, 1))))
    right = partner_rows(partner, values.astype(np.float32))
    found = np.full((rows, weights + spare), np.nan, np.float32)
    for thread in range(threads):
        assert product(sgemm, (weights, rows, count // elements), map(address, (
            left, right, found)), (count // elements, count // PARTNERS[partner][0],
                                   weights + spare), (kind, partner), thread, threads)
    one = ctypes.c_float()
    for row in range(rows):
        for weight in range(weights):
            traits.vec_dot(count, ctypes.addressof(one), 0, left[weight].ctypes.data, 0,
                           right[row].ctypes.data, 0, 1)
            assert np.float32(one.value).tobytes() == found[row, weight].tobytes()
    assert np.isnan(found[:, weights:]).all()  # nothing is written beside the product


@pytest.mark.parametrize(("rows", "kind", "partner"), [
    (short_runs.MOST_ROWS, 8, 0),  # a row that has to be quantised first
    (short_runs.MOST_ROWS, 1, 0),  # the same of floats: llamafile's order is another one
])
def test_what_has_to_be_converted_first_is_not_taken(sgemm, rows, kind, partner):
    assert not product(sgemm, (1, rows, 1), [ctypes.c_void_p()] * 3, (1, 1, 1), (kind, partner))


def test_rows_that_no_kernel_divides_are_llama_cpps(sgemm):
    """Of 40 floats; there would be memory for them."""
    room = np.zeros(256, np.float32)
    assert not product(sgemm, (1, 2, 40), [address(room)] * 3, (40, 40, 1), (1, 1))


def test_every_type_has_llama_cpps_bits_on_this_processor(sgemm):
    """What `begin` leaves out it leaves out silently; nothing should be."""
    every = {*short_runs._TYPES.values(), short_runs._REPACKED[0], short_runs._ATTENTION[0]}
    assert every - set(short_runs.used()) == (
        {"bf16", short_runs._REPACKED[0], short_runs._ATTENTION[0]} if ARM else set())
    if short_runs._REPACKED[1] in short_runs.used() and "amx_int8" not in cpu_flags():
        quantised = {name for kind, name in short_runs._TYPES.items() if BLOCKS[kind][0] > 1}
        assert {f"{name}-512" for name in quantised} <= set(short_runs.used())


#: of Q4_0, IQ4_NL, MXFP4
GEMV, GEMM, METHOD = ([short_runs.REPACKED_FUNCTIONS[i] for i in places]
                      for places in ((0, 10, 11), (1, 8, 9), (3, 12, 13)))
TOLD = {"rows": ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p),
        "matrix": ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p),
        "contiguous": ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p),
        "name": ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)}
NAMES = {name: ctypes.create_string_buffer(name.encode()) for name in ("MUL_MAT", "MUL_MAT_ID")}


class Repacked:
    """The C part once more, for products that llama.cpp's loop is imitated for."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        self.product = None
        self.told = {"rows": 1, "matrix": True, "contiguous": True, "name": None}
        self._kept = [kind(lambda _, name=name: self.told[name]) for name, kind in TOLD.items()]
        forward = ctypes.CFUNCTYPE(ctypes.c_bool, *[ctypes.c_void_p] * 3)(
            lambda *_: self.product() is None)
        own = [getattr(binding, name) for name in short_runs.REPACKED_FUNCTIONS[:3]]
        self._kept += [forward, *own]
        begin = self.library.pipeinfer_repacked_runs
        begin.restype = ctypes.c_uint32
        begin.argtypes = [*[ctypes.c_void_p] * 14, ctypes.c_bool, ctypes.c_bool]
        others = [getattr(binding, name) for name in short_runs.REPACKED_FUNCTIONS[8:12]]
        found = begin(*(ctypes.cast(f, ctypes.c_void_p) for f in (
            *own, forward, *self._kept[:4], *others, forward, forward)), True, True)
        assert found & 1
        self.prompts = [name for bit, name in enumerate(short_runs._REPACKED)
                        if bit and found >> bit & 1]

    def run(self, product, kind=0):
        self.product = product
        method = getattr(self.library, METHOD[kind])
        method.restype = ctypes.c_bool
        assert method(None, None, None)


@pytest.fixture(scope="module")
def repacked(sgemm, tmp_path_factory):
    if short_runs._REPACKED[0] not in short_runs.used():
        pytest.skip("this build of llama.cpp does not lay out Q4_0 like that")
    return Repacked(shutil.copy(compiled(), tmp_path_factory.mktemp("repacked")))


def side_by_side(right):
    """Rows of Q8_0 in fours, as their kernels want them."""
    four = right.reshape(-1, 4, right.shape[1] // 34, 34)
    halves = four[..., :2].transpose(0, 2, 1, 3).reshape(*four.shape[:1], four.shape[2], 8)
    numbers = four[..., 2:].reshape(*four.shape[:3], 4, 8).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(
        np.concatenate((halves, numbers.reshape(*halves.shape[:2], 128)), axis=2))


def called(function, length, to, apart, x, y, rows, weights):
    function.restype = None
    function(ctypes.c_int(length), ctypes.c_void_p(to), ctypes.c_size_t(apart), ctypes.c_void_p(x),
             ctypes.c_void_p(y), ctypes.c_int(rows), ctypes.c_int(weights))


@given(eights=st.integers(1, 9), rows=st.integers(1, 23) | st.sampled_from(
           [32, 48, 63, 64, 65, 100, 128, 257, 512]), blocks=st.integers(1, 9),
       chunks=st.integers(1, 3), known=st.sampled_from(["all", "experts", "planes", "strides"]),
       seed=st.integers(0, 2**16))
def test_rows_by_weights_laid_out_anew(repacked, eights, rows, blocks, chunks, known, seed):
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 256, (eights, blocks, 144)).astype(np.uint8)
    weights[:, :, :16] = rng.standard_normal((eights, blocks, 8)).astype(np.float16).view(np.uint8)
    right = partner_rows(8, rng.standard_normal((rows, 32 * blocks)).astype(np.float32))
    order = rng.permutation(rows) if known == "experts" else range(rows)
    in_fours = 0 if known == "experts" else rows - rows % 4
    fours = side_by_side(right[:in_fours])
    wanted = np.full((rows, 8 * eights), np.nan, np.float32)
    for row in range(rows):
        called(getattr(binding, GEMV[0]), 32 * blocks, wanted[row].ctypes.data, 8 * eights,
               weights.ctypes.data, right[row].ctypes.data, 1, 8 * eights)
    found = np.full_like(wanted, np.nan)

    def product():
        """What llama.cpp's method does for one thread, all chunks."""
        bounds = [eights * i // chunks for i in range(chunks + 1)]
        for begin, end in pairwise(bounds):
            if begin == end:
                continue
            part, x = (begin * 8, (end - begin) * 8), weights[begin].ctypes.data
            if in_fours:
                called(getattr(repacked.library, GEMM[0]), 32 * blocks,
                       found[0, part[0]:].ctypes.data, 8 * eights, x, fours.ctypes.data, in_fours,
                       part[1])
            for row in order[in_fours:]:
                called(getattr(repacked.library, GEMV[0]), 32 * blocks,
                       found[row, part[0]:].ctypes.data, 8 * eights, x, right[row].ctypes.data, 1,
                       part[1])

    repacked.told |= {"rows": rows, "matrix": known != "planes", "contiguous": known != "strides",
                      "name": ctypes.addressof(
                          NAMES["MUL_MAT_ID" if known == "experts" else "MUL_MAT"])}
    repacked.run(product)
    assert wanted.tobytes() == found.tobytes()


@pytest.fixture(scope="module", params=["this processor's", "tiles in C"])
def prompts(request, repacked, tmp_path_factory):
    """Those of `repacked`, or a build whose tiles of AMX are written in C: for any processor."""
    if not repacked.prompts:
        pytest.skip("this processor has no VNNI on 512 bits")
    if request.param == "this processor's":
        return repacked
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("tiles") / "tiles.so"
    sources = [short_runs.KERNELS / f"repacked_{part}.c" for part in ("runs", "prompts", "experts")]
    subprocess.run([compiler, "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-DTILE_MODEL", "-o",
                    path, *sources], check=True)
    made = Repacked(path)
    assert "amx" in made.prompts
    return made


def some_weights(rng, kind, eights, blocks):
    """Random ones of a type, 0 to 2, as llama.cpp lays them out."""
    weights = rng.integers(0, 256, (eights, blocks, 136 if kind == 2 else 144)).astype(np.uint8)
    if kind == 2:
        weights[:, :, :8] = rng.integers(100, 150, (eights, blocks, 8))
        weights[0, 0, :8] = range(8)  # the smallest scales, of which two are no normal numbers
    else:
        scales = rng.standard_normal((eights, blocks, 8)).astype(np.float16)
        weights[:, :, :16] = scales.view(np.uint8)
    return weights


@pytest.mark.parametrize("type", range(3), ids=["q4_0", "iq4_nl", "mxfp4"])
@given(eights=st.integers(1, 21), fours=st.integers(1, 12) | st.sampled_from([16, 25, 32, 33, 128]),
       blocks=st.integers(1, 40), seed=st.integers(0, 2**16))
def test_prompts_by_weights_laid_out_anew(prompts, type, eights, fours, blocks, seed):
    """With llama.cpp's bits: panels of 16 columns, groups of 8 and 32 rows, slices of 16 blocks."""
    assert prompts.prompts[:3] == list(short_runs._REPACKED[1:4])
    rng, rows = np.random.default_rng(seed), 4 * fours
    weights = some_weights(rng, type, eights, blocks)
    right = side_by_side(partner_rows(
        8, rng.standard_normal((rows, 32 * blocks)).astype(np.float32)))
    wanted, found = (np.full((rows, 8 * eights + 3), np.nan, np.float32) for _ in range(2))
    for library, to in ((binding, wanted), (prompts.library, found)):
        called(getattr(library, GEMM[type]), 32 * blocks, to.ctypes.data, to.shape[1],
               weights.ctypes.data, right.ctypes.data, rows, 8 * eights)
    assert wanted.tobytes() == found.tobytes()


@pytest.mark.parametrize("type", range(3), ids=["q4_0", "iq4_nl", "mxfp4"])
@given(eights=st.integers(1, 9), blocks=st.integers(1, 20), seed=st.integers(0, 2**16),
       counts=st.lists(st.integers(0, 12) | st.sampled_from([31, 128, 129, 150]), min_size=1,
                       max_size=5))
def test_rows_of_experts_are_multiplied_together(repacked, type, eights, blocks, seed, counts):
    """Rows of each expert in any order, their results anywhere; with the bits of single rows."""
    assert short_runs._REPACKED[5 + type] in repacked.prompts
    rng, rows = np.random.default_rng(seed), sum(counts)
    experts = [some_weights(rng, type, eights, blocks) for _ in counts]
    right = partner_rows(8, rng.standard_normal((max(rows, 1), 32 * blocks)).astype(np.float32))
    order, places = rng.permutation(rows), rng.permutation(rows)
    calls = [(x, row) for x, count, first in zip(
        experts, counts, np.cumsum([0, *counts[:-1]]), strict=True)
        for row in range(first, first + count)]
    wanted, found = (np.full((rows, 8 * eights + 3), np.nan, np.float32) for _ in range(2))

    def product(library, to):
        for x, row in calls:
            called(getattr(library, GEMV[type]), 32 * blocks, to[places[row]].ctypes.data,
                   to.shape[1], x.ctypes.data, right[order[row]].ctypes.data, 1, 8 * eights)

    product(binding, wanted)
    repacked.told |= {"rows": rows, "name": ctypes.addressof(NAMES["MUL_MAT_ID"])}
    repacked.run(lambda: product(repacked.library, found), type)
    assert wanted.tobytes() == found.tobytes()


def attended(q, k, v, mask, heads, sources, threads):
    """What llama.cpp's graph of one product with flash attention gives, whoever makes it."""
    rows, width, cells = q.shape[0], q.shape[2], k.shape[0]
    context = binding.ggml_init(binding.ggml_init_params(8 << 20, None, False))
    try:
        def tensor(kind, *shape):
            new = binding.ggml_new_tensor_4d
            new.restype = ctypes.c_void_p
            return new(ctypes.c_void_p(context), kind, *map(ctypes.c_int64, (*shape, 1)))

        def put(to, values):
            values = np.ascontiguousarray(values)
            ctypes.memmove(binding.ggml_get_data(to), values.ctypes.data, values.nbytes)

        of = {}
        for name, kind, shape, values in (
                ("q", 0, (width, rows, heads), q.transpose(1, 0, 2)),
                ("k", 8, (width, cells, sources), k.transpose(1, 0, 2)),
                ("v", 8, (width, cells, sources), v.transpose(1, 0, 2)),
                ("mask", 1, (cells, rows, 1), mask)):
            of[name] = tensor(kind, *shape)
            put(of[name], values)
        flash = binding.ggml_flash_attn_ext
        flash.restype = ctypes.c_void_p
        to = flash(*(ctypes.c_void_p(p) for p in (context, *of.values())), ctypes.c_float(0.125),
                   ctypes.c_float(0), ctypes.c_float(0))
        graph = binding.ggml_new_graph(ctypes.c_void_p(context))
        binding.ggml_build_forward_expand(ctypes.c_void_p(graph), ctypes.c_void_p(to))
        compute = binding.ggml_graph_compute_with_ctx
        compute.restype = ctypes.c_int
        assert compute(ctypes.c_void_p(context), ctypes.c_void_p(graph), threads) == 0
        return ctypes.string_at(binding.ggml_get_data(to), 4 * width * heads * rows)
    finally:
        binding.ggml_free(context)


@given(width=st.sampled_from([32, 64, 96, 128, 256]), sources=st.integers(1, 3),
       shared=st.integers(1, 7), rows=st.integers(1, 5) | st.just(16), cells=st.integers(1, 150),
       hidden=st.sampled_from([0.0, 0.1, 0.9, 1.0]), threads=st.integers(1, 3),
       seed=st.integers(0, 2**16))
def test_attention_over_a_cache_of_q8_0_has_llama_cpps_bits(
        sgemm, width, sources, shared, rows, cells, hidden, threads, seed):
    if short_runs._ATTENTION[0] not in short_runs.used():
        pytest.skip("this build of llama.cpp computes it in another way")
    rng = np.random.default_rng(seed)
    heads = sources * shared
    q = rng.standard_normal((rows, heads, width)).astype(np.float32) * np.float32(3)
    k, v = (partner_rows(8, rng.standard_normal((cells * sources, width)).astype(np.float32)
                         ).reshape(cells, sources, -1) for _ in "kv")
    mask = np.where(rng.random((rows, cells)) < hidden, -np.inf, 0).astype(np.float16)
    found = []
    for most in (short_runs.MOST_ROWS, 0):
        short_runs.limit(most)
        try:
            found.append(attended(q, k, v, mask, heads, sources, threads))
        finally:
            short_runs.limit(short_runs.MOST_ROWS)
    assert found[0] == found[1]


def wishes_for_huge_pages(address):
    """Whether the mapping there was advised so."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[0] in "0123456789abcdef":
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            inside = begin <= address < end
        elif inside and line.startswith("VmFlags"):
            return "hg" in line.split()
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(),
                    reason="a kernel without transparent huge pages")
def test_large_buffers_are_to_have_huge_pages(sgemm):
    allocate = ctypes.CDLL(compiled()).ggml_aligned_malloc
    allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    free = ctypes.CDLL(None).free
    free.restype, free.argtypes = None, [ctypes.c_void_p]
    found = allocate(64 << 20)
    try:
        assert found % 64 == 0
        assert wishes_for_huge_pages(found + (32 << 20))
    finally:
        free(found)


PROBE = """
import sys
from pathlib import Path
from pipeinfer.backends.exact_width import exact_width
from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.core.types import make_rows
from pipeinfer.llama import short_runs
from pipeinfer.models.locate import open_model
path, hidden = Path(sys.argv[1]), []
n = open_model(path).n_layers
backend = LlamaCppBackend.load(path, layers=(0, n), n_layers_total=n, first=True, last=True,
                               n_ctx=256, n_seq_max=2, n_batch=64, n_threads=int(sys.argv[2]))
width = exact_width(backend)
for i in range(4):
    hidden.append(backend.decode(make_rows([(5 + i, i, (0,), True)])).tobytes())
print(width, len(short_runs.used()), hash(b"".join(hidden)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F32", "F16", full("BF16"), "Q4_0", "Q8_0", "Q4_K_M"])
def test_a_model_decodes_up_to_sixteen_rows_with_the_bits_of_one(tmp_path, kind, sgemm):
    path = tmp_path / "model.gguf"
    wide = {"n_embd": 256, "n_ff": 512} if kind == "Q4_K_M" else {}
    threads = "2" if kind == "Q8_0" else "1"  # two wait for each other on busy cores
    write_random_model(path, RandomSpec(qtype=kind, **wide))
    answers = []
    for switch in ("", "off", "one-by-one"):
        done = subprocess.run(
            [sys.executable, "-c", PROBE, str(path), threads], capture_output=True, text=True,
            check=False, timeout=120,
            env=os.environ | {short_runs.SWITCH: switch, "PYTHONHASHSEED": "0"})
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout.split())
    (width, kernels, bits), (_, without, same), (alone_width, none, alone) = answers
    assert (int(width), int(without), int(none)) == (short_runs.MOST_ROWS, 0, 0)
    assert int(kernels) > 0
    if kind in ("F32", "F16", "Q8_0"):  # as on processors without AVX2, which lay out nothing anew
        assert (int(alone_width), alone) == (short_runs.MOST_ROWS, bits)
    if kind != "Q4_K_M":  # without it these weights are laid out anew: hosts warn of each other
        assert bits == same  # hosts with and without it may be in one job


def test_without_the_c_part_llama_cpp_does_it_all(monkeypatch, tmp_path):
    monkeypatch.setattr(short_runs, "KERNELS", tmp_path)
    monkeypatch.setattr(short_runs, "_used", [])
    short_runs._compiled.cache_clear()
    try:
        short_runs.preload(tmp_path / "libllama.so")
        short_runs.begin({})
        assert short_runs.used() == ()
        (tmp_path / "_short_runs.abi3.so").write_bytes(b"not a library")
        short_runs._compiled.cache_clear()
        short_runs.preload(tmp_path / "libllama.so")
        short_runs.begin({})
        assert short_runs.used() == ()
    finally:
        short_runs._compiled.cache_clear()


def test_kernels_that_are_plug_ins_are_left_alone(monkeypatch, tmp_path):
    loads = []
    monkeypatch.setattr(short_runs, "_compiled", lambda: loads.append(1))
    monkeypatch.delenv(short_runs.SWITCH, raising=False)
    (tmp_path / "libggml-cpu-haswell.so").touch()
    short_runs.preload(tmp_path / "libllama.so")
    assert not loads
    (tmp_path / "libggml-cpu-haswell.so").rename(tmp_path / "libggml-cpu.so")
    short_runs.preload(tmp_path / "libllama.so")
    assert loads
