"""The figures of the three papers, measured anew, and a page that shows the claims beside them.

A figure is registered by the file that measures it, anywhere in this package.
"""
