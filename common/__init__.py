"""Files, command-line options, images in folders and loading of weights, which all rooms share; not on the Hub."""
