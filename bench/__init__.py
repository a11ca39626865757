"""Measurements: one command a question, `python -m bench.<name>`, a table and a JSON file each."""
