"""llama.cpp: search for its library, bindings of its C functions, and the C parts that replace
some.

Nothing here imports backends, models, ranks or requests.
"""
