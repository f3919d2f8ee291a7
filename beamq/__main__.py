"""`python -m beamq`: the same as the `beamq` command."""

from beamq.cli import main

if __name__ == "__main__":
    main()
