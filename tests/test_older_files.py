"""Files of users that 0.2.0 wrote (commit 5c291fe) are found and read: nothing that was measured or
journaled is lost by an upgrade.

tests/older_files/names.json holds the names that it gave to remembered figures and shards for the
inputs below; journal is what it left when it was killed: one request that had ended, one that had
not.
"""

from __future__ import annotations

import json
import shutil
import types
from pathlib import Path

import pytest

from pipeinfer.backends import exact_width
from pipeinfer.backends.base import ShardInfo
from pipeinfer.backends.llamacpp.context import LlamaOptions
from pipeinfer.cluster import remembered_grid
from pipeinfer.models.shard import shard_name
from pipeinfer.server.journal import Journal

FILES = Path(__file__).with_name("older_files")
NAMES = json.loads((FILES / "names.json").read_text())
INFO = ShardInfo("llama", (0, 6), 12, True, False, 256, 4096, 2048, 20, 64, 1000, 2000)
FINGERPRINT = "0123456789abcdef" * 4
OPTIONS = (LlamaOptions(type_k="q8_0", type_v="q8_0", flash_attn="on"),
           LlamaOptions(n_ubatch=64, lend=True, layer_callbacks=False))


@pytest.mark.parametrize(("options", "name"), [*zip(OPTIONS, NAMES["widths"], strict=True)])
def test_widths_are_not_measured_again(monkeypatch, options, name):
    """A backend without a decode: a measurement would fail."""
    curve = [1.5] * len(exact_width.CURVE_ROWS)
    monkeypatch.setattr(exact_width, "recall",
                        lambda path: [7, *curve, 0.0] if path.name == name else None)
    backend = types.SimpleNamespace(info=INFO, options=options, exact_limit=16)
    found = exact_width.known_widths(backend, ("fingerprint", "llama 1", 2, 2, "avx2", "fma"))
    assert (found.exact, found.curve) == (7, tuple(curve))


def test_shards_and_grids_have_their_names():
    assert [shard_name(FINGERPRINT, 0, 6), shard_name(FINGERPRINT, 6, 12, "0-128of256")] == \
        NAMES["shard"]
    hosts = [types.SimpleNamespace(host=name) for name in "abc"]
    model = types.SimpleNamespace(fingerprint="fp")
    assert remembered_grid._path(model, hosts, [1, 2]).name == NAMES["grid"]


def test_a_journal_is_read_whole(tmp_path):
    path = tmp_path / "journal"
    shutil.copy(FILES / "journal", path)
    path.chmod(0o600)
    journal = Journal(path)
    records = journal.read()
    journal.close()
    by_key = {record.begun.key: record for record in records.values()}
    ended, open_ = by_key["one"], by_key["two"]
    assert [len(story.rows) for story in ended.stories] == [6, 6]
    assert [story.end.reason for story in ended.stories] == ["length", "length"]
    assert len(open_.stories[0].rows) > 188
    assert open_.stories[0].end is None
    assert open_.begun.asked.seed == 5
    assert open_.begun.asked.max_tokens == 1500
