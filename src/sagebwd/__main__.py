"""`python -m sagebwd`: the command line."""

from sagebwd.cli import main

main()
