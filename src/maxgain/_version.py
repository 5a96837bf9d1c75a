"""The version, in the one place that the build, the package and the records read."""

__version__ = "0.2.0"
