"""A training does not go on with the answers or the weights of another model."""

from __future__ import annotations

import pytest

from pipeinfer.errors import ModelError
from pipeinfer.models.locate import EMBEDDED
from pipeinfer_lab.training.work_folder import NOTE, claim

TARGET, DRAFT = EMBEDDED / "target.gguf", EMBEDDED / "draft.gguf"


def test_files_of_another_model_or_option_are_refused(tmp_path):
    work = tmp_path / "work"
    claim(work, ("answers",), TARGET, seed=1)
    claim(work, ("answers",), DRAFT, seed=1)  # nothing was kept yet
    (work / "answers").write_text("those of the draft")
    claim(work, ("answers",), DRAFT, seed=1)
    with pytest.raises(ModelError, match="holds answers of another model: give another --work"):
        claim(work, ("answers",), TARGET, seed=1)
    with pytest.raises(ModelError, match="of another seed"):
        claim(work, ("answers",), DRAFT, seed=2)
    (work / NOTE).unlink()
    with pytest.raises(ModelError, match="of another model and seed"):
        claim(work, ("answers",), DRAFT, seed=1)
    (work / NOTE).write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        claim(work, ("answers",), DRAFT, seed=1)
