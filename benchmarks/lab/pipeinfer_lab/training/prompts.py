"""Questions as varied as what people ask, for a model whose answers are learned from.

Does not know: tokens, models.
"""

from __future__ import annotations

import random

_TOPICS = """
the water cycle; photosynthesis; the French Revolution; how bread is baked; black holes; the Roman
army; keeping bees; the stock market; volcanoes; chess openings; the human heart; solar panels;
learning to swim; the printing press; coral reefs; jazz music; vaccines; the silk road; gardening
in a small yard; electric cars; the Great Wall; how to write a letter; dinosaurs; sleep; the moon
landing; recycling; the Amazon river; football; the periodic table; renewable energy; Shakespeare;
coffee; democracy; whales; computer viruses; knitting; earthquakes; the Olympic games; tea;
bicycles; mountain climbing; the Internet; penguins; photography; the Second World War; libraries;
healthy breakfasts; time zones; the ocean floor; friendship; honesty; a lost dog; a lighthouse
keeper; an old clock; a train journey; a small village; a brave mouse; the first day at school; a
storm at sea; a letter from the future; robots; machine learning; databases; the speed of light;
gravity; fractions; prime numbers; probability; triangles; interest rates; budgeting; job
interviews; public speaking; moving house; camping; pasta; soup; an apple pie; a birthday party;
headaches; stress; yoga; running; a new language; Japanese gardens; Egypt; Brazil; Canada; the
Sahara; Paris; New York; trains; bridges; paper; glass; steel; the guitar; the piano; painting;
poetry; cats; horses; owls; ants; trees; roses; clouds; snow; rainbows; the sun; Mars; telescopes;
DNA; bacteria; teeth; bones; memory; dreams; laws; taxes; voting; newspapers; radio; mobile
phones; passwords; open source software; email; meetings
""".replace("\n", " ").split(";")
TOPICS = tuple(topic.strip() for topic in _TOPICS)
QUESTIONS = (
    "Explain {} to a child.", "What should everybody know about {}?", "Tell me about {}.",
    "Write a short story about {}.", "Write a poem about {}.", "Give me five facts about {}.",
    "What are the advantages and disadvantages of {}?", "How has {} changed over time?",
    "Summarize what is important about {} in three sentences.", "Make a list of ideas about {}.",
    "Write an email to a friend about {}.", "What is the best way to begin with {}?",
    "Why does {} matter?", "Describe {} in detail.", "Compare {} with something similar.",
    "Ask me three questions about {} and answer them.", "Correct this sentence: {} are be nice.",
    "Translate into French: I like {}.", "Write a dialogue between two people about {}.",
    "What are common mistakes with {}?", "Give step by step instructions that have to do with {}.",
    "Write a product description that mentions {}.", "What is {}?", "Who is known for {}, and why?",
    "Rewrite more politely: I do not care about {}.", "Write a title and an opening for {}.",
)
_TASKS = """
reverses a string; counts the words of a text; finds the largest number of a list; reads a file
line by line; sorts a list of names; checks whether a number is prime; adds two numbers; removes
duplicates from a list; merges two dictionaries; computes the factorial of a number; converts
Celsius to Fahrenheit; checks for a palindrome; finds the most common word; downloads a web page;
computes an average; generates random passwords; parses a date; draws a triangle of stars;
implements a stack; implements a queue; searches a sorted list; counts vowels; prints the
Fibonacci numbers; flattens a nested list; validates an email address; writes a CSV file; measures
the time of a call
""".replace("\n", " ").split(";")
TASKS = tuple(task.strip() for task in _TASKS)
CODING = (
    "Write a Python function that {}.", "Show me a function in JavaScript that {}.",
    "How do I write a program that {}?", "Write a C function that {}, with comments.",
    "Explain step by step how a function works that {}.", "Write tests for a function that {}.",
)


def question(rng: random.Random) -> str:
    """Something a user might ask."""
    if rng.random() < 0.2:
        return rng.choice(CODING).format(rng.choice(TASKS))
    return rng.choice(QUESTIONS).format(rng.choice(TOPICS))
