"""Decoder layers under ``torch.compile``, and the backend that fuses their linear layers."""
