"""The tags of the decomposition formats."""

PROMISE, TOKENS, CLOSE = '<promise topic="', '" tokens=', "/>"
ASYNC, ASYNC_END, SYNC = "<async>", "</async>", "<sync/>"
STEP, STEPS_END, ELLIPSIS = "####", "%%%%", "......"
FORK, CHILD = "[Fork]", "[Child]"
