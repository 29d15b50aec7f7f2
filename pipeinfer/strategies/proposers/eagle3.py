"""EAGLE-3: a head that was trained for the target afterwards (Li et al. 2025).

It reads three rows of the target, the inputs of layers that its file names.
"""

from __future__ import annotations

from pipeinfer.config import Option, OwnOption
from pipeinfer.strategies.proposers.target_head import make_head
from pipeinfer.strategies.spec import ProposerSpec

SPEC = ProposerSpec(
    "eagle3", "an EAGLE-3 head of the target (--eagle)", worker=make_head,
    options={"eagle": OwnOption("", Option(
        ("--eagle",), "str", "EAGLE-3 head of the model (GGUF, or user/repo[:quant] of the hub); "
        "it drafts from rows of its layers. With --proposer, add --proposer eagle3, too.",
        changes_tokens=False))},
    resource="eagle3", usual=2)
