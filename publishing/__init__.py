"""From a model folder to the Hub: what goes up, whether it holds, and the upload."""
