"""Positions of the byte ranges that locks use. All lie past any content and below 2**63 (docs/formats.md)."""

RANGE_START, RANGE_LENGTH = 0, 1 << 62  # the lock itself, where a range stands in for flock
REMOVAL_BYTE = 1 << 62  # its holder may remove the file, or is about to
LIVENESS_BYTE = REMOVAL_BYTE + 1  # locked while the process that holds a lock file lives
FIRST_SLOT, MAX_SLOTS = REMOVAL_BYTE + 16, 1 << 20  # one byte per permit of a semaphore
