"""Qwen3 in six files: configuration, weights, graph, batches, model, registration."""
