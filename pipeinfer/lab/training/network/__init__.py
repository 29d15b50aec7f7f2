"""A small llama in torch: reading, training and writing it."""
