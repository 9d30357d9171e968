"""Where clients come in: verbs, operations, connections to ports."""
