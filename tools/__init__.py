"""Programs for work on sagebwd, run from the repository's root: `python -m tools.NAME`. CONTRIBUTING.md lists them."""
