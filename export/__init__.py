"""The model as graphs for ONNX Runtime or `torch.export`, and as a page for the browser."""
