"""The compression levels: one module each, all with the interface of `base.Level`.

`registry` lists them; adding a level is one module here and one name there.
"""
