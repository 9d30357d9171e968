"""What the edge tells the other services without being asked."""
