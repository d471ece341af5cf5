"""`python -m megasharp.cli`: the command line where the script `megasharp` is not installed."""

from megasharp.cli.main import main

if __name__ == "__main__":
    main()
