"""llama.cpp: finding its library, binding its C functions, and the C parts that stand in for some.

Nothing here imports backends, models, ranks or requests.
"""
