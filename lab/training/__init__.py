"""Training through Transformers: one run, and several compared."""
