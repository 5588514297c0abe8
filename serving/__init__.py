"""The page, the video watcher, labeling and the HTTP service: all ask through the pipeline."""
