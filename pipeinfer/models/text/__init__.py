"""Text and tokens: tokenizers, chat templates, grammars and the masks they make, stop strings.

What a stranger wrote (templates, grammars) runs in a sandbox. Must not know requests or ranks.
"""
