"""`python -m sagebwd`: the command line."""

from sagebwd_command import main

if __name__ == "__main__":  # processes that it starts import this too
    main()
