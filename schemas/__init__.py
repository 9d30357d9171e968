"""Every message, subject, stream and durable consumer of dsec: the map of the system.

Owns: wire types (one model a type and version) and names on the bus. Does not
own: behaviour. A type inside a version only ever gains optional fields; anything
else is a new version. ``python -m schemas.export`` writes what others read:
JSON Schema, AsyncAPI and the SDK's wire types.
"""
