"""`python -m tests.support.find_model NAME [REVISION]`: prints the folder of a hub's model, or why there is none."""

import sys

from services.families.prepare import find_servable
from shared.errors import ServingError


def main() -> None:
    """Finds one model."""
    name, revision = (*sys.argv[1:], "")[:2]
    try:
        print(find_servable(name, revision))
    except ServingError as error:
        print(type(error).__name__, error.message)


if __name__ == "__main__":
    main()
