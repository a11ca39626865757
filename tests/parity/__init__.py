"""Tests that need torch: they make the golden answers anew and compare."""
