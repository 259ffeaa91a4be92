"""`python -m sagebwd`: the command line."""

from sagebwd.cli.main import main

if __name__ == "__main__":  # processes that it starts import this too
    main()
