"""`python -m vlens_cli` is `vlens`."""

from vlens_cli.cli.main import main

if __name__ == "__main__":
    main()
