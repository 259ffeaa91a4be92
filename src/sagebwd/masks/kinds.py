"""Kinds of mask, by which "auto" tells calls apart, and forms in which kernels read one that is no band."""

from __future__ import annotations

# What hides keys: nothing; the future; a window, causal or not; padding of keys; bounds of packed sequences, causal or
# not; anything else that a mask of elements says.
KINDS = ("full", "causal", "window", "padding", "packed", "mask")
FULL, CAUSAL, WINDOW, PADDING, PACKED, MASK = KINDS
# Elements; or a bit a pair, in words of rows of queries, or of keys (`sagebwd.kernels.masks.sm90_block_lists`).
ELEMENTS, WORDS, WORDS_BY_KEY = "elements", "words", "words by key"
