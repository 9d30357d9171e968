"""The owner of sandbox state: lifecycle, placement, the watcher, reconciliation.

Every change goes one way: lock rows, decide (pure), write rows, transitions, node
reservations and outgoing messages in one transaction, then send.
"""
