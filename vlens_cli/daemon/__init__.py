"""Between the shell and the engine. `client` is light: what it needs of torch and vLLM is imported when asked."""
