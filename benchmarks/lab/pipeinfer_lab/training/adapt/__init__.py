"""Adapts models that people have: chats as rows, LoRA, training, and merged models."""
