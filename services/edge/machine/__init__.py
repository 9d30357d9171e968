"""What the kernel of this machine does for sandboxes: groups, memory, protection."""
