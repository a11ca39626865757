"""Gemma 3, text: `Gemma3ForCausalLM` on the layers of `attnquant.nn`."""
