"""The families of models: which layers keep KV, a window of it, or a state, and how much.

`table.geometry` reads a config by the rules of its family; the other files are those rules, and
what they are put together from.
"""
