"""The browsers of this node: one per shop, shared by all worker processes through the state directory.

Imports nothing: the Playwright driver and the spawner run as processes without Django.
"""
