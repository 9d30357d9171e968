"""Read-only layers and the root file systems composed of them."""
