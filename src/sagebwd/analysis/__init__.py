"""Error studies: random inputs, models layer by layer, ablations of recipes, attention sinks, causality."""
