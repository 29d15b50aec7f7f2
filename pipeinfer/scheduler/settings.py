"""The settings of the scheduler, and those of the paper's experiments. Plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from msgspec import Struct, structs

from pipeinfer.core.policy import Ablation, Policy


def row_price(costs: Sequence[float]) -> float:
    """Return the least cost per speculative token of `Limits.costs`, in runs of one row."""
    return min((cost / size for size, cost in enumerate(costs, 1)), default=0.0)


class Tuning(Struct, frozen=True, kw_only=True):
    """The settings that may change while requests run.

    credit: maximum runs in flight, prompt chunks and speculation; an accepted token is always
        issued
    draft_max: speculative tokens per micro-batch
    tree_max: drafted tokens of a synchronous tree, or of the single run of the `continuous`
        ablation
    branches: paths of a synchronous tree, or of one micro-batch of `published`
    alternatives: how many of the draft's second, third, ... choices may be issued with its first
    p_min: cutoff: least confidence of a drafted token
    p_split: least confidence of an alternative
    p_recovery: raises the cutoff, per run issued since the last acceptance
    p_decay: lowers the cutoff, per empty draft since the last acceptance
    path_min: least estimated probability of acceptance at which a speculative token is issued
    eager: issue the best token at hand rather than wait for a better one that is being drafted
        (pays where the draft is slower than a stage)
    join_tip: after a miss wait for the first micro-batch and issue it in the accepted token's run
        (one pass over the weights instead of two; pays where the draft is fast and stages are few)
    alone: speculate in every lane as if it were the only one
    guess_rows: maximum speculative tokens in flight; 0: no bound
    share: best size of the decode groups, by number of lanes (index: lanes - 1); empty: as many
        groups as `credit` suggests
    time_sharing: draft and target compute one after the other, as with `synchronous`: for stages on
        the draft's cores, where there is no pipeline to fill
    same_cores: stages compute with the same cores: a run occupies them for the sum of all stages'
        times, and runs of different lanes are computed one after the other
    costs: of 1, 2, ... speculative tokens in the run of their tip, in runs of one row; as many are
        issued as make the sum of their probabilities exceed this cost most. Empty: all are issued
    draft_price: time of a token of the draft's models, in runs of one row, which their proposals
        have to gain besides their rows for the models to be queried; 0: always queried; infinity:
        never
    chain_min: least probability that a whole chain is right at which the draft adds a token to it
    free_max, free_min: `tree_max` and `p_min` of proposals that no model is evaluated for, with
        `time_sharing`; 0 and None: the same as the others
    """

    credit: int = 4
    draft_max: int = 3
    tree_max: int = 8
    branches: int = 1
    alternatives: int = 2
    p_min: float = 0.0
    p_split: float = 0.02
    p_recovery: float = 0.0
    p_decay: float = 0.0
    path_min: float = 0.03
    eager: bool = False
    join_tip: bool = False
    alone: bool = False
    guess_rows: int = 0
    share: tuple[int, ...] = ()
    time_sharing: bool = False
    same_cores: bool = False
    costs: tuple[float, ...] = ()
    draft_price: float = 0.0
    chain_min: float = 0.0
    free_max: int = 0
    free_min: float | None = None


class Limits(Tuning, frozen=True, kw_only=True):
    """All settings of the scheduler; runs in flight rely on those that are not `Tuning`.

    n_ctx: positions that a lane may use
    policy: which runs are issued
    ablations: components that are switched off
    chunk: prompt rows per run; prompts are cut at multiples of it
    exact_width: maximum rows of a run of generated tokens (R)
    group_max: maximum lanes whose tokens share a run, if more than `exact_width`
    partitions: live leaf ids besides a lane's first
    parallel: requests decoded at a time
    cells: tokens of all requests and cached prompts together; 0: each request's context is the only
        bound
    kept: maximum prompts in the prefix cache; 0: prompts share nothing
    threads: maximum threads of a response that are active besides its main one
    states: whether layers keep a state of the text, so that every speculative run needs a sequence
        id of its own
    chains: whether each lane has one sequence id and a run for its tokens alone, so that its tokens
        in flight are one chain
    together: most rows of a picture whose rows see each other, which are one run
    """

    n_ctx: int
    policy: Policy = Policy.PIPEINFER
    ablations: frozenset[Ablation] = frozenset()
    chunk: int = 64
    exact_width: int = 1
    group_max: int = 0
    partitions: int = 8
    parallel: int = 1
    cells: int = 0
    kept: int = 0
    threads: int = 0
    states: bool = False
    chains: bool = False
    together: int = 0

    def tuned(self, tuning: Tuning) -> Limits:
        """Return the same limits with another tuning."""
        return structs.replace(self, **{name: getattr(tuning, name)
                                        for name in Tuning.__struct_fields__})

    @property
    def synchronous(self) -> bool:
        """Whether drafting happens only while nothing is in flight."""
        return self.policy is Policy.SPECULATIVE or (
            self.policy in (Policy.PIPEINFER, Policy.PUBLISHED)
            and (self.time_sharing or Ablation.ASYNC in self.ablations)
        )

    @property
    def joins(self) -> bool:
        """Whether an accepted token waits for the speculative tokens below it."""
        return self.synchronous or (
            self.join_tip and self.policy is Policy.PIPEINFER and self.exact_width > 1
        )

    @property
    def speculates(self) -> bool:
        """Whether proposers are queried at all."""
        return self.policy is not Policy.ITERATIVE and self.exact_width > int(self.synchronous)

    @property
    def asks_models(self) -> bool:
        """Whether the draft's models may be queried at all."""
        return self.draft_price < math.inf

    @property
    def n_ids(self) -> int:
        """The number of sequence ids that the cache needs in all."""
        return self.lanes + self.kept + self.partitions

    @property
    def lanes(self) -> int:
        """The maximum number of open lanes."""
        return self.parallel * lanes_per_response(self.threads)

    def group(self, lanes: int) -> int:
        """Return how many of `lanes` lanes share a run, so that the runs fill the pipeline.

        Where layers keep a state each has a run of its own: states that lie apart would be moved;
        and with `chains`.
        """
        if self.states or self.chains:
            return 1
        if self.share:
            size = self.share[min(lanes, len(self.share)) - 1]
        else:
            size = -(-lanes // max(1, self.credit - 1))
        return min(size, self.widest_group)

    @property
    def widest_group(self) -> int:
        """The maximum number of lanes whose tokens share a run."""
        return max(self.exact_width, self.group_max)

    @property
    def max_branches(self) -> int:
        """The maximum number of paths of a tree that is drafted at once."""
        return self.branches if self.synchronous or self.buffered else 1

    @property
    def wanted_alternatives(self) -> int:
        """The number of alternatives wanted with each first proposal."""
        if Ablation.ALTERNATIVES in self.ablations or self.policy is Policy.PUBLISHED:
            return 0
        return 0 if self.synchronous or not self.partitions else self.alternatives

    @property
    def buffered(self) -> bool:
        """Whether every speculative run has a sequence id of its own."""
        return self.policy is Policy.PUBLISHED and not self.chains

    @property
    def shares_early(self) -> bool:
        """Whether runs attend to cells of earlier runs in flight (with `buffered`)."""
        return Ablation.MULTIBUFFER not in self.ablations


#: the settings of PipeInfer's published experiments: micro-batches of 3, cutoff 0.1, recovery and
#: decay at the program's default of 0, and none of the features that pipeinfer added. `p_split` is
#: this project's: theirs, 0.9 with three paths, lets no second choice pass, so they drafted chains
PUBLISHED: dict[str, Any] = {
    "draft_max": 3, "p_min": 0.1, "p_split": 0.1, "p_recovery": 0.0, "p_decay": 0.0,
    "path_min": 0.0,
    "tree_max": 4, "alternatives": 0, "eager": True, "join_tip": False,
}


def lanes_per_response(threads: int) -> int:
    """Return the maximum number of lanes of a response with `threads` threads besides its main one.

    These are the main thread, the active threads, and one lane that holds the cells of ended
    threads until they are joined.
    """
    return 2 + threads if threads else 1
