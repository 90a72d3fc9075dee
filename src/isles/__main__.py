"""`python -m isles` is `isles`."""

from isles.cli import main

if __name__ == "__main__":
    main()
