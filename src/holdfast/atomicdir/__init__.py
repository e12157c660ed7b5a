"""`AtomicDir`: a directory that is replaced as a whole."""

from .directory import AtomicDir as AtomicDir
