"""Compiled mode: hook points that are built into the engine's graphs, read and written through tables.

    op        the custom op that a graph calls at each built point
    tables    what it reads: device memory at fixed addresses, refilled between steps
    programs  the edits of one request as words in that memory
    kernel    the op on a GPU (Triton)       host  the op on a processor
    taps      fills the tables for each step, takes captured rows out after it
    proof     the proof at load: the graph against the same modules run without it
    limits    what fits, known before torch is imported
"""
