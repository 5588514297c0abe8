"""Answering: one `Answerer` for the command line, the page, the video watcher, labeling and serving."""
