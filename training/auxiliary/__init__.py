"""Auxiliary losses, for training from few images, and the vision tower alone with its query head."""
