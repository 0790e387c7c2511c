"""1-bit and 0/1 compressed optimizers for Horovod."""

__all__ = ["__version__"]

__version__ = "0.1.0"
