"""One module for each kind of leak that text is read from."""
