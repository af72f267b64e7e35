"""vlens: one-off questions about the inside of a language model, from the shell."""

__version__ = "0.1.0"
