"""Where guesses come from: a draft model, the text itself, n-grams, learned masks, or several in
turn.

Pure: a proposer works on any whole-model backend and any tree. Must not know threads or clocks.
"""
