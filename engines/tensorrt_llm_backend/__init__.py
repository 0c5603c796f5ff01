"""TensorRT-LLM on NVIDIA GPUs: probe, engine builds, a worker process, its loop and its own."""
