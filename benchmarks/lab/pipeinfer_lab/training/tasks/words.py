"""The closed vocabulary of the generated tasks.

Does not know: how tasks are put together. Every word here becomes one token with and one without
a leading blank.
"""

from __future__ import annotations

NAMES = tuple(
    """Alice Bob Carol David Emma Frank Grace Henry Irene Jack Karen Leo Maria Nina Oscar Paula
    Rosa Simon Tina Ursula Victor Wendy Yvonne Zoe Adam Bella Cyril Diana Edgar Fiona George Helen
    Ivan Julia Kevin Laura Martin Nora Oliver Petra Ralph Sarah Thomas Vera Walter Clara Hugo
    Olga""".split()
)
SUBJECTS = tuple(
    """biology chemistry physics history music law medicine geography economics philosophy
    astronomy logic""".split()
)
GOODS = tuple(
    """apples pears plums lemons onions carrots pens brushes lamps chairs tables bottles boxes
    ropes nails screws candles towels pillows blankets spoons forks plates cups""".split()
)
SEGMENTS = tuple("AB CD EF GH IJ KL MN OP QR ST UV WX".split())
CITIES = tuple("Rome Paris London Berlin Madrid Vienna Prague Lisbon Dublin Athens Oslo".split())
BUDGETS = ("low", "medium", "high")
#: What an aspect of a plan means with a low, medium and high budget.
ASPECTS = {
    "transport": ("going by bus", "going by train", "going by taxi"),
    "food": ("buying at the market", "eating in small cafes", "dining in fine restaurants"),
    "lodging": ("sleeping in a hostel", "staying in an inn", "staying in a grand hotel"),
    "museums": ("visiting on free mornings", "visiting with day tickets", "booking private tours"),
    "walks": ("walking without a guide", "walking with a map", "walking with a guide"),
    "evenings": ("meeting in the park", "watching a film", "attending the opera"),
    "gifts": ("sending postcards", "buying books", "buying jewels"),
    "sports": ("running along the river", "renting a bicycle", "playing golf"),
}
#: First line of an answer whose parts are laid out as parallel steps.
PREAMBLE = "Answers"
