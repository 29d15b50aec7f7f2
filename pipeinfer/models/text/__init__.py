"""Text and tokens: tokenizers, chat templates, grammars and their masks, stop strings.

Untrusted input (templates, grammars) is processed in a sandbox. Modules here may not depend on
requests or ranks.
"""
