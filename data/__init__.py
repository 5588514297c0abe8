"""Images with true questions and answers: scenes, the question grammar, readers, synthetic scenes, datasets."""
