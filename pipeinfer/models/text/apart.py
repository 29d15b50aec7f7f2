"""Tokenising in processes of their own, which an untrusted text may end.

The native code of tokenizers recurses along a text: llama.cpp's regular expressions overflow the
stack on a long run of one kind of character, which raises no exception. There such a process ends,
and one text costs an error. Independent of vocabularies and requests.
"""

from __future__ import annotations

import base64
import os
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeinfer.errors import RequestError
from pipeinfer.models.text.sandbox import Helper, HelperDied, HelperLate

_MODULE = "pipeinfer.models.text.tokenizing"
_SHORT = 64 * 1024  #: characters; beyond, a text must not keep short ones waiting
_LARGE = 256 * 1024  #: characters after which the process's memory is returned
SHORT_SECONDS, LONG_SECONDS = 10.0, 60.0


class Apart:
    """The processes that tokenise for one vocabulary: one for short texts, one for long ones."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """path: of the model. A process is started with the first text, or by `start`."""
        hello = {"path": os.fspath(path), "stamp": stamp(path)}
        self._short, self._long = (Helper(_MODULE, lambda: hello) for _ in range(2))

    def start(self) -> None:
        """Start the process for short texts without waiting until it is up."""
        self._short.start()

    def close(self) -> None:
        """End the processes."""
        self._short.close()
        self._long.close()

    def tokens(self, how: str, text: str, detail: bool | str) -> list[int]:
        """Return the tokens of a text; arguments as for `Tokenizer.tokens`.

        Raises RequestError for a text that cannot be tokenised, ends the process or takes too long.
        """
        size = len(text)
        helper, seconds = ((self._short, SHORT_SECONDS) if size <= _SHORT
                           else (self._long, LONG_SECONDS))
        try:
            answer = helper.ask({"how": how, "text": text, "detail": detail}, seconds)
        except HelperLate:
            raise RequestError(f"a text of {size} characters takes longer than {seconds:g} s to "
                               "tokenise: shorten it") from None
        except HelperDied:
            raise RequestError(
                f"the model's tokenizer cannot split a text of {size} characters: it needs more "
                "stack or memory than it may have. Shorten the text, or break long runs of one "
                "kind of character up with spaces and letters") from None
        finally:
            if size > _LARGE:
                helper.close()
        return array("i", base64.b64decode(answer["tokens"])).tolist()


def started(path: str | os.PathLike[str]) -> Apart:
    """Return the processes for a model that is loaded later, the first one started."""
    made = Apart(path)
    made.start()
    return made


def answer_of(tokens: Iterable[int]) -> dict[str, Any]:
    """Return the answer that carries these tokens."""
    return {"tokens": base64.b64encode(array("i", tokens).tobytes()).decode("ascii")}


def stamp(path: str | os.PathLike[str]) -> list[int]:
    """Return size and time of a model's file, or of a folder's tokenizer: another file may have
    other tokens. Empty where there is none."""
    file = Path(path)
    try:
        found = os.stat(file / "tokenizer.json" if file.is_dir() else file)
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns]
