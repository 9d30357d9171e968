"""The edge's side of aether, the agent inside every sandbox."""
