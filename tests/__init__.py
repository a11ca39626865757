"""The tests, which mirror the package; `tiny` and `golden` are what they share."""
