"""What a sandbox changed, as a layer."""
