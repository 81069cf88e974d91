"""Texts and conversations whose keys and values are kept from call to call, in memory and in files."""
