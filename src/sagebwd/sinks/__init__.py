"""Attention sinks as parameters: one learned logit a query head that stands beside the keys, with a value of zero."""
