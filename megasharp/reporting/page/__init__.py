"""The HTML report: one file of one run or several that needs no network, or a page served on this machine."""
