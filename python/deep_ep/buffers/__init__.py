"""Kept for code that imports deep_ep.buffers.legacy."""
