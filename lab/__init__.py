"""The laboratory: training runs, their comparisons, and studies of errors; `python -m lab --help` in a clone."""
