"""What components bring: fair pairs, emulated and over ranks."""

from __future__ import annotations

import json
import sys

import pytest

from pipeinfer.cli.ablations import (
    ALL,
    PLAIN,
    TUNED,
    VARIANTS,
    Sample,
    as_text,
    configs_of,
    draw,
    emulated,
    rows_of,
    samples,
    variants_of,
)
from pipeinfer.cli.options import JOB, parse
from pipeinfer.core.policy import COMPONENTS, Policy
from pipeinfer.errors import UsageError
from tests.kit import launch


def sample(speed, tokens=(1, 2)):
    return Sample(tokens, speed, 10, 4, 0.5)


def test_speeds_are_compared_text_by_text():
    speeds = {TUNED: (20, 90), ALL: (10, 30), PLAIN: (5, 15)}
    found = {one.name: [sample(speed) for speed in speeds.get(one.name, (10, 30))]
             for one in VARIANTS}
    found["without cancel"][1] = sample(30, (1, 3))
    rows = {row["variant"]: row for row in rows_of(found)}
    assert rows[TUNED]["ratio"] == pytest.approx((2 * 3) ** 0.5)
    assert rows[TUNED]["spread"] == pytest.approx(0.5**0.5)
    assert rows[PLAIN]["ratio"] == pytest.approx(0.5)
    assert rows[PLAIN]["spread"] == 0
    assert rows[ALL]["cancelled"] == pytest.approx(0.4)
    assert [name for name, row in rows.items() if not row["equal"]] == ["without cancel"]
    assert "without cancel" in as_text("title", list(rows.values()))
    assert as_text("title", list(rows.values())).count("DIFFER") == 1


def test_every_variant_meets_every_text_and_nobody_always_comes_first():
    asked = []
    found = samples(3, lambda variant, number: asked.append((variant.name, number)) or sample(1))
    assert len(set(asked)) == len(asked) == 3 * len(VARIANTS)
    assert all(len(own) == 3 for own in found.values())
    assert len({asked[k * len(VARIANTS)][0] for k in range(3)}) == 3


def test_only_the_component_differs():
    base = parse(["-m", "x.gguf", "-md", "y.gguf"], *JOB).config.job
    configs = configs_of(base)
    for one in COMPONENTS[Policy.PIPEINFER]:
        own = configs[f"without {one.value}"]
        assert own.replace(ablate=()) == configs[ALL]
        assert own.speculation.ablate == (one.value,)
    assert configs[TUNED].replace(adapt=False, tip="alone") == configs[ALL]
    with pytest.raises(UsageError, match="leave them out"):
        configs_of(base.replace(ablate=("cancel",)))
    with pytest.raises(UsageError, match="has no components"):
        configs_of(base.replace(policy="speculative"))


def test_the_published_policy_has_components_of_its_own():
    base = parse(["-m", "x.gguf", "-md", "y.gguf", "--policy", "published"], *JOB).config.job
    assert list(configs_of(base)) == [
        ALL, "without async", "without continuous", "without multibuffer", "without cancel", PLAIN]
    rows = {row["variant"]: row for row in rows_of(samples(
        1, emulated("c", "dolphin-tinyllama", 8, 64), variants=variants_of(Policy.PUBLISHED)))}
    assert all(row["equal"] for row in rows.values())
    for off in ("async", "continuous", "multibuffer", "cancel"):
        assert rows[f"without {off}"]["ratio"] < 1.0
    assert rows["without cancel"]["cancelled"] > 0  # dead, and not signalled


def test_an_emulated_cluster_shows_what_asynchrony_brings(tmp_path):
    rows = {row["variant"]: row for row in rows_of(
        samples(1, emulated("c", "dolphin-tinyllama", 4, 48)))}
    assert all(row["equal"] for row in rows.values())
    assert rows["without async"]["ratio"] < 0.9
    assert rows[PLAIN]["cancelled"] == 0 < rows[ALL]["cancelled"]
    draw(tmp_path / "a.png", "title", list(rows.values()))
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.mpi
@pytest.mark.slow
def test_over_ranks(tmp_path):
    texts = tmp_path / "texts"
    texts.write_text("def f(\n")
    done = launch.run(3, [
        sys.executable, "-m", "pipeinfer", "ablate", "-t", "1", "-n", "24", "--texts", str(texts),
        "--json"])
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["variant"] for row in rows] == [one.name for one in VARIANTS]
    assert all(row["equal"] for row in rows)
    done = launch.run(1, [sys.executable, "-m", "pipeinfer", "ablate"])
    assert done.returncode == 2
    assert "no pipeline to take apart" in done.stderr
