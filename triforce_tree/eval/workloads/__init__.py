"""Texts that branch as published work builds them: shapes, bytes on paper, attention and decoding."""
