"""Four kinds of questions for models that follow instructions, as PDOS's paper asks them and more.

`students` and `documents` are generated, so that no model has seen them, and have one right
answer; `planning` and `general` are written by hand and have none: a judge decides. Knows no
models and no ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from pipeinfer.errors import UsageError
from pipeinfer_lab.quality.prompt import Prompt, by_pattern

STUDENTS, DOCUMENTS = 10, 6  #: in a question
#: women's and men's in turn
_FIRST = ("Lily", "Omar", "Greta", "Hikaru", "Nadia", "Pavel", "Ines", "Tomas", "Wanjiru", "Bruno",
          "Sofia", "Arjun", "Freya", "Mateo", "Leila", "Jonas")
_LAST = ("Wilson", "Haddad", "Lindqvist", "Sawai", "Petrova", "Novak", "Duarte", "Keller",
         "Kamau", "Rossi", "Moreau", "Mehta", "Olsen", "Vargas", "Rahimi", "Becker")
_SCHOOLS = ("Brighton", "Turin", "Uppsala", "Osaka", "Plovdiv", "Brno", "Porto", "Basel")
_FIELDS = ("finance", "chemistry", "painting", "robotics", "history", "botany", "music", "law")
_TOWNS = ("Arvenholm", "Castelrio", "Dunmarsh", "Elmford", "Farrowgate", "Grunwick", "Hollenau",
          "Ivarsund", "Jadestone", "Kirvale", "Lormont", "Mirefield")
_TOPICS = (
    ("drone delivery in cities", "technical feasibility, regulation, social acceptance, business "
     "model and environmental impact"),
    ("a four-day working week", "productivity, pay, health, customers and small firms"),
    ("a public library that lends tools", "demand, space, safety, money and staff"),
    ("solar panels on the roofs of schools", "cost, maintenance, teaching, the grid and weather"),
    ("free buses in a middle-sized town", "budget, traffic, fairness, drivers and shops"),
    ("a garden on a flat roof", "weight, water, plants, access and neighbours"),
    ("teaching children to program", "age, teachers, equipment, motivation and assessment"),
    ("moving a small shop to the internet", "products, payment, delivery, advertising and law"),
    ("a festival of street music", "noise, artists, safety, money and litter"),
    ("recycling in a large office", "habits, bins, collection, cost and measurement"),
    ("renting out bicycles at stations", "storage, repair, prices, theft and season"),
    ("a canteen that cooks without meat", "taste, nutrition, suppliers, cost and acceptance"),
    ("night trains between large cities", "track time, comfort, prices, staff and competition"),
    ("a newspaper for a small valley", "news, readers, advertising, printing and volunteers"),
    ("rainwater for flushing toilets", "tanks, filters, plumbing, law and savings"),
)
_GENERAL = (
    "What should I think about before I adopt a dog?",
    "Explain to a ten-year-old how rain comes about.",
    "Write a short letter in which a tenant asks the landlord to repair the heating.",
    "What are the differences between a virus and a bacterium?",
    "Give me a plan for three days in a city that I have never been to.",
    "How does a bicycle stay upright?",
    "What are good and bad sides of working from home?",
    "Tell a short story about a lighthouse keeper who finds a message in a bottle.",
    "How can I learn to cook with little time?",
    "Why do leaves change their colour in autumn?",
    "Compare trains and planes for a journey of 600 km.",
    "What makes a password safe?",
    "How do vaccines protect people who are not vaccinated?",
    "What should a good job application contain?",
    "Describe how bread is made, from the grain to the loaf.",
)


def students(rng: np.random.Generator) -> Prompt:
    """Whose grade lies in a range, among ten resumes (PDOS, section 4.1)."""
    names = _people(rng, STUDENTS)
    grades = rng.choice(np.arange(150, 480, 12), STUDENTS, replace=False) / 100
    chosen = int(rng.integers(STUDENTS))
    low, high = grades[chosen] - 0.05, grades[chosen] + 0.05
    lines = [
        f"The student named {name} is {rng.integers(19, 31)} years old, graduated from the "
        f"University of {rng.choice(_SCHOOLS)} with a GPA of {grade:.2f}, and is interested in "
        f"{rng.choice(_FIELDS)}." for name, grade in zip(names, grades, strict=True)]
    name = names[chosen]
    return by_pattern(
        f"Here are {STUDENTS} students' resumes:\n\n" + "\n".join(lines)
        + f"\n\nQuestion: Which student has a GPA between {low:.2f} and {high:.2f}? Please give "
        'your final answer (the student\'s name) in the format of "name: answer"\n'
        "You should check every student to judge whether he meets the requirement in your "
        "reasoning process.",
        re.compile(rf"name\W*{name}", re.IGNORECASE), reference=f"name: {name}", kind="students")


def documents(rng: np.random.Generator) -> Prompt:
    """A question whose answer takes two of six passages (multi-document QA)."""
    half, towns = DOCUMENTS // 2, [str(town) for town in rng.permutation(_TOWNS)]
    names = [*_people(rng, half, _FIRST[::2]), *_people(rng, half, _FIRST[1::2])]
    texts = [f"{names[k]} was a {rng.choice(_FIELDS)} teacher and the wife of {names[half + k]}. "
             f"They had {rng.integers(2, 6)} children." for k in range(half)]
    texts += [f"{names[k]} was born in {towns[k]} and grew up in {towns[half + k]}, where she "
              f"learned {rng.choice(_FIELDS)}." for k in range(half)]
    chosen = int(rng.integers(half))
    order = rng.permutation(DOCUMENTS)
    passages = "\n\n".join(f"Passage {k}: {texts[i]}" for k, i in enumerate(order, 1))
    town = towns[chosen]
    return by_pattern(  # a text that copies the passages has answered nothing
        f"{passages}\n\nQuestion: Where was the wife of {names[half + chosen]} born?\nYou should "
        "check each document one by one (no matter whether it is relevant), and analyze its "
        "content to judge whether it provides information about the question. After analysis, "
        "output your final answer in the format of 'Answer: your concise answer'.",
        re.compile(rf"answer(?!.*answer).*\b{town}\b", re.IGNORECASE | re.DOTALL),
        reference=f"Answer: {town}", kind="documents")


def _people(rng: np.random.Generator, count: int, first: Sequence[str] = _FIRST) -> list[str]:
    pairs = rng.permutation(len(first) * len(_LAST))[:count]
    return [f"{first[i // len(_LAST)]} {_LAST[i % len(_LAST)]}" for i in pairs]


def _written(questions: Sequence[str], kind: str) -> Iterator[Prompt]:
    return (Prompt(question, kind=kind) for question in questions)


_GENERATED: Mapping[str, Callable[[np.random.Generator], Prompt]] = {
    "students": students, "documents": documents}
_WRITTEN = {
    "planning": [f"Please analyze the challenges of {topic} and propose at least one solution for "
                 f"each. Require analysis from five different dimensions: {sides}, and ultimately "
                 "form a comprehensive evaluation." for topic, sides in _TOPICS],
    "general": _GENERAL}
KINDS = (*_GENERATED, *_WRITTEN)


def written(kind: str) -> int:
    """How many questions of a kind are written by hand; 0 for generated ones."""
    return len(_WRITTEN.get(kind, ()))


def prompts(kind: str, count: int, seed: int = 1) -> list[Prompt]:
    """`count` questions of a kind, or of each kind in turn (`mixed`).

    Raises UsageError for an unknown kind, or more than there are of a written one.
    """
    if kind == "mixed":
        each = [prompts(one, -(-count // len(KINDS)), seed) for one in KINDS]
        return [one for row in zip(*each, strict=True) for one in row][:count]
    if kind in _GENERATED:
        return [_GENERATED[kind](np.random.default_rng([seed, k])) for k in range(count)]
    if kind not in _WRITTEN:
        raise UsageError(f"--kind {kind}: choose from mixed, {', '.join(KINDS)}")
    if count > len(_WRITTEN[kind]):
        raise UsageError(f"--kind {kind} has {len(_WRITTEN[kind])} questions, not {count}: ask for "
                         "fewer with --tasks, or give your own with --prompts")
    return list(_written(_WRITTEN[kind][:count], kind))
