"""Warnings show the user's line; where they arise, other tests check it."""

import warnings

from cqm.warn import warn_user


def test_a_warning_is_shown_once_per_line_of_the_user():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            warn_user("a warning", DeprecationWarning)
        warn_user("a warning", DeprecationWarning)
    assert len(caught) == 2
    assert {(warning.category, warning.filename) for warning in caught} == {
        (DeprecationWarning, __file__)
    }
