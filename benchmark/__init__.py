"""How fast the model is, beside models of its size that are built otherwise and beside what the machine can do."""
