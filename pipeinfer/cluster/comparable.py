"""Decides whether a run with --ablate can be compared with the same run without it: only if nothing
but the component differs. It reads options; loads nothing."""

from __future__ import annotations

from pipeinfer.cluster import features
from pipeinfer.cluster.policy_choice import most_stages
from pipeinfer.cluster.sizing import JOIN_UP_TO
from pipeinfer.config import JobConfig
from pipeinfer.core.policy import COMPONENTS, Ablation, Policy
from pipeinfer.errors import UsageError
from pipeinfer.scheduler.controller import TUNABLE


def check_ablation(config: JobConfig, policy: Policy, ranks: int, *, turns: bool) -> None:
    """Raise UsageError, with what to add, if --ablate would change more than its components.

    turns: whether the ranks would take turns without --ablate.
    """
    own = config.speculation
    if not own.ablate:
        return
    asked = " ".join(f"--ablate {name}" for name in own.ablate)
    if not COMPONENTS[policy]:
        raise UsageError(f"{asked} has nothing to leave out: policy {policy} has no components "
                         "(pipeinfer and published have; both need -md or --proposer)")
    if policy is Policy.PUBLISHED:
        return
    more = ["--set turns=off"] if turns else []
    if own.adapt and not TUNABLE.issuperset(own.ablate):
        more.append("--set adapt=false")
    # one rank takes turns and looks up unless an option of overlapping runs is given; a tip that
    # waits for its tokens is synchronous speculation
    joins = Ablation.CONTINUOUS in own.ablate and own.tip == "auto" \
        and most_stages(config, ranks) <= JOIN_UP_TO
    alone = ranks == 1 and not features.excluding(features.LOOKUP_ALONE, config.replace(ablate=()))
    if joins or alone:
        more.append("--set tip=alone")
    if more:
        raise UsageError(f"{asked} would change more than that: add {' '.join(more)}, here and to "
                         "the run that you compare with (`pipeinfer ablate` does both)")
