"""Training: auxiliary losses, the trainer, training runs, and training of the vision tower alone."""
