"""What is read from model files: GGUF and Hugging Face folders, shards cut from them and their
cache, tokenizers, chat templates and grammars, and the models that the package ships.

Must not know backends, ranks or requests.
"""
