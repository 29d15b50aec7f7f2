"""A judge's verdicts on pairs of answers, in both orders. Knows no training."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pipeinfer_lab.training.pasta.bonbon import win_ratio
from pipeinfer_lab.training.pasta.endpoint import Endpoint, EndpointError

_JUDGE = """\
Two assistants answered the same question. Say which answer is better, and how sure you are.
Reply with one line: the letter A or B, a blank, and a number from 0 to 1.

Question:
{prompt}

Answer A:
{first}

Answer B:
{second}"""


def compare(endpoint: Endpoint, prompt: str, answer: str, other: str) -> list[tuple[bool, float]]:
    """Whether ``answer`` wins and the judge's confidence, in both orders; unreadable verdicts are
    left out."""
    verdicts = []
    for swapped in (False, True):
        first, second = (other, answer) if swapped else (answer, other)
        text = _JUDGE.format(prompt=prompt, first=first, second=second)
        try:
            reply = endpoint.ask([{"role": "user", "content": text}])
        except EndpointError:
            continue
        match = re.match(r"\s*([AB])\b[\s:,]*([01](?:\.\d+)?)?", reply)
        if match:
            wins = (match.group(1) == "A") != swapped
            verdicts.append((wins, min(1.0, float(match.group(2) or 1.0))))
    return verdicts


def quality_against(endpoint: Endpoint, prompt: str, answer: str, others: Iterable[str | None]
                    ) -> float:
    """PASTA's quality of an answer: confidence in wins over confidence in losses, against each of
    ``others`` that is not None, in both orders."""
    return win_ratio([verdict for other in others if other is not None
                      for verdict in compare(endpoint, prompt, answer, other)])
