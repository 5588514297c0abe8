"""Auxiliary losses, for training from few images, and the vision tower alone with its query head.

A training without auxiliary losses loads none of this.
"""
