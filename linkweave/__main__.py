"""`python -m linkweave`, for launchers such as torchrun: the command `linkweave`."""

from linkweave.bench.command.cli import main

if __name__ == "__main__":
    main()
