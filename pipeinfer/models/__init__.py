"""Model files: GGUF and Hugging Face folders, shards cut from them and their cache, tokenizers,
chat templates and grammars, and the models that the package ships.

Modules here may not depend on backends, ranks or requests.
"""
