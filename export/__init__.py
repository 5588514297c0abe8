"""The model as graphs for ONNX Runtime or `torch.export`, and a runtime that answers with them."""
