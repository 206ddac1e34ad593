"""The compression levels: one module each, all with the interface of `base.Level`."""
