"""Files that run in the interpreter of TensorRT-LLM: standard library and that library only."""
