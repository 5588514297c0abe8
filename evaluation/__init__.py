"""How good a model is: predictions, figures of them, reports and pictures."""
