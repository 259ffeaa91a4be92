"""QK-norm and rotary embedding before attention: functions, their checks, plans that take both, the pass alone."""
