"""A strict stand-in for TensorRT-LLM: it refuses what the library would, and really decodes."""
