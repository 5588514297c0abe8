"""Training: losses beside the answers, and the library's Trainer with them."""
