"""Tables of README and pages, from results files: `python -m tools.tables`. A module has the tables of one page."""
