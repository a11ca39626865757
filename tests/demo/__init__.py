"""The demo checkpoint, on a tiny GGUF file made here and on the real one."""
