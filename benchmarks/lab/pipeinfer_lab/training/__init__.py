"""Training of people's own models: drafts, heads, adapters, PASTA's stages, BiTA's masks."""
