"""Plans and measurements in the forms of other engines: read, judged and written."""
