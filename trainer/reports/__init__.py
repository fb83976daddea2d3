"""Reports of recorded runs: a comparison on the console, and as a page."""
