"""The "Normal" of the PDOS paper (section 4.1): the prompt of PDOS, decoded in sequence.

Speed-ups of PDOS are the paper's over this one. Over the bare question they would charge PDOS for
its longer prompt, and compare answers of other lengths and formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeinfer.strategies.decomposers import pdos
from pipeinfer.strategies.spec import DecomposerSpec, Writer


def open_response(writer: Writer, messages: Sequence[Mapping[str, str]]
                  ) -> tuple[tuple[int, ...], None]:
    """Return the prompt of PDOS; the response is an ordinary one."""
    return writer.encode(messages, "pdos", pdos.TEXT), None


SPEC = DecomposerSpec(
    pdos.SPEC.baseline, "the prompt of pdos, decoded in sequence: what pdos is compared with",
    None, open=open_response)
