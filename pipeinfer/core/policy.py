"""The names of policies, of ablations and of the ways a cancellation travels."""

from __future__ import annotations

import enum


class Policy(enum.StrEnum):
    """How to decode: which runs are issued next (`--policy`)."""

    ITERATIVE = "iterative"
    SPECULATIVE = "speculative"
    PIPEINFER = "pipeinfer"
    PUBLISHED = "published"  #: PipeInfer by the rules of its paper, for comparisons


#: the policies for real use: all but PUBLISHED, which serves comparisons only
PRACTICAL = (Policy.ITERATIVE, Policy.SPECULATIVE, Policy.PIPEINFER)


class Ablation(enum.StrEnum):
    """A component that can be switched off, without changing a token (COMPONENTS: which policy has
    it).
    """

    ASYNC = "async"
    CONTINUOUS = "continuous"
    MULTIBUFFER = "multibuffer"
    ALTERNATIVES = "alternatives"
    CANCEL = "cancel"


#: the components of each policy, in the order of tables
COMPONENTS: dict[Policy, tuple[Ablation, ...]] = {
    Policy.ITERATIVE: (),
    Policy.SPECULATIVE: (),
    Policy.PIPEINFER: (Ablation.ASYNC, Ablation.CONTINUOUS, Ablation.ALTERNATIVES,
                       Ablation.CANCEL),
    Policy.PUBLISHED: (Ablation.ASYNC, Ablation.CONTINUOUS, Ablation.MULTIBUFFER,
                       Ablation.CANCEL),
}


class CancelPath(enum.StrEnum):
    """How a cancellation reaches the stages."""

    BACKWARD = "backward"  #: head, last stage, ..., first stage (the paper's)
    DIRECT = "direct"  #: head to every stage at once
