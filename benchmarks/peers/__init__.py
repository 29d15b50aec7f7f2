"""pipeinfer beside llama.cpp's own programs, on the same files in the same run."""
