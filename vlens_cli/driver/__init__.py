"""Runs in the process that holds the engine, and in vLLM's workers: the only folder that may import torch and vLLM."""
