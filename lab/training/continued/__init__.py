"""A model that is trained already, trained on under several attentions: many short pairs of runs, side by side."""
