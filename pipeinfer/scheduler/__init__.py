"""What decides: `Scheduler.handle(event) -> instructions` over lanes, the token tree, sequence
ids, guesses in order of their worth, prompts that are remembered, and the controller that tunes
it.

Pure. Must not know ranks, transports, models, clocks or threads: events bring in all it needs.
"""
