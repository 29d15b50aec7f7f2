"""Files of users that 0.2.0 wrote (commit 5c291fe) are found and read: no shard, no grid and no
journaled request is lost by an upgrade.

tests/older_files/names.json holds the names that it gave to shards and grids for the inputs below;
journal is what it left when it was killed: one request that had ended, one that had not. Widths
are measured again, which takes seconds since layers of each kind stand for the model.
"""

from __future__ import annotations

import json
import types
from pathlib import Path

from pipeinfer.cluster import grid_choice
from pipeinfer.models.shard import shard_name
from pipeinfer.nodes import NodeSettings

FILES = Path(__file__).with_name("older_files")
NAMES = json.loads((FILES / "names.json").read_text())
FINGERPRINT = "0123456789abcdef" * 4


def test_shards_and_grids_have_their_names():
    assert [shard_name(FINGERPRINT, 0, 6), shard_name(FINGERPRINT, 6, 12, "0-128of256")] == \
        NAMES["shard"]
    hosts = [types.SimpleNamespace(host=name, settings=NodeSettings()) for name in "abc"]
    model = types.SimpleNamespace(fingerprint="fp")
    assert grid_choice._path(model, hosts, [1, 2]).name == NAMES["grid"]
