"""Proposers, the sources of speculative tokens: a draft model, prompt lookup, lookahead, BiTA's
masks, or several of them.

Pure: a proposer works on any whole-model backend and any tree. Modules here may not depend on
    threads or clocks.
"""
