"""The documents of a store in a directory: the states of projections, each in a file that is replaced as a whole.

projections/<name>.json    the content
projections/.era           a random text, changed by each `forget`. A document that was loaded before is not saved
projections/.lock          held while a document is saved, and while `forget` removes all of them
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ... import system
from ...files import read_all, remove, replace_file
from ...locks.lock import Lock
from ..engine import Document

if TYPE_CHECKING:
    from ..engine import Options


class Documents:
    def __init__(self, folder: str, options: Options) -> None:
        self._folder, self._options = folder, options
        self._era = f"{folder}/.era"
        self._lock = Lock(f"{folder}/.lock", timeout=options.lock_timeout, mode=options.mode)

    def load(self, name: str, file: str) -> Document:
        path = f"{self._folder}/{file}.json"
        era = _read(self._era)  # first
        return Document(name, path, _read(path), era)

    def save(self, document: Document, content: bytes) -> None:
        os.makedirs(self._folder, exist_ok=True)
        with self._lock.acquire():
            self._remove(".tmp")  # of processes that were killed
            if _read(self._era) == document.era:
                replace_file(document.where, content, self._options.mode, sync=self._options.durable)

    def remove_all(self) -> None:
        """No document that was loaded before is saved from now on."""
        os.makedirs(self._folder, exist_ok=True)
        with self._lock.acquire():
            replace_file(self._era, os.urandom(8).hex().encode(), self._options.mode, sync=True)
            self._remove(".json", ".tmp")

    def _remove(self, *ends: str) -> None:
        for name in system.listdir(self._folder):
            if name.endswith(ends):
                remove(f"{self._folder}/{name}")


def _read(path: str) -> bytes | None:
    try:
        return read_all(path)
    except FileNotFoundError:
        return None
