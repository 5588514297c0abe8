"""Auxiliary losses, for training from few images, and the evaluation of a vision tower alone.

A training without auxiliary losses loads none of this.
"""
