"""Chain-of-Draft: reasoning in a few words per step (arXiv 2502.18600; a baseline).

The method is a prompt only. The response is an ordinary one, so policies, proposers, grammars and
penalties work with it.
"""

from __future__ import annotations

from pipeinfer.strategies.spec import DecomposerSpec

#: as published, appended to the question
TEXT = """

Think step by step, but only keep a minimum draft for each thinking step, with 5 words at most. \
Return the answer at the end of the response after a separator ####."""

SPEC = DecomposerSpec("cod", "Chain-of-Draft: a prompt that asks for short steps", None, text=TEXT)
