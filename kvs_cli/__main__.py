"""``python -m kvs_cli`` is the ``kvs`` command of a source tree that is not installed."""

from kvs_cli.entry import main

if __name__ == "__main__":
    main()
