"""Inflates a llama model: a larger file with the same outputs up to rounding.

A benchmark wants the compute of a large model and the acceptance of a real one. This makes both
from a small trained model: its weights sit inside larger matrices, and everything new is worth
nothing to the output.

* Wider residual stream: new dimensions stay zero, because nothing writes to them. RMSNorm now
  averages over ``k = new / old`` times as many dimensions, so its result grows by sqrt(k): norm
  weights are divided by sqrt(k), and epsilon, inside the root, by k.
* New heads and feed-forward columns have random inputs and zero output columns.
* New layers are random but for their two output projections, which are zero. They are spread
  evenly between the old ones: all layers cost the same, and so every stage of a pipeline, wherever
  it is cut, also does part of the real work, and a fault in any of them shows in the tokens.

Old weights are copied block by block, never requantised, when source and destination have the same
type. The head size stays. The vocabulary stays, so the embedding only grows in width.

Does not know: architectures other than llama, biases, experts, sharding. Shapes here are numpy's
``[outputs, inputs]``; ``inputs`` are contiguous and in whole quantisation blocks.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import gguf
import numpy as np
from gguf import GGMLQuantizationType as QType

from benchmarks.inflate.real_shapes import SHAPES, TYPES, write_one_by_one, write_shape
from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.backends.llamacpp.context import LlamaOptions
from pipeinfer.core.types import make_rows
from pipeinfer.errors import UsageError
from pipeinfer.files import check_writable
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import open_tokenizer

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

#: Spread of the random weights. Too small to upset a float16, too large to be denormal.
_RANDOM_SCALE = 0.02
_QTYPES = {"F32": QType.F32, "F16": QType.F16, "Q8_0": QType.Q8_0}
_LAYER_TENSORS = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a llama; ``head_size`` is free of ``n_embd / n_head``."""

    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    n_ff: int
    head_size: int

    def tensor(self, name: str) -> tuple[int, int]:
        """(outputs, inputs) of one of a layer's matrices."""
        q, kv = self.n_head * self.head_size, self.n_head_kv * self.head_size
        return {
            "attn_q": (q, self.n_embd),
            "attn_k": (kv, self.n_embd),
            "attn_v": (kv, self.n_embd),
            "attn_output": (self.n_embd, q),
            "ffn_gate": (self.n_ff, self.n_embd),
            "ffn_up": (self.n_ff, self.n_embd),
            "ffn_down": (self.n_embd, self.n_ff),
        }[name]


@dataclass(frozen=True, slots=True)
class InflateReport:
    """What was made; sizes in weights and bytes, time in seconds."""

    source_parameters: int
    parameters: int
    n_bytes: int
    seconds: float
    #: Index in the new file of each of the source's layers.
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verification:
    """How two models differ on one text: logits, their scale, and the chosen tokens."""

    positions: int
    max_logit_difference: float
    max_logit: float
    argmax_agreement: float


def inflate(
    src: Path,
    dst: Path,
    *,
    n_embd: int,
    n_layer: int,
    n_head: int,
    n_head_kv: int,
    n_ff: int,
    qtype: str = "Q8_0",
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> InflateReport:
    """Write ``dst``, a model of the given shape that computes what ``src`` computes.

    ``progress`` is called with (tensors written, tensors in all). Raises ValueError, with what to
    change, before anything is written; ``dst`` appears whole or not at all. One tensor at a time
    is in memory.
    """
    started = time.monotonic()
    if qtype not in _QTYPES:
        raise ValueError(f"qtype {qtype!r}: choose one of {', '.join(_QTYPES)}")
    reader = gguf.GGUFReader(src)
    old = _read_shape(reader)
    new = Shape(n_embd, n_layer, n_head, n_head_kv, n_ff, old.head_size)
    _check(old, new, _QTYPES[qtype])
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    build = _Builder(tensors, old, new, _QTYPES[qtype], seed)
    partial = dst.with_name(dst.name + ".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    _copy_metadata(reader, writer, new, old, _QTYPES[qtype])
    plan = list(build.plan())
    for name, tensor_type, rows, columns, _ in plan:
        shape = (rows, *_byte_shape(columns, tensor_type)) if rows else (columns,)
        dtype = np.dtype(np.uint8) if rows else np.dtype(np.float32)
        n_bytes = int(np.prod(shape)) * dtype.itemsize
        writer.add_tensor_info(name, shape, dtype, n_bytes, raw_dtype=tensor_type if rows else None)
    write_one_by_one(writer, partial, dst, [make for *_, make in plan], progress)
    return InflateReport(
        source_parameters=sum(int(tensor.n_elements) for tensor in reader.tensors),
        parameters=sum(max(rows, 1) * columns for _, _, rows, columns, _ in plan),
        n_bytes=dst.stat().st_size,
        seconds=time.monotonic() - started,
        layers=placement(old.n_layer, new.n_layer),
    )


def placement(n_old: int, n_new: int) -> tuple[int, ...]:
    """Where each of ``n_old`` layers goes among ``n_new``, evenly spread and in order."""
    return tuple(index * n_new // n_old for index in range(n_old))


def head_map(old: Shape, new: Shape) -> tuple[list[int], list[int]]:
    """New query head of each old one, and for each new key/value head the old one it copies.

    Query head h reads key/value head ``h // (n_head / n_head_kv)``. Where the new groups are
    smaller than the old ones, an old key/value head is copied as often as its readers need.
    """
    old_group, new_group = old.n_head // old.n_head_kv, new.n_head // new.n_head_kv
    queries: list[int] = []
    copies: list[int] = []
    for kv in range(old.n_head_kv):
        for begin in range(0, old_group, new_group):
            readers = min(new_group, old_group - begin)
            queries += [len(copies) * new_group + reader for reader in range(readers)]
            copies.append(kv)
    return queries, copies


def _check(old: Shape, new: Shape, qtype: QType) -> None:
    """Raise ValueError when ``new`` cannot hold ``old``."""
    for field in ("n_embd", "n_layer", "n_head", "n_ff"):
        if getattr(new, field) < getattr(old, field):
            wanted = getattr(old, field)
            raise ValueError(f"{field} {getattr(new, field)}: the source needs {wanted} or more")
    if new.n_head_kv < 1 or new.n_head % new.n_head_kv:
        raise ValueError(f"n_head {new.n_head} must be a multiple of n_head_kv {new.n_head_kv}")
    _, copies = head_map(old, new)
    if len(copies) > new.n_head_kv:
        raise ValueError(
            f"n_head_kv {new.n_head_kv} with n_head {new.n_head}: the source's heads need "
            f"{len(copies)} key/value heads; raise n_head_kv, or n_head for larger groups"
        )
    block = gguf.GGML_QUANT_SIZES[qtype][0]
    for what, value in (
        ("n_embd", new.n_embd),
        ("n_ff", new.n_ff),
        ("the source's n_embd", old.n_embd),
        ("the source's n_ff", old.n_ff),
        ("the source's head size", old.head_size),
    ):
        if value % block:
            raise ValueError(
                f"{what} {value} is no multiple of {block}, {qtype.name}'s block: "
                "choose another size, or qtype F16 or F32"
            )


def _read_shape(reader: gguf.GGUFReader) -> Shape:
    """The source's sizes, or ValueError when it is not a plain llama."""

    def get(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        return default if field is None else field.contents()

    architecture = get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"only the llama architecture can be inflated, not {architecture!r}")
    n_embd, n_head = get("llama.embedding_length"), get("llama.attention.head_count")
    n_head_kv = get("llama.attention.head_count_kv", n_head)
    n_ff = get("llama.feed_forward_length")
    if not all(isinstance(value, int) for value in (n_head, n_head_kv, n_ff)):
        raise ValueError("a model whose layers differ in heads or width cannot be inflated")
    head_size = get("llama.attention.key_length", n_embd // n_head)
    if get("llama.attention.value_length", head_size) != head_size:
        raise ValueError("key and value heads of different sizes cannot be inflated")
    n_layer = get("llama.block_count")
    allowed = {"token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight"}
    allowed |= {f"blk.{i}.{name}.weight" for i in range(n_layer) for name in _LAYER_TENSORS}
    odd = [tensor.name for tensor in reader.tensors if tensor.name not in allowed]
    if odd:
        raise ValueError(f"not a plain llama: it has {odd[0]} (biases and experts are refused)")
    return Shape(n_embd, n_layer, n_head, n_head_kv, n_ff, head_size)


def _copy_metadata(
    reader: gguf.GGUFReader, writer: gguf.GGUFWriter, new: Shape, old: Shape, qtype: QType
) -> None:
    """Everything of the source, tokenizer included, with the new sizes and epsilon."""
    changed: dict[str, tuple[Any, gguf.GGUFValueType]] = {
        "llama.embedding_length": (new.n_embd, gguf.GGUFValueType.UINT32),
        "llama.block_count": (new.n_layer, gguf.GGUFValueType.UINT32),
        "llama.feed_forward_length": (new.n_ff, gguf.GGUFValueType.UINT32),
        "llama.attention.head_count": (new.n_head, gguf.GGUFValueType.UINT32),
        "llama.attention.head_count_kv": (new.n_head_kv, gguf.GGUFValueType.UINT32),
        "llama.attention.key_length": (new.head_size, gguf.GGUFValueType.UINT32),
        "llama.attention.value_length": (new.head_size, gguf.GGUFValueType.UINT32),
        "llama.rope.dimension_count": (new.head_size, gguf.GGUFValueType.UINT32),
        "general.file_type": (
            int(getattr(gguf.LlamaFileType, f"MOSTLY_{qtype.name}", gguf.LlamaFileType.ALL_F32)),
            gguf.GGUFValueType.UINT32,
        ),
    }
    epsilon = reader.get_field("llama.attention.layer_norm_rms_epsilon")
    if epsilon is None:
        raise ValueError("the source names no llama.attention.layer_norm_rms_epsilon")
    changed[epsilon.name] = (
        float(epsilon.contents()) * old.n_embd / new.n_embd,
        gguf.GGUFValueType.FLOAT32,
    )
    partial_rope = reader.get_field("llama.rope.dimension_count")
    if partial_rope is not None and partial_rope.contents() != old.head_size:
        raise ValueError("rotary embeddings over part of a head cannot be inflated")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        if field.name not in changed:
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    for key, (value, value_type) in changed.items():
        writer.add_key_value(key, value, value_type)


def _byte_shape(columns: int, qtype: QType) -> tuple[int]:
    """Bytes of a row of ``columns`` weights."""
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    return (columns // block * size,)


#: Name, type, outputs (0 for a vector), inputs, and the function that makes the data.
_Planned = tuple[str, QType, int, int, Callable[[], "np.ndarray[Any, Any]"]]


class _Builder:
    """Makes the new tensors one by one. A matrix is bytes [outputs, blocks, bytes of a block]."""

    def __init__(
        self,
        tensors: dict[str, gguf.ReaderTensor],
        old: Shape,
        new: Shape,
        qtype: QType,
        seed: int,
    ) -> None:
        self.tensors, self.old, self.new, self.qtype, self.seed = tensors, old, new, qtype, seed
        self.block, self.block_bytes = gguf.GGML_QUANT_SIZES[qtype]
        self.queries, self.copies = head_map(old, new)

    def plan(self) -> Iterator[_Planned]:
        """Every tensor of the new file, in file order."""
        new, vocab = self.new, int(self.tensors["token_embd.weight"].shape[1])
        for name in ("token_embd", "output"):
            if f"{name}.weight" in self.tensors:
                yield self._matrix(f"{name}.weight", f"{name}.weight", vocab, new.n_embd)
        yield self._norm("output_norm.weight", "output_norm.weight")
        if "rope_freqs.weight" in self.tensors:
            data = np.array(self.tensors["rope_freqs.weight"].data, dtype=np.float32)
            yield "rope_freqs.weight", QType.F32, 0, len(data), lambda: data
        sources = {at: i for i, at in enumerate(placement(self.old.n_layer, new.n_layer))}
        for layer in range(new.n_layer):
            for part in _LAYER_TENSORS:
                name, source = f"blk.{layer}.{part}.weight", ""
                if layer in sources:
                    source = f"blk.{sources[layer]}.{part}.weight"
                if part.endswith("norm"):
                    yield self._norm(name, source)
                else:
                    yield self._matrix(name, source, *new.tensor(part))

    def _norm(self, name: str, source: str) -> _Planned:
        width, scale = self.new.n_embd, (self.old.n_embd / self.new.n_embd) ** 0.5

        def make() -> npt.NDArray[np.float32]:
            out = np.full(width, scale, dtype=np.float64)
            if source:
                out[: self.old.n_embd] *= self.tensors[source].data
            return out.astype(np.float32)

        return name, QType.F32, 0, width, make

    def _matrix(self, name: str, source: str, rows: int, columns: int) -> _Planned:
        def make() -> Bytes:
            out = np.zeros((rows, columns // self.block, self.block_bytes), dtype=np.uint8)
            part = name.split(".")[-2]
            if part in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"):
                self._randomise(out, name)
            if source:
                self._place(out, part, self._packed(self.tensors[source]))
            return out.reshape(rows, -1)

        return name, self.qtype, rows, columns, make

    def _packed(self, tensor: gguf.ReaderTensor) -> Bytes:
        """The source's matrix in the destination's blocks; its own bytes when types agree."""
        data = tensor.data
        if tensor.tensor_type != self.qtype:
            floats = gguf.quants.dequantize(data, tensor.tensor_type)
            data = gguf.quants.quantize(floats, self.qtype)
        rows = int(tensor.shape[1])
        return np.ascontiguousarray(data).view(np.uint8).reshape(rows, -1, self.block_bytes)

    def _place(self, out: Bytes, part: str, matrix: Bytes) -> None:
        """Put the old weights where the new shape reads them."""
        size, per_head = self.old.head_size, self.old.head_size // self.block
        if part == "attn_output":
            for head, at in enumerate(self.queries):
                columns = matrix[:, head * per_head : (head + 1) * per_head]
                out[: len(matrix), at * per_head : (at + 1) * per_head] = columns
            return
        width = matrix.shape[1]
        if part == "attn_q":
            moves = list(enumerate(self.queries))
        elif part in ("attn_k", "attn_v"):
            moves = [(kv, at) for at, kv in enumerate(self.copies)]
        else:
            out[: len(matrix), :width] = matrix
            # Where a row is old, inputs beyond the old width are zero anyway; so are its weights.
            out[: len(matrix), width:] = 0
            return
        for head, at in moves:
            rows = slice(at * size, (at + 1) * size)
            out[rows, :width] = matrix[head * size : (head + 1) * size]
            out[rows, width:] = 0

    def _randomise(self, out: Bytes, name: str) -> None:
        """Fill with small random weights; seeded by name, so independent of the order."""
        generator = np.random.default_rng([self.seed, *name.encode()])
        if self.qtype == QType.Q8_0:
            # Uniform integers of standard deviation 73 under one scale: no quantiser needed.
            quants = generator.integers(-127, 128, out.shape, dtype=np.int8)
            out[:] = quants.view(np.uint8)
            out[:, :, :2] = np.array([_RANDOM_SCALE / 73.3], np.float16).view(np.uint8)
            return
        dtype = np.float16 if self.qtype == QType.F16 else np.float32
        values = generator.standard_normal(out.shape[:2], dtype=np.float32) * _RANDOM_SCALE
        out[:] = values.astype(dtype).view(np.uint8).reshape(out.shape)


def verify(
    src: Path,
    dst: Path,
    *,
    text: str | None = None,
    tokens: Sequence[int] | None = None,
    n_tokens: int = 512,
    threads: int = 2,
) -> Verification:
    """Compare two models of one vocabulary with llama.cpp, on ``tokens`` or else on ``text``.

    The default text is the standard library's ``getopt``, which the embedded pair never trained
    on. Both decode the same rows together, because logits depend on the width of a decode.
    """
    if text is None:
        import getopt
        import inspect

        text = inspect.getsource(getopt)
    tokens = list(tokens if tokens is not None else _tokens(src, text))[:n_tokens]
    ours, theirs = (_logits(path, tokens, threads) for path in (src, dst))
    return Verification(
        positions=len(ours),
        max_logit_difference=float(np.abs(ours - theirs).max()),
        max_logit=float(np.abs(ours).max()),
        argmax_agreement=float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
    )


def _tokens(path: Path, text: str) -> list[int]:
    """The ids of ``text`` in the model at ``path``, with its leading token."""
    tokenizer = open_tokenizer(path)
    try:
        return tokenizer.encode(text)
    finally:
        tokenizer.close()


def _logits(path: Path, tokens: Sequence[int], threads: int) -> npt.NDArray[np.float32]:
    """Logits [position, vocabulary] of ``tokens``, decoded in one batch."""
    layers, count = ModelFile(path).n_layers, len(tokens)
    backend = LlamaCppBackend.load(
        path, layers=(0, layers), n_layers_total=layers, first=True, last=True, n_ctx=count,
        n_seq_max=1, n_batch=count, n_threads=threads,
        options=LlamaOptions(type_k="f16", type_v="f16"))
    try:
        found = backend.decode(make_rows([(token, i, (0,), True)
                                          for i, token in enumerate(tokens)]))
        assert found is not None
        return found
    finally:
        backend.close()


@click.command("inflate")
@click.argument("model", required=False,
                type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("-o", "--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--shape", type=click.Choice(list(SHAPES)), default=None,
              help="Instead of MODEL: random weights in the shape of a well-known model.")
@click.option("--n-embd", default=2048, show_default=True)
@click.option("--n-layer", default=None, type=click.IntRange(1),
              help="[default: 22; with --shape all of its layers]")
@click.option("--n-head", default=32, show_default=True)
@click.option("--n-head-kv", default=8, show_default=True)
@click.option("--n-ff", default=5632, show_default=True)
@click.option("--n-vocab", default=0, type=click.IntRange(0),
              help="With --shape: number of tokens [default: the shape's].")
@click.option("--vocabulary", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="With --shape: take the tokenizer of this GGUF file.")
@click.option("--type", "qtype", type=click.Choice(sorted({*_QTYPES, *TYPES})), default="Q8_0",
              show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--verify/--no-verify", "check", default=True,
              help="Compare the result with MODEL at the end.")
@click.option("--json", "as_json", is_flag=True, help="Print one machine-readable object.")
def inflate_command(
    model: Path | None, out: Path, shape: str | None, n_layer: int | None, n_vocab: int,
    vocabulary: Path | None, qtype: str, seed: int, check: bool, as_json: bool, **sizes: int
) -> None:
    """Make a larger MODEL with the same outputs, to benchmark real compute (default: 1 B).

    \b
    python -m benchmarks.inflate embedded.gguf -o big.gguf
    python -m benchmarks.inflate --shape llama-8b --type Q4_0 -o 8b.gguf
    """
    if (model is None) == (shape is None):
        raise click.UsageError("give either MODEL or --shape")
    try:
        with click.progressbar(length=1, label="writing", file=sys.stderr, hidden=as_json) as bar:

            def progress(done: int, total: int) -> None:
                bar.length = total
                bar.update(done - bar.pos)

            check_writable(out)
            started = time.monotonic()
            if shape is not None:
                parameters = write_shape(
                    out, shape, qtype, layers=n_layer or 0, n_vocab=n_vocab, vocabulary=vocabulary,
                    seed=seed, progress=progress)
                result = {"parameters": parameters, "n_bytes": out.stat().st_size,
                          "seconds": time.monotonic() - started}
            elif model is not None:
                result = asdict(inflate(model, out, n_layer=n_layer or 22, **sizes, qtype=qtype,
                                        seed=seed, progress=progress))
    except (ValueError, UsageError) as error:
        raise click.UsageError(str(error)) from error
    if model is not None and check:
        result |= asdict(verify(model, out))
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(f"{out}: {result['parameters'] / 1e6:.1f} M parameters, "
               f"{result['n_bytes'] / 1e6:.1f} MB, {result['seconds']:.1f} s")
    if "positions" in result:
        click.echo(
            f"against {model}: logits differ by at most {result['max_logit_difference']:.2g} of "
            f"{result['max_logit']:.1f}, same choice at {result['argmax_agreement']:.2%} of "
            f"{result['positions']} positions"
        )
