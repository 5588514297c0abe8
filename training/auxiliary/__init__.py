"""Auxiliary losses, for training from few images. A training without them loads none of this."""
