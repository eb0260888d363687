"""Models in the shape that other programs expect, a module each; what they need beside this package is an extra."""
