"""Coverage-guided fuzzing: `python -m fuzz.checkpoint` (needs the extra `fuzz`)."""
