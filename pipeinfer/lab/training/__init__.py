"""Training: the embedded pair, the task model, PASTA's stages, BiTA's masks."""
