"""Tiny checkpoints in the real Hugging Face format, made by the tests themselves from a seed."""
