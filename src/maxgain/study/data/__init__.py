"""The table of data sets, and how each is laid out on disk, read, split and fetched."""
