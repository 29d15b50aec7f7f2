"""What proposers evaluate: a draft model, or a prediction head of the target.

A resource is found from options and models' headers on rank 0, before anything loads. The rank that
runs the proposer loads it, from the file that a `DraftSetup` names. `ProposerSpec.resource` names
its class, here or in any other module.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from msgspec import Struct, structs

from pipeinfer.backends import exact_width
from pipeinfer.backends.base import ALL_IDS, Backend
from pipeinfer.backends.exact_width import settle_threads
from pipeinfer.backends.factory import llama_options, load_torch
from pipeinfer.backends.rewinding import RewindingBackend, ids_for
from pipeinfer.config import JobConfig
from pipeinfer.core.control import DraftSetup
from pipeinfer.errors import ModelError, UsageError
from pipeinfer.host import Place, threads_of
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.heads import (
    ARCHITECTURE,
    BLOCKS,
    WITH_HEAD,
    BlockShape,
    CompletedHead,
    HeadSource,
    SmallVocabulary,
    head_of,
    taps_of,
)
from pipeinfer.models.hub_files import BLOCK_FILES, EAGLE_FILE
from pipeinfer.models.layers import keeps_state
from pipeinfer.models.local_stores import label
from pipeinfer.models.locate import EMBEDDED, find, open_model, open_tokenizer, same_model
from pipeinfer.models.shard_cache import Source, cache_directory, store
from pipeinfer.models.slice_parts import Slice
from pipeinfer.models.text.tokenizer import Tokenizer, check_draft_vocab
from pipeinfer.strategies import registry
from pipeinfer.strategies.spec import ProposerSpec

if TYPE_CHECKING:
    from pipeinfer.backends.llamacpp.head import LlamaHead

_PATHS = 8  #: paths in the cache of a draft or a head
_STATE_PATHS = 2  #: the same of a draft whose layers keep a state, which each path needs several of
_BATCH = 256  #: most rows of one run


class Asked(Struct, frozen=True):
    """What a resource is found from.

    model: the target's header
    draft: the draft model; None without one
    backends: of the stages
    """

    config: JobConfig
    model: Any
    draft: Path | None
    backends: tuple[str, ...]


class CacheSizes(Struct, frozen=True):
    """The sizes of a cache: cells, sequence ids, rows of one run, and paths that stay in it."""

    n_ctx: int = 0
    n_seq_max: int = 0
    n_batch: int = 0
    paths: int = 0

    @property
    def of_backend(self) -> dict[str, int]:
        """The arguments that backends take."""
        return {"n_ctx": self.n_ctx, "n_seq_max": self.n_seq_max, "n_batch": self.n_batch}


class Resource(Struct, frozen=True):
    """A file that a proposer evaluates: found and checked, not loaded. Base class.

    reads_rows: whether it reads rows of the target
    movable: whether a rank may have one that its own `draft` setting names (nodes file)
    name: in messages
    held: the bytes of its file
    reads: the bytes of weights that a token's step reads
    files: the fields of a `DraftSetup` that name its files
    """

    reads_rows: ClassVar[bool] = False
    movable: ClassVar[bool] = False

    @property
    def name(self) -> str: ...  # type: ignore[empty-body]
    @property
    def held(self) -> int: ...  # type: ignore[empty-body]
    @property
    def reads(self) -> int: ...  # type: ignore[empty-body]
    @property
    def files(self) -> dict[str, Any]: ...  # type: ignore[empty-body]

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it reads, see `backends.base.tap`."""
        return ()

    @classmethod
    def usual(cls, asked: Asked) -> Mapping[str, Any] | None:
        """Return the strategies' own options with which a job uses it where the user names no
        proposer; None where it does not."""
        del asked
        return None

    @classmethod
    def find(cls, spec: ProposerSpec, asked: Asked) -> Self:
        """Find it. Raises UsageError and ModelError, with the reason, where it cannot be used."""
        raise NotImplementedError

    @classmethod
    def named(cls, setup: DraftSetup) -> Self:
        """Return what a setup names, on the rank that loads it. Raises ModelError where the files
        are not there, MismatchError for other files."""
        raise NotImplementedError

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise MismatchError where its tokens are not those of the target."""

    def sizes(self, spec: ProposerSpec, config: JobConfig, cells: int) -> CacheSizes:
        """Return the sizes of its cache. cells: of each stage's cache. Raises UsageError."""
        raise NotImplementedError

    def load(self, config: JobConfig, place: Place, sizes: Mapping[str, int]
             ) -> tuple[Backend, int]:
        """Load it; return the backend and its number of threads. Raises ModelError and
        BackendError."""
        raise NotImplementedError


class Draft(Resource, frozen=True):
    """A draft model: a GGUF file, or a model folder for torch."""

    path: Path
    movable: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """The name in messages."""
        return label(self.path)

    @property
    def held(self) -> int:
        """The bytes of its file."""
        return sum(map(round, open_model(self.path).layer_bytes))

    @property
    def reads(self) -> int:
        """The bytes of weights that a token's step reads."""
        files = self.path.glob("*.safetensors") if self.path.is_dir() else (self.path,)
        total: int = sum(file.stat().st_size for file in files)
        return total

    @property
    def files(self) -> dict[str, Any]:
        """The fields of a `DraftSetup` that name its files."""
        return {"model": str(self.path), "fingerprint": open_model(self.path).fingerprint}

    @classmethod
    def usual(cls, asked: Asked) -> Mapping[str, Any] | None:
        """Return the options with which a job uses it by default; None if it does not."""
        return None if asked.draft is None or _has_blocks(asked) else {}

    @classmethod
    def find(cls, spec: ProposerSpec, asked: Asked) -> Draft:
        """Find the resource's file."""
        del spec
        if asked.draft is None:
            raise UsageError("needs a draft model: give one with -md")
        if _has_blocks(asked):
            raise UsageError(f"{asked.draft} is a DFlash draft, which reads the target's rows: use "
                             f"--proposer dflash")
        return cls(open_model(asked.draft).path)

    @classmethod
    def named(cls, setup: DraftSetup) -> Draft:
        """Return what a setup names; a bundled draft is taken from this installation."""
        path = Path(setup.model)
        bundled = EMBEDDED / path.name
        path = bundled if not path.exists() and bundled.exists() else path
        return cls(same_model(str(path), setup.fingerprint))

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise MismatchError where its tokens are not those of the target."""
        own = open_tokenizer(self.path)
        check_draft_vocab(tokenizer, own)
        own.close()

    def sizes(self, spec: ProposerSpec, config: JobConfig, cells: int) -> CacheSizes:
        """Return the sizes of its cache. cells: of each stage's cache."""
        states, own = keeps_state(open_model(self.path)), config.speculation
        paths = (_STATE_PATHS if states else _PATHS) + own.parallel - 1
        branches = spec.branches(registry.values_of(spec, own))
        if branches and states:
            raise UsageError(f"--proposer {spec.name} evaluates several paths at once, and layers "
                             f"of the draft {self.name} keep a state: use --proposer draft")
        count = paths + max(own.branches, branches)
        if branches and count > ALL_IDS and not self.path.is_dir():
            raise UsageError(f"--proposer {spec.name} evaluates {branches} paths at once and "
                             f"keeps {paths}, and llama.cpp has {ALL_IDS}: lower its sizes "
                             f"({', '.join(spec.options)}) or --parallel")
        return CacheSizes(cells + 64 * paths, count, _BATCH, paths)

    def load(self, config: JobConfig, place: Place, sizes: Mapping[str, int]
             ) -> tuple[Backend, int]:
        """Load it; return the backend and its number of threads."""
        threads = threads_of(config.model.threads_draft, place)
        model = open_model(self.path)
        layers = 0, model.n_layers
        if self.path.is_dir():
            return load_torch(dataclasses.replace(config.model, exact="off"), self.path, layers,
                              sizes, threads), threads
        from pipeinfer.backends.llamacpp.backend import LlamaCppBackend

        own: dict[str, Any] = {**sizes}
        if states := keeps_state(model):
            own["n_seq_max"] = ids_for(sizes["n_seq_max"])
        backend = LlamaCppBackend.load(
            self.path, layers=layers, n_layers_total=model.n_layers, first=True, last=True,
            n_threads=threads, options=llama_options(config.model, draft=True), **own)
        if not config.model.threads_draft:
            with exact_width.alone():
                threads = settle_threads(backend, threads, (model.fingerprint, "draft"))
        return RewindingBackend(backend, sizes["n_seq_max"]) if states else backend, threads


class PredictionHead(Resource, frozen=True):
    """A prediction head of the target, which is one layer.

    file: what has it
    target: whose head it is
    cut: the slices of the target's layers, where the members of a stage have the head in as many
    index: which of them this is
    """

    file: ModelFile
    target: ModelFile
    cut: tuple[Slice, ...] = ()
    index: int = 0
    reads_rows: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"the head in {self.file.path.name}"

    @property
    def files(self) -> dict[str, Any]:
        """The fields of a `DraftSetup` that name its files."""
        return {"model": str(self.file.path), "fingerprint": self.file.fingerprint,
                "target": str(self.target.path), "target_fingerprint": self.target.fingerprint}

    def sizes(self, spec: ProposerSpec, config: JobConfig, cells: int) -> CacheSizes:
        """Return the sizes of its cache. cells: of each stage's cache."""
        del spec
        paths = _PATHS + config.speculation.parallel - 1
        return CacheSizes(cells + 64 * paths, paths + config.speculation.branches, _BATCH, paths)

    @property
    def source(self) -> Source: ...  # type: ignore[empty-body]

    def check_cut(self, cut: Sequence[str]) -> None:
        """Raise PlanError where the head cannot be cut into slices of the target's cut."""
        pieces = tuple(map(Slice.parse, cut))
        for index in range(len(pieces)):
            _ = structs.replace(self, cut=pieces, index=index).source

    def reads_on(self, slices: int) -> float:
        """Return the bytes of weights that a token's step reads of one of so many slices."""
        whole = sum(one.nbytes for one in self.file.tensors.values() if "eh_proj" in one.name)
        return whole + (self.reads - whole) / slices

    def _read(self, layers: range, output: float) -> int:
        """Return the bytes of weights of layers, and of an output matrix, that a token reads."""
        drawn, experts = (self.file.arch_get(f"expert_{what}count", 0) for what in ("used_", ""))
        share = drawn / experts if isinstance(drawn, int) and isinstance(experts, int) and \
            experts else 1.0
        return round(output + sum(
            one.nbytes * (share if "_exps." in one.name else 1.0)
            for one in self.file.tensors.values() if one.layer in layers))


class MtpHead(PredictionHead, frozen=True):
    """The head for further tokens (MTP) that the target's file has, or a file next to it.

    small: its vocabulary; None: the target's
    """

    small: SmallVocabulary | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose rows it reads: the last one's result."""
        return (self.target.n_layers,)

    @property
    def held(self) -> int:
        """The bytes of its file."""
        return HeadSource(self.file, self.small).total

    @property
    def reads(self) -> int:
        """The bytes of weights that a token's step reads."""
        tensors, n_vocab = self.file.tensors, self.target.n_vocab
        output = tensors.get("output.weight", tensors.get("token_embd.weight"))
        return self._read(range(self.file.n_layers, self.file.n_layers_all), output.nbytes * (
            self.small.size if self.small else n_vocab) / n_vocab if output else 0.0)

    @classmethod
    def usual(cls, asked: Asked) -> Mapping[str, Any] | None:
        """Return the options with which a job uses it by default; None if it does not."""
        given = asked.config.speculation.own.get("eagle") or _has_blocks(asked)
        return None if given or _refusal(asked) else {}

    @classmethod
    def find(cls, spec: ProposerSpec, asked: Asked) -> MtpHead:
        """Find the resource's file."""
        if why := _refusal(asked):
            raise UsageError(why)
        head = head_of(asked.model)
        assert head is not None
        size = registry.values_of(spec, asked.config.speculation)["head_vocabulary"]
        return cls(head, asked.model, small=_small(asked.model, size))

    @classmethod
    def named(cls, setup: DraftSetup) -> MtpHead:
        """Return what a setup names, on the rank that loads it."""
        target = _same_file(setup.target, setup.target_fingerprint)
        return cls(_same_file(setup.model, setup.fingerprint), target,
                   tuple(map(Slice.parse, setup.cut)), setup.index,
                   small=_small(target, setup.options["head_vocabulary"]))

    @property
    def source(self) -> HeadSource:
        """The head's file, or that of its slice."""
        return HeadSource(self.file, self.small, self.target if self.cut else None,
                          self.cut[self.index] if self.cut else None)

    def load(self, config: JobConfig, place: Place, sizes: Mapping[str, int]
             ) -> tuple[LlamaHead, int]:
        """Load it; return the backend and its number of threads."""
        from pipeinfer.backends.llamacpp.head import LlamaHead

        options = llama_options(config.model, draft=True, head="mtp")
        source = self.source
        if source.small is not None:
            options = structs.replace(options, repack="off")  # its rows are replaced one by one
        threads = threads_of(config.model.threads_draft, place)
        return LlamaHead.open(source, self.file.n_layers, sizes, threads, options), threads


class EagleHead(PredictionHead, frozen=True):
    """An EAGLE-3 head, in a file of its own that names the layers whose inputs it reads."""

    architecture: ClassVar[str] = ARCHITECTURE

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose rows it reads. Raises ModelError if the head does not fit the target."""
        return taps_of(self.file, self.target)

    @property
    def held(self) -> int:
        """The bytes of its file."""
        return self.source.total

    @property
    def reads(self) -> int:
        """The bytes of weights that a token's step reads."""
        return self._read(range(self.file.n_layers_all), self.source.output_bytes)

    @classmethod
    def usual(cls, asked: Asked) -> Mapping[str, Any] | None:
        """Return the options for the head that is named, else for one in the model's folder."""
        given, blocks = asked.config.speculation.own.get("eagle"), _has_blocks(asked)
        if given and blocks:
            raise UsageError(f"--eagle and -md {asked.draft} are both prediction heads: leave one "
                             "out")
        if given or blocks:
            return {} if given else None
        beside = cls._beside(asked, EAGLE_FILE)
        return None if beside is None else {"eagle": str(beside.file.path)}

    @classmethod
    def find(cls, spec: ProposerSpec, asked: Asked) -> EagleHead:
        """Find the resource's file."""
        given = registry.values_of(spec, asked.config.speculation)["eagle"]
        if not given:
            raise UsageError("needs a head: give one with --eagle")
        if why := _no_stages(asked):
            raise UsageError(why)
        head = cls(ModelFile(find(str(given), offline=asked.config.model.offline).path),
                   asked.model)
        if why := _refusal(asked, head._fitting()):
            raise UsageError(why)
        return head

    @classmethod
    def named(cls, setup: DraftSetup) -> EagleHead:
        """Return what a setup names, on the rank that loads it."""
        return cls(_same_file(setup.model, setup.fingerprint),
                   _same_file(setup.target, setup.target_fingerprint),
                   tuple(map(Slice.parse, setup.cut)), setup.index)

    @property
    def source(self) -> CompletedHead:
        """Its file with all that it needs, or that of its slice. Raises ModelError where it does
        not fit the target, and PlanError."""
        return CompletedHead(self.file, self.target, self.architecture, self.cut, self.index)

    def load(self, config: JobConfig, place: Place, sizes: Mapping[str, int]
             ) -> tuple[Backend, int]:
        """Load it; return the backend and its number of threads."""
        from pipeinfer.backends.llamacpp.head import LlamaHead

        threads = threads_of(config.model.threads_draft, place)
        path = store(self.source, cache_directory())
        return LlamaHead.open(path, 1, sizes, threads, llama_options(
            config.model, draft=True, head="eagle3")), threads

    def _fitting(self) -> tuple[int, ...]:
        """Return the taps. Raises ModelError where the head does not fit the target."""
        taps = self.taps
        _ = self.source  # raises if it does not fit
        return taps

    @classmethod
    def _beside(cls, asked: Asked, *starts: str) -> Self | None:
        """Return a head in the model's folder that fits; None without one."""
        if _no_stages(asked):
            return None
        for path in (one for start in starts
                     for one in sorted(asked.model.path.parent.glob(f"{start}*.gguf"))):
            try:
                if not _refusal(asked, (head := cls(ModelFile(path), asked.model))._fitting()):
                    return head
            except ModelError:
                continue  # of another model
        return None


class BlockHead(EagleHead, frozen=True):
    """A DFlash, DFlash2 or DSpark draft: the file of -md, or one next to the model."""

    architecture: ClassVar[str] = BLOCKS
    movable: ClassVar[bool] = True

    @classmethod
    def usual(cls, asked: Asked) -> Mapping[str, Any] | None:
        """Return the options with which a job uses it by default; None if it does not."""
        return {} if _has_blocks(asked) or cls._beside(asked, *BLOCK_FILES) else None

    @classmethod
    def find(cls, spec: ProposerSpec, asked: Asked) -> BlockHead:
        """Find the resource's file."""
        del spec
        if why := _no_stages(asked):
            raise UsageError(why)
        draft = cls(ModelFile(asked.draft), asked.model) \
            if asked.draft is not None and _has_blocks(asked) else cls._beside(asked, *BLOCK_FILES)
        if draft is None:
            raise UsageError("needs a DFlash draft of this model: give one with -md")
        if why := _refusal(asked, draft._fitting()):
            raise UsageError(why)
        return draft

    def load(self, config: JobConfig, place: Place, sizes: Mapping[str, int]
             ) -> tuple[Backend, int]:
        """Load the draft; return the backend and its number of threads."""
        from pipeinfer.backends.llamacpp.head import LlamaBlocks

        threads = threads_of(config.model.threads_draft, place)
        path = store(self.source, cache_directory())
        return LlamaBlocks.open(
            path, BlockShape.of(self.file, self.target), self.file.n_layers, sizes, threads,
            llama_options(config.model, draft=True, head="dflash")), threads

    def _fitting(self) -> tuple[int, ...]:
        BlockShape.of(self.file, self.target)
        return super()._fitting()


def _has_blocks(asked: Asked) -> bool:
    """Whether the draft of -md is a prediction head that drafts blocks."""
    return asked.draft is not None and open_model(asked.draft).architecture == BLOCKS


def _no_stages(asked: Asked) -> str:
    return "" if isinstance(asked.model, ModelFile) and set(asked.backends) == {"llamacpp"} else \
        "needs a GGUF file and stages on llama.cpp"


def _refusal(asked: Asked, taps: tuple[int, ...] = ()) -> str:
    """Return why a head cannot be used; "" if it can. taps: none for the target's own head."""
    if why := _no_stages(asked):
        return why
    model = asked.model
    if not taps:
        if model.architecture not in WITH_HEAD:
            return (f"heads of {model.architecture} models are not supported, but of "
                    f"{', '.join(WITH_HEAD)}")
        if head_of(model) is None:
            return f"{model.path.name} has no head of one layer, nor is there an mtp-*.gguf"
    from pipeinfer.backends.llamacpp.taps import refusal

    return refusal(model.architecture, taps or (model.n_layers,), model.n_layers)


def _small(target: ModelFile, size: int) -> SmallVocabulary | None:
    """Return the vocabulary that a target's own head has; None: all of it."""
    from pipeinfer.llama import binding

    return SmallVocabulary.of(target, size) if size and binding.has_tensors() else None


def _same_file(path: str, fingerprint: str) -> ModelFile:
    return ModelFile(same_model(path, fingerprint))


def class_of(spec: ProposerSpec) -> type[Resource] | None:
    """Return the class of what a proposer evaluates; None: nothing. Raises UsageError where it is
    not installed."""
    try:
        return pkgutil.resolve_name(spec.resource) if spec.resource else None
    except (ImportError, AttributeError) as error:
        raise UsageError(f"the proposer {spec.name} evaluates {spec.resource}, which no package "
                         f"provides ({error}): install that package") from error
