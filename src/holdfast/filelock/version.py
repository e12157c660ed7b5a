"""The version of Holdfast, where filelock has its own."""

from __future__ import annotations

from .. import __version__

__all__ = ["__version__", "version"]

version: str = __version__
