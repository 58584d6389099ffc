"""Makes `python -m baton_serve COMMAND …` the same as `baton COMMAND …`."""

from baton_serve.services.cli import main

if __name__ == "__main__":
    main()
