"""Scores of a text by rule: containment, patterns, numbers, F1 and ROUGE, each from 0 to 1.

ROUGE as in Lin (2004): F1 over lower-case words and numbers, without stemming; ROUGE-L by the
longest common subsequence of the whole texts. Knows no prompts and no models.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_NUMBER = re.compile(r"[-\u2212]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_WORD = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    """What ROUGE counts: runs of letters and digits, in lower case."""
    return _WORD.findall(text.lower())


def rouge_n(n: int, text: str, reference: str) -> float:
    """F1 of the n-grams that two texts have in common."""
    own, wanted = (Counter(zip(*(found[k:] for k in range(n)), strict=False))
                   for found in (words(text), words(reference)))
    return _f1(sum((own & wanted).values()), sum(own.values()), sum(wanted.values()))


def rouge_l(text: str, reference: str) -> float:
    """F1 of the longest common subsequence of words."""
    own, wanted = words(text), words(reference)
    return _f1(_common(own, wanted), len(own), len(wanted))


def contained(wanted: Sequence[str], text: str) -> float:
    """Share of the phrases that occur in a text, as whole words, whatever their case; of signs
    without letters or digits, as they are."""
    have = f" {' '.join(words(text))} "
    return sum(f" {' '.join(words(one))} " in have if words(one) else one in text
               for one in wanted) / len(wanted)


def answer_f1(text: str, answer: str) -> float:
    """F1 of the words of two texts but articles, as LongBench and SQuAD score answers."""
    own, wanted = (Counter(word for word in words(found) if word not in ("a", "an", "the"))
                   for found in (text, answer))
    return _f1(sum((own & wanted).values()), sum(own.values()), sum(wanted.values()))


def last_number(text: str) -> float | None:
    """Return the last number of a text, which may have commas between its digits; None without
    one."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def _common(own: Sequence[str], wanted: Sequence[str]) -> int:
    row = [0] * (len(wanted) + 1)
    for word in own:
        above = 0
        for k, other in enumerate(wanted, 1):
            above, row[k] = row[k], above + 1 if word == other else max(row[k], row[k - 1])
    return row[-1]


def _f1(hits: int, own: int, wanted: int) -> float:
    return 2 * hits / (own + wanted) if hits else 0.0
