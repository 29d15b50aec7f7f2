"""Prompts in the forms of public data sets, which are recognised by the fields of an entry.

GSM8K (numbers), HumanEval and MBPP (programs, which have no score), LongBench (F1 or ROUGE-L),
XSum and CNN/DailyMail (ROUGE), and MT-Bench with both of its turns. Knows no models and no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeinfer.errors import UsageError
from pipeinfer_lab.quality import scores
from pipeinfer_lab.quality.prompt import Prompt

Entry = Mapping[str, Any]

_SUMMARIES = ("gov_report", "qmsum", "multi_news", "vcsum", "samsum")  #: LongBench's, by ROUGE-L
_IN_A_BLOCK = "Answer with the whole program in one code block."


def prompts_of(entry: Entry, where: str) -> list[Prompt] | None:
    """Return the prompts of an entry in one of the forms; None for any other entry.

    where: names the entry in errors
    Raises UsageError for an entry of a form with values of other types.
    """
    for fields, make in _FORMS:
        if all(field in entry for field in fields) and (make is not _gsm8k
                                                        or "####" in str(entry["answer"])):
            try:
                return make(entry)
            except (TypeError, ValueError) as error:
                raise UsageError(f"{where} has the fields {', '.join(fields)}, but not as the data "
                                 f"set with these fields has them: {error}") from error
    return None


def _turns(entry: Entry) -> list[Prompt]:
    kind = str(entry.get("kind") or entry.get("category") or "")
    references = entry.get("reference") or []
    references = _texts([references] if isinstance(references, str) else references)
    return [Prompt(turn, reference=references[k] if k < len(references) else "",
                   kind=f"{kind}, turn {k + 1}".strip(", ") if k else kind, follows=k > 0)
            for k, turn in enumerate(_texts(entry["turns"]))]


def _humaneval(entry: Entry) -> list[Prompt]:
    start = _text(entry["prompt"])
    question = f"Complete this function. {_IN_A_BLOCK}\n\n```python\n{start.rstrip()}\n```"
    return [Prompt(question, reference=_text(entry.get("canonical_solution", "")))]


def _mbpp(entry: Entry) -> list[Prompt]:
    tests = _texts(entry["test_list"])
    if not tests:
        raise ValueError("it has no tests")
    task = _text(entry.get("text") or entry.get("prompt"))
    question = "\n".join([f"{task} Your program should pass these tests:", "", *tests, "",
                          _IN_A_BLOCK])
    return [Prompt(question, reference=_text(entry["code"]))]


def _gsm8k(entry: Entry) -> list[Prompt]:
    answer = _text(entry["answer"])
    wanted = scores.last_number(answer.rpartition("####")[2])
    if wanted is None:
        raise ValueError("no number follows ####")
    return [Prompt(_text(entry["question"]), lambda text: float(scores.last_number(text) == wanted),
                   lambda text: scores.last_number(text) == wanted,
                   answer.rpartition("####")[0].strip())]


def _longbench(entry: Entry) -> list[Prompt]:
    answers = _texts(entry["answers"])
    if not answers:
        raise ValueError("it has no answers")
    kind, asked = _text(entry.get("dataset", "")), _text(entry["input"])
    summary = kind.removesuffix("_e") in _SUMMARIES
    task = ("Write a summary of the following text." if summary and not asked else
            "Answer by the following text, as briefly as possible.")
    question = f"{task}\n\n{_text(entry['context'])}\n\n{asked}".rstrip()
    one = scores.rouge_l if summary else scores.answer_f1
    return [Prompt(question, lambda text: max(one(text, answer) for answer in answers),
                   lambda text: any(scores.answer_f1(text, answer) == 1.0 for answer in answers),
                   answers[0], kind)]


def _summary(field: str, reference: str, length: str) -> Callable[[Entry], list[Prompt]]:
    def make(entry: Entry) -> list[Prompt]:
        return [Prompt(f"Summarise this text in {length}.\n\n{_text(entry[field])}",
                       reference=_text(entry[reference]))]

    return make


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.40} is no list")
    return [_text(one) for one in value]


#: more fields first, where one form's are among another's
_FORMS: tuple[tuple[tuple[str, ...], Callable[[Entry], list[Prompt]]], ...] = (
    (("prompt", "entry_point", "test"), _humaneval),
    (("code", "test_list"), _mbpp),
    (("input", "context", "answers"), _longbench),
    (("article", "highlights"), _summary("article", "highlights", "three sentences")),
    (("document", "summary"), _summary("document", "summary", "one sentence")),
    (("turns",), _turns),
    (("question", "answer"), _gsm8k),
)
