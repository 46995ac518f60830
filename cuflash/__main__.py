"""``python -m cuflash``: the command line."""

from cuflash.cli import main

if __name__ == "__main__":
    main(prog_name="cuflash")
