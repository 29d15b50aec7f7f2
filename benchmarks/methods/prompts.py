"""Prompts written for this project: source and prose for the embedded pair, questions for a chat
model."""

PROMPTS = (
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n",
    "class Stack:\n    \"\"\"A last-in, first-out collection.\"\"\"\n\n    def __init__(self):\n",
    "def read_lines(path):\n    with open(path) as file:\n",
    "The module defines the following functions:\n\n",
    "if __name__ == '__main__':\n",
    "    def __repr__(self):\n        return ",
    "for name, value in sorted(self.items()):\n",
    "class Node:\n    def __init__(self, value, left=None, right=None):\n"
    "        self.value = value\n",
    "# Return the number of elements that are\n",
    "def test_empty(self):\n        self.assertEqual(",
    "try:\n    import json\nexcept ImportError:\n",
    "Raises ValueError if the argument is not",
    "parser = argparse.ArgumentParser(description='Count words in a file')\n",
    "async def fetch(session, url):\n    async with session.get(url) as response:\n",
    "def gcd(a, b):\n    \"\"\"Greatest common divisor of a and b.\"\"\"\n    while b:\n",
    "logger = logging.getLogger(__name__)\n\n\ndef main(argv=None):\n",
    "    if not isinstance(other, type(self)):\n        return NotImplemented\n",
    "The following example shows how a context manager closes its file when the block is left, "
    "whether or not an exception was raised inside it. The object returned by open() has the "
    "methods __enter__() and __exit__(), and the with statement calls them in turn. A class of "
    "one's own can do the same:\n\n    class Timer:\n        def __enter__(self):\n            "
    "self.start = time.perf_counter()\n            return self\n\n        def __exit__(self, *exc"
    "):\n            self.elapsed = time.perf_counter() - self.start\n\n",
    "def matrix_multiply(a, b):\n    rows, columns, inner = len(a), len(b[0]), len(b)\n    result"
    " = [[0] * columns for _ in range(rows)]\n    for i in range(rows):\n        for j in range("
    "columns):\n            for k in range(inner):\n                result[i][j] += a[i][k] * b["
    "k][j]\n    return result\n\n\ndef transpose(matrix):\n    return [list(row) for row in zip("
    "*matrix)]\n\n\ndef identity(size):\n",
)

_STORY = (
    "Marta Lindqvist, the keeper of the lighthouse on Oxey Island, found the bottle on a Tuesday "
    "in March. It held a letter from Jonas Pereira, a fisherman from Nazare, who had written it "
    "forty-one years earlier. Marta Lindqvist answered the letter the same evening. Three weeks "
    "later a reply came: Jonas Pereira was alive, he was seventy-eight years old, and he wanted to "
    "see the lighthouse on Oxey Island before he died. He arrived on the second of June.")
_MINUTES = (
    "Minutes of the housing cooperative Birkenhof, 14 May. Present: Ms Adler (chair), Mr Okafor, "
    "Ms Tanaka, Mr Brandt. The roof of building C leaks; Mr Okafor asks three firms for offers by "
    "30 May. The bicycle shed is extended by twelve places; Ms Tanaka orders the racks. The rent "
    "for the guest room rises from 25 to 30 euros a night from 1 July. The next meeting is on 11 "
    "June at 7 pm in the common room.")
_CODE = (
    "def total_price(items, discount):\n    total = 0\n    for item in items:\n        if "
    "item.quantity > 0:\n            total = total + item.price * item.quantity\n    if discount "
    "> 0:\n        total = total - total * discount\n    return total\n")
_CLASS = (
    "class Account:\n    def __init__(self, owner, balance=0):\n        self.owner = owner\n"
    "        self.balance = balance\n\n    def deposit(self, amount):\n        self.balance += "
    "amount\n\n    def withdraw(self, amount):\n        if amount > self.balance:\n            "
    "raise ValueError('not enough money')\n        self.balance -= amount\n")
_LETTER = (
    "Dear Mr Collins, thank you for your order of 3 November. Unfortunately the oak table that you "
    "ordered is out of stock until the end of January. We can send you the walnut table at the "
    "same price, or we can refund the 480 pounds that you paid. Please let us know what you "
    "prefer. Yours sincerely, Helen Ward")
_LIST = (
    "apples 2.40\nbread 3.10\ncoffee 7.80\nbutter 2.95\neggs 3.60\nrice 1.85\ntomatoes 2.20\n"
    "cheese 5.40\n")

#: questions to a chat model, by kind
CHATS: dict[str, tuple[str, ...]] = {
    "questions": (
        "What is photosynthesis?", "How do I boil an egg?",
        "Give me three tips for learning a language.", "Explain why the sky is blue.",
        "What should I pack for a weekend in the mountains?",
        "Write a letter to my landlord about a broken window.",
    ),
    "about a text": tuple(f"{text}\n\n{wish}" for text, wish in (
        (_STORY, "Summarize this text in three sentences."),
        (_STORY, "Who are the people in this text, and what does each of them do?"),
        (_MINUTES, "List who has to do what."),
        (_MINUTES, "Write an e-mail to all members that says what was decided."),
        (_LETTER, "Explain to Mr Collins in simple words what this letter says."),
        (_LIST, "Which three things cost the most? Explain."),
    )),
    "edits": tuple(f"{wish}\n\n{text}" for text, wish in (
        (_CODE, "Add a docstring to this function and print the whole function."),
        (_CODE, "Rename the variable total to price in this function:"),
        (_CLASS, "Add a method transfer to this class and print the whole class."),
        (_CLASS, "Add type hints to this class:"),
        (_LETTER, "Correct this letter and write it again, word by word:"),
        (_LIST, "Write this list as a Markdown table with two columns."),
    )),
    "programs": (
        "Write a Python function that returns the larger of two numbers.",
        "Write a Python class for a stack with push, pop and peek.",
        "Write a JavaScript function that sums an array.",
        "Write a Python script that counts the words of a file.",
        "Write an SQL query that lists the ten newest orders.",
        "Write a bash script that renames all .txt files to .md.",
    ),
}
