"""Layers written as EROFS: by imagesvc from what is imported, by edges from sandboxes.

Owns: the tree of a layer, reading one from a folder, merging trees, the two files a layer
becomes, the check of the result. Does not own: archives and other sources, where layers
are kept (:mod:`shared.blobs`), mounts that sandboxes use.
"""
