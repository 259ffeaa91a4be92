"""`python -m sagebwd`: the command line."""

from sagebwd.commands.main import main

main()
