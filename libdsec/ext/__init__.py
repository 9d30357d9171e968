"""Providers of dsec for harnesses, each behind an extra of its own name.

Owns: nothing but the folder. Each provider imports its harness; the SDK never
imports a provider.
"""
