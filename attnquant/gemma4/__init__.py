"""Gemma 4: `Gemma4ForConditionalGeneration` and its text-only 12B line on `attnquant.nn`."""
