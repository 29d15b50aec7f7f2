"""The names of policies, of ablations and of the ways a cancellation travels."""

from __future__ import annotations

import enum


class Policy(enum.StrEnum):
    """How to decode: which runs are issued next (`--policy`)."""

    ITERATIVE = "iterative"
    SPECULATIVE = "speculative"
    PIPEINFER = "pipeinfer"


class Ablation(enum.StrEnum):
    """A component of PipeInfer that can be switched off; no ablation changes a token."""

    ASYNC = "async"
    CONTINUOUS = "continuous"
    MULTIBUFFER = "multibuffer"
    CANCEL = "cancel"


class CancelPath(enum.StrEnum):
    """How a cancellation reaches the stages."""

    BACKWARD = "backward"  #: head, last stage, ..., first stage (the paper's)
    DIRECT = "direct"  #: head to every stage at once
