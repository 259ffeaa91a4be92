"""Plans: all that follows from a call's specification, decided once and kept."""
