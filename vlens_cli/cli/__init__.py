"""What runs in the user's shell: one file a command. Nothing here imports torch, numpy, vLLM or a hub client."""
