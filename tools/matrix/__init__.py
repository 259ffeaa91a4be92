"""Every width, form and recipe on a GPU: `python -m tools.matrix`."""
