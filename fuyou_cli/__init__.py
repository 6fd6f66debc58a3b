"""fuyou: fine-tune models larger than memory, on one device, with every byte planned."""

__version__ = "0.1.0"
