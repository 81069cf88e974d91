"""Attention of packages that may be installed beside this one, used where it is measured to be faster."""
