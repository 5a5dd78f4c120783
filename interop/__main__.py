"""`python -m tercet.interop import|export ...`: the same as `tercet import` and `tercet export`."""

from tercet.cli import main

if __name__ == "__main__":
    main()
