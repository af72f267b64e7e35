"""What a worker process runs first, in the place of the program that started the engine: see `boot`."""

from vlens_cli.driver.hide import hide_broken_packages

hide_broken_packages()
