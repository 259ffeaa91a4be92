"""Where "auto" hands a call to torch's own attention: what was measured, the call itself, and what says why."""
