"""The version of Holdfast, where filelock has its own."""

from __future__ import annotations

import sys

__all__ = ["__version__", "version"]

# The package itself is above all layers, and so is not imported here.
version: str = sys.modules[__name__.partition(".")[0]].__version__
__version__ = version
