"""From conversations to training rows.

Does not know: models, how rows are learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pipeinfer.errors import UsageError
from pipeinfer_lab.training.adapt import apar_rows
from pipeinfer_lab.training.adapt.chats import Chat
from pipeinfer_lab.training.adapt.wording import Wording
from pipeinfer_lab.training.pasta import annotate
from pipeinfer_lab.training.pasta.annotate import Piece
from pipeinfer_lab.training.tasks import formats
from pipeinfer_lab.training.tasks.formats import Example


def row_of(wording: Wording, chat: Chat, *, method: str) -> Example:
    """The training row of an answer for "pasta", "apar", or "plain", the sequential baseline.

    Raises ValueError (`Malformed`) where the chat has no answer, or one whose marks are wrong.
    """
    if chat.answer is None or (method == "pasta" and chat.annotated is None):
        raise ValueError("has no answer, or none with marks")
    if method == "apar":
        return apar_rows.row_of(wording, chat.messages, chat.answer)
    pieces = [Piece("text", chat.answer)]
    if method == "pasta":
        pieces = annotate.parse(str(chat.annotated), chat.answer)
    return formats.pasta_example(wording.flat(chat.messages, pieces))


def rows_of(wording: Wording, chats: Iterable[Chat], context: int, *, method: str,
            report: Callable[[str], None]) -> list[Example]:
    """All rows of up to `context` tokens and positions. Raises UsageError where there is none."""
    rows: list[Example] = []
    unusable = long = 0
    for chat in chats:
        try:
            row = row_of(wording, chat, method=method)
        except ValueError:
            unusable += 1
            continue
        if row.context > context:
            long += 1
        else:
            rows.append(row)
    left = ", ".join(f"{count} {why}" for count, why in (
        (unusable, "without a usable answer"), (long, f"longer than {context} tokens")) if count)
    report(f"{len(rows)} answers to learn from" + (f"; left out: {left}" if left else ""))
    if not rows:
        hint = ": mark what is independent first (pipeinfer train annotate)"
        raise UsageError(f"the data has no usable answer{hint if method == 'pasta' else ''}")
    return rows
