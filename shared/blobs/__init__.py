"""Where layers are kept: one interface over folders and object stores.

Owns: the layout of a layer in a store, atomic appearance, bounded transfers, typed
errors. Does not own: names and references (imagesvc's database), which layers may go,
caching on a node. imagesvc writes, nodes read; both take a store by its URL.
"""
