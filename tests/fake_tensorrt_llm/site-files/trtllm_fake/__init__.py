"""What the modules of the fake tensorrt_llm are made of. It runs in the worker's interpreter."""
