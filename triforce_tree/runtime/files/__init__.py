"""Reads and writes files of the user: JSON documents, text files, and the cache folder."""
