"""maxgain."""
