"""What a user looks into a run of his own with: captured attention calls, their errors, and the monitor."""
