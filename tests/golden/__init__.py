"""What the reference, Hugging Face transformers, makes of fixed prompts; kept in small files."""
