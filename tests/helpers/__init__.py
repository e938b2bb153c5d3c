"""Small federations, models and comparisons that the tests share."""
