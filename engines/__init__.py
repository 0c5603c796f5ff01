"""SpecDec engines."""
