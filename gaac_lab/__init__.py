"""The helper package behind the notebooks: it measures, verifies, plots and runs.

It holds no compression of its own; that is the business of the package `gaac`.
"""

__version__ = "0.1.0"
