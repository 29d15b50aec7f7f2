"""Which head of the target proposes tokens, and the rows of the target that it reads.

Uses options and models' headers; loads nothing but the head itself (`load_head`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from msgspec import Struct, structs

from pipeinfer.backends.factory import llama_options
from pipeinfer.cluster import features
from pipeinfer.cluster.draft_ranks import BATCH, DRAFT_PATHS, OwnProposer
from pipeinfer.config import JobConfig
from pipeinfer.core.control import DraftSetup
from pipeinfer.core.policy import Policy
from pipeinfer.errors import ModelError, UsageError
from pipeinfer.host import Place, threads_of
from pipeinfer.models.eagle_head import TAPS, CompletedHead
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.head_file import WITH_HEAD, HeadSource, SmallVocabulary, head_of
from pipeinfer.models.hub_files import EAGLE_FILE
from pipeinfer.models.locate import find
from pipeinfer.models.shard_cache import cache_directory, store
from pipeinfer.models.text.vocabulary import Vocabulary
from pipeinfer.nodes import RankInfo
from pipeinfer.strategies import registry
from pipeinfer.strategies.spec import HEADS, Need

if TYPE_CHECKING:
    from pipeinfer.backends.llamacpp.head import LlamaHead

HeadKind: TypeAlias = Literal["mtp", "eagle3"]
MTP: Final = "mtp"  #: the proposers
EAGLE3: Final = "eagle3"


class HeadPlan(Struct, frozen=True):
    """A head that a job uses.

    kind: see `LlamaOptions.head`
    file: what has it
    target: whose head it is
    taps: layers whose inputs it reads, see `backends.base.tap`
    small: its vocabulary; None: the target's
    """

    kind: HeadKind
    file: ModelFile
    target: ModelFile
    taps: tuple[int, ...] = ()
    small: SmallVocabulary | None = None

    def is_that(self, other: HeadPlan | None) -> bool:
        """Whether another plan is of the same file and rows."""
        return other is not None and (self.kind, self.file.path, self.taps) == (
            other.kind, other.file.path, other.taps)

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return f"the head in {self.file.path.name}"

    @property
    def source(self) -> HeadSource | CompletedHead:
        """The bytes that are loaded."""
        return HeadSource(self.file, self.small) if self.kind == "mtp" else CompletedHead(
            self.file, self.target)

    @property
    def reads(self) -> int:
        """The bytes of weights that a token's step reads."""
        drawn, experts = (self.file.arch_get(f"expert_{what}count", 0) for what in ("used_", ""))
        share = drawn / experts if isinstance(drawn, int) and isinstance(experts, int) and \
            experts else 1.0
        own = (one for one in self.file.tensors.values() if one.layer is not None and (
            self.kind == "eagle3" or one.layer >= self.file.n_layers))
        return round(self._output_bytes + sum(
            one.nbytes * (share if "_exps." in one.name else 1.0) for one in own))

    @property
    def _output_bytes(self) -> float:
        if self.kind == "eagle3":
            return CompletedHead(self.file, self.target).output_bytes
        tensors, n_vocab = self.file.tensors, self.target.n_vocab
        output = tensors.get("output.weight", tensors.get("token_embd.weight"))
        return output.nbytes * (self.small.size if self.small else n_vocab) / n_vocab \
            if output else 0.0


def with_head(asked: JobConfig, config: JobConfig, model: Any, draft: Path | None,
              backends: Sequence[str]) -> JobConfig:
    """Return the config, with a head as a proposer where the target's file has one, or --eagle
    names one.

    asked: the user's own. Only if that chooses no proposers, nor to do without any.
    """
    published = f"--policy {Policy.PUBLISHED}"
    excluding = set(features.excluding(features.LOOKUP, asked))
    if draft is None:
        excluding.discard(published)  # that needs one source of guesses
    if excluding or config.speculation.decomposer:
        return config
    own = config.speculation.own
    name = EAGLE3 if own.get("eagle") else MTP
    if name == MTP and _refusal(model, backends):
        beside = _eagle_beside(model, backends)
        if beside is None:
            return config
        name, config = EAGLE3, config.replace(own={**own, "eagle": str(beside)})
    others = config.speculation.proposer or (("draft",) if draft is not None else ())
    at = others.index("draft") if "draft" in others else len(others)
    return config.replace(proposer=(*others[:at], name, *others[at:]))


def _eagle_beside(model: Any, backends: Sequence[str]) -> Path | None:
    """Return the EAGLE-3 head in a model's folder that fits it; None without one."""
    if not isinstance(model, ModelFile) or set(backends) != {"llamacpp"}:
        return None
    for path in sorted(model.path.parent.glob(f"{EAGLE_FILE}*.gguf")):
        try:
            if not _refusal(model, backends, _taps_of(ModelFile(path), model)):
                return path
        except ModelError:
            continue  # of another model
    return None


def _taps_of(head: ModelFile, model: ModelFile) -> tuple[int, ...]:
    """Return the layers whose inputs an EAGLE-3 head reads. Raises ModelError where it does not fit
    the model."""
    named = head.arch_get("target_layers")
    listed = named if isinstance(named, list) else []
    taps = tuple(one for one in listed if isinstance(one, int) and 0 <= one < model.n_layers)
    if len(taps) != TAPS or len(taps) < len(listed):
        raise ModelError(f"{head.path}: does not name {TAPS} layers of {model.path.name} whose "
                         "rows it reads (target_layers): give the EAGLE-3 head of this model")
    CompletedHead(head, model)  # raises if it does not fit
    return taps


def head_for(config: JobConfig, model: Any, backends: Sequence[str]) -> HeadPlan | None:
    """Return the head that a config's proposers need, None if they need none.

    Raises UsageError, with the reason, where it cannot be used; ModelError for a bad file.
    """
    if len(heads := proposers_of(config)) > 1:
        raise UsageError(f"--proposer {' and '.join(heads)}: a job uses one prediction head: leave "
                         "one out")
    for spec in registry.named(config.speculation):
        if Need.MTP in spec.needs:
            if why := _refusal(model, backends):
                raise UsageError(f"--proposer {spec.name}: {why}")
            head = head_of(model)
            assert head is not None
            return HeadPlan("mtp", head, model, (model.n_layers,), small_of(config, model))
        if Need.EAGLE3 in spec.needs:
            given = registry.values_of(spec, config.speculation)["eagle"]
            if not given:
                raise UsageError(f"--proposer {spec.name} needs a head: give one with --eagle")
            file = ModelFile(find(str(given), offline=config.model.offline).path)
            taps = _taps_of(file, model)
            if why := _refusal(model, backends, taps):
                raise UsageError(f"--proposer {spec.name}: {why}")
            return HeadPlan("eagle3", file, model, taps)
    return None


def check_heads(own: Sequence[OwnProposer], head: HeadPlan | None) -> None:
    """Raise UsageError where the nodes file gives a rank another head than the job has."""
    for one in own:
        if one.has_head and (head is None or head.kind != one.spec.name):
            raise UsageError(f"the proposer {one.spec.name} of rank {one.ranks[0]} (nodes file) "
                             f"needs a head of the target: add --proposer {one.spec.name}")


def small_of(config: JobConfig, target: ModelFile) -> SmallVocabulary | None:
    """Return the vocabulary that a target's own head has; None: all of it."""
    from pipeinfer.llama import binding

    size = registry.values_of(registry.proposers()[MTP], config.speculation)["head_vocabulary"]
    return SmallVocabulary.of(target, size) if size and binding.has_tensors() else None


def proposers_of(config: JobConfig) -> list[str]:
    """Return the names of a config's proposers that need a head."""
    return [one.name for one in registry.named(config.speculation)
            if one.needs & HEADS]


def setup_of(config: JobConfig, plan: HeadPlan, ranks: tuple[int, ...], hosts: Sequence[RankInfo],
             cells: int, n_vocab: int, vocabulary: Vocabulary | None) -> DraftSetup:
    """Return what the draft rank loads that computes a head.

    ranks: its number. Other arguments as for `setups_of`. Raises UsageError for several ranks.
    """
    if len(ranks) > 1:
        raise UsageError(f"{plan.name} is one layer, which one rank holds: use --draft-ranks 1")
    return DraftSetup(
        ranks, plan.kind, str(plan.file.path), plan.file.fingerprint, 1, 0, 1,
        **head_sizes(config, cells), paths=head_paths(config), n_vocab=n_vocab,
        settings=structs.asdict(hosts[ranks[0]].settings), options={},
        vocabulary=vocabulary.to_json() if vocabulary else None,
        target=str(plan.target.path), target_fingerprint=plan.target.fingerprint)


def load_head(config: JobConfig, place: Place, plan: HeadPlan, sizes: Mapping[str, int]
              ) -> LlamaHead:
    """Load a head. sizes: see `head_sizes`. Raises ModelError and BackendError."""
    from pipeinfer.backends.llamacpp.head import LlamaHead

    options = llama_options(config.model, draft=True, head=plan.kind)
    threads = threads_of(config.model.threads_draft, place)
    source = plan.source
    if isinstance(source, HeadSource):
        if source.small is not None:
            options = structs.replace(options, repack="off")  # its rows are replaced one by one
        return LlamaHead.open(source, plan.file.n_layers, sizes, threads, options)
    return LlamaHead.open(store(source, cache_directory()), 1, sizes, threads, options)


def head_sizes(config: JobConfig, cells: int) -> dict[str, Any]:
    """Return the sizes of a head's cache. cells: of each stage's cache."""
    paths = head_paths(config)
    return {"n_ctx": cells + 64 * paths, "n_seq_max": paths + config.speculation.branches,
            "n_batch": BATCH}


def head_paths(config: JobConfig) -> int:
    """Return how many paths a head keeps in its cache."""
    return DRAFT_PATHS + config.speculation.parallel - 1


def _refusal(model: Any, backends: Sequence[str], taps: tuple[int, ...] = ()) -> str:
    """Return why a head cannot be used; "" if it can. taps: none for the target's own head."""
    if not isinstance(model, ModelFile) or set(backends) != {"llamacpp"}:
        return "needs a GGUF file and stages on llama.cpp"
    if not taps:
        if model.architecture not in WITH_HEAD:
            return (f"heads of {model.architecture} models are not supported, but of "
                    f"{', '.join(WITH_HEAD)}")
        if head_of(model) is None:
            return f"{model.path.name} has no head of one layer, nor is there an mtp-*.gguf beside"
    from pipeinfer.backends.llamacpp.taps import refusal

    return refusal(model.architecture, taps or (model.n_layers,), model.n_layers)
