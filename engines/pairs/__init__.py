"""Choosing a pair: what small files say of two models, and whether one can draft for the other."""
