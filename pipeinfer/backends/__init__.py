"""What multiplies matrices: layers of a model on llama.cpp, on torch, or a toy, behind one
protocol; which widths of a run give the same bits, and what rows cost.

Must not know requests, policies or transports.
"""
