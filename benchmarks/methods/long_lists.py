"""Questions that ask for more items than the task model has learned: 12 or 16 of 16 students.

    python -m benchmarks.methods.long_lists questions.jsonl
    pipeinfer compare --prompts questions.jsonl --temp 0 -n 3000 -c 4096 --method pasta

Every second question ends with a line break, which none of those in training does.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np

from pipeinfer.lab.training.tasks import tasks, words

STUDENTS, ASKED = 16, (12,) * 20 + (16,) * 10


def questions(seed: int = 5) -> list[dict[str, object]]:
    """The questions, with the sentences of their right answers."""
    rng, found = np.random.default_rng(seed), []
    for number, asked in enumerate(ASKED):
        names = [words.NAMES[i] for i in rng.permutation(len(words.NAMES))[:STUDENTS]]
        subjects = [words.SUBJECTS[i] for i in rng.integers(len(words.SUBJECTS), size=STUDENTS)]
        grades = [f"{n // 100}.{n % 100:02}" for n in rng.integers(200, 400, size=STUDENTS)]
        known = dict(zip(names, zip(subjects, grades, strict=True), strict=True))
        wanted = [names[i] for i in rng.permutation(STUDENTS)[:asked]]
        lines = "\n".join(f"{name} studies {subject}, {grade}"
                          for name, (subject, grade) in known.items())
        found.append({
            "question": f"Students and their grades\n{lines}\nReport the grades of "
                        f"{tasks.join(wanted)}." + "\n" * (number % 2),
            "answer": [f"{name} studies {known[name][0]} and has reached a grade point average of "
                       f"{known[name][1]} in the current school year." for name in wanted]})
    return found


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
def main(file: Path) -> None:
    """Write the questions."""
    file.write_text("".join(json.dumps(one) + "\n" for one in questions()), encoding="utf-8")


if __name__ == "__main__":
    main()
