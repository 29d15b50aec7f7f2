"""The workshop for models: the embedded pair, the task model, PASTA's stages, BiTA's masks.

Nothing that serves a user's request may import it.
"""
