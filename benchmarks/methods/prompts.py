"""Prompts written for this project: source and prose for the embedded pair."""

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
