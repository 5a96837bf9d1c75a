"""The command line: thin functions over `maxgain.study`."""
