"""Elementwise operations of a decoder layer, each in one kernel."""
