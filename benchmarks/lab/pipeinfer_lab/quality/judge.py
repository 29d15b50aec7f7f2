"""A judge model behind an OpenAI-compatible address: marks from 1 to 5, and pairs.

Marks by the prompt of the PDOS paper (appendix C). Pairs in both orders; their win rate is also
controlled for length, as AlpacaEval 2 does it, but without its difficulty of each question, which
needs more than two models. Knows texts only.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

import numpy as np

from pipeinfer_lab.training.pasta.endpoint import Endpoint, EndpointError
from pipeinfer_lab.training.pasta.verdicts import compare

_MOST_TOKENS = 4000
_RIDGE = 0.01  #: keeps the fit finite where one side wins always

RATING = """You are an assistant skilled in evaluating the quality of responses.
Please act as an impartial judge to assess the accuracy, usefulness, and clarity of an AI \
assistant's response to a user's question.
I will provide the question, reference answer, and the AI assistant's response.
You need to evaluate the quality of the AI assistant's response and give a score from 1 to 5.
1 point: The response is completely incorrect, unhelpful to the question, or poorly formatted \
with low readability.
2 points: The response is basically incorrect, somewhat helpful to the question, or somewhat \
poorly formatted with low readability.
3 points: The response is basically correct, moderately helpful to the question, or moderately \
formatted with average readability.
4 points: The response is correct, helpful to the question, or well-formatted with good \
readability.
5 points: The response is completely correct, highly helpful to the question, and neatly \
formatted with excellent readability.
Please provide your evaluation in the format: "Reason: ... Score: ...".
User's question: {question}
Reference answer: {reference}
AI assistant's answer: {answer}"""


def rate(endpoint: Endpoint, question: str, reference: str, answer: str) -> float | None:
    """The judge's mark, 1 to 5; None where there is none to be read."""
    asked = re.sub(r"\{(question|reference|answer)\}", lambda found: {
        "question": question, "reference": reference or "(none)", "answer": answer}[found[1]],
        RATING)
    try:
        reply = endpoint.ask([{"role": "user", "content": asked}], max_tokens=_MOST_TOKENS)
    except EndpointError:
        return None
    marks = re.findall(r"[Ss]core\W{0,4}([1-5])(?!\d)", reply)
    return float(marks[-1]) if marks else None


def prefer(endpoint: Endpoint, question: str, answer: str, other: str) -> float | None:
    """Share of the two orders in which the answer beats the other one; None where no verdict could
    be read. Equal texts share: the judge is not asked."""
    if answer == other:
        return 0.5
    verdicts = compare(endpoint, question, answer, other)
    return statistics.fmean(won for won, _ in verdicts) if verdicts else None


def controlled(wins: Sequence[float], longer: Sequence[int]) -> float | None:
    """The win rate that answers of equal length would have; None with fewer than two.

    longer: by how many characters each answer is longer. Fits wins to a logistic function of the
    difference, tanh of it in standard deviations, and takes it at 0.
    """
    if len(wins) < 2:
        return None
    spread = float(np.std(longer)) or 1.0
    rows = np.stack([np.ones(len(wins)), np.tanh(np.asarray(longer, float) / spread)], axis=1)
    target, weights = np.asarray(wins, float), np.zeros(2)
    for _ in range(50):
        chance = 1.0 / (1.0 + np.exp(-rows @ weights))
        slope = rows.T @ (target - chance) - _RIDGE * weights
        bend = (rows * (chance * (1.0 - chance))[:, None]).T @ rows + _RIDGE * np.eye(2)
        step = np.linalg.solve(bend, slope)
        weights = weights + np.clip(step, -2.0, 2.0)
        if float(np.abs(step).max()) < 1e-9:
            break
    return float(1.0 / (1.0 + np.exp(-weights[0])))
