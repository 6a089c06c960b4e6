"""The browsers of this node: one per shop, shared by all worker processes through the state directory.

Imports nothing: flows and the forwarder use modules of it without Django.
"""
