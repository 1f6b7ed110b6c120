"""An HTML report about one or several runs."""
