"""One deed to all rows that match, by workers, a batch at a time, with its author, its pace and its progress."""
