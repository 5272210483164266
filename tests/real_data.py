"""The one home of the question whether a real data set is there: `needs("fashion")`."""

import pytest

from recipes.sets import PATHS, data_folder


def needs(name):
    """The path of a data set; where it was not fetched, the test is skipped and names the command."""
    path = data_folder() / PATHS[name]
    if not path.exists():
        pytest.skip(f"needs real data: scripts/fetch_data {name}")
    return path
