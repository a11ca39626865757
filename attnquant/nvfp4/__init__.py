"""NVFP4: the format, its reference codec, the scale searches, the coverage and the accounting."""
