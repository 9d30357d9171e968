"""Rollouts under faults: ``make chaos``.

A seeded trace of rollouts is run twice on the same system with real containers: once in
peace, once while trainers, services and stores are killed, a job is paused and answers
are lost. What must hold afterwards is judged by :mod:`sim.chaos.verdict`.
"""
