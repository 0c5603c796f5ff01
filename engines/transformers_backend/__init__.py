"""The reference back end: any causal language model that transformers loads, on CPU or CUDA.

`backend` imports no torch; `engine`, `model`, `tokenizer` and `convert` do.
"""
