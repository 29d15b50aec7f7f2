"""PDOS with steps that are drafts: the fifth row of Table 1 of the PDOS paper.

The paper does not print how it joins the two prompts. Chain-of-Draft's separator is the marker of
PDOS, so only its rule for the length of a step is used.
"""

from __future__ import annotations

from msgspec import structs

from pipeinfer.strategies.decomposers import pdos

TEXT = pdos.TEXT + """

Only keep a minimum draft for each step, with 5 words at most."""

SPEC = structs.replace(
    pdos.SPEC, name="cod-pdos", help="pdos with Chain-of-Draft's rule: 5 words for each step",
    text=TEXT)
