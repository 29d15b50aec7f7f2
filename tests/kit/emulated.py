"""Small pipelines for the emulator, without profiles."""

from __future__ import annotations

from pipeinfer.emulation.synthetic import SyntheticPair
from pipeinfer.emulation.virtual import Overheads, Scenario, VirtualStage, Wire
from pipeinfer.scheduler.settings import Limits


def scenario(stages=(0.010, 0.010, 0.010), *, row_cost=0.4, draft=0.002, acceptance=0.7, wire=None,
             tokens=96, prompt=24, overheads=None, claimed=None, seed=0, direct=True, **limits):
    """A scenario whose stages take these seconds for a row. limits: fields of `Limits`."""
    wire = wire or Wire(20e-6, 1e9)
    credit = len(stages) + 1
    values = {"n_ctx": prompt + tokens + 8, "exact_width": 16, "credit": credit,
              "partitions": 2 * credit + 8, "draft_max": 1, **limits}
    return Scenario(
        tuple(VirtualStage(lambda rows, one=one: one * (1 + row_cost * (rows - 1)), 8)
              for one in stages),
        (wire,) * credit, lambda rows: draft, Limits(**values),
        SyntheticPair(acceptance, seed=seed, claimed=claimed), row_bytes=4096, prompt=prompt,
        tokens=tokens, overheads=overheads or Overheads(), direct_cancel=direct)
