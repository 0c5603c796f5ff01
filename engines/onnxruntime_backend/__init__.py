"""The embedded default: Llamas on a CPU through onnxruntime, without PyTorch.

`backend` imports neither onnxruntime nor onnx; `sessions`, `graph` and `engine` do.
"""
